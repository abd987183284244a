"""`jitney serve`: the endpoint in this process, the engine in its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shlex
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from jitney.engine.cli.display import Display, make_display
from jitney.engine.cli.flags import Parser, add_settings, config_from
from jitney.engine.cli.listen import base_url, listen, read_keys
from jitney.engine.config.layers import to_toml
from jitney.engine.config.platforms import check_platform
from jitney.engine.config.schema import Config
from jitney.engine.messages import Progress

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

    from jitney.engine.api.settings import ServerSettings
    from jitney.engine.checkpoints.sources import ModelSource
    from jitney.engine.process.client import EngineClient
    from jitney.engine.text.tokenizer import Tokenizer
    from jitney.engine.types import EngineInfo

log = logging.getLogger("jitney")

#: Most bytes of a request line with its headers.
HEADER_LIMIT = 1 << 16
#: Seconds that answers get to leave after the engine has stopped.
FAREWELL_S = 2
DASHBOARD = "/dashboard"


def run(arguments: Sequence[str]) -> int:
    """Serve until told to stop. Exit status: 0 after a drain, 128 + its number after a second
    signal, else 1.
    """
    parser = Parser(
        "serve", "Serve a model over HTTP (OpenAI-compatible), with in-flight batching."
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the settings as TOML and exit"
    )
    add_settings(parser)
    args = parser.parse(arguments)
    config = config_from(args)
    if args.print_config:
        print(to_toml(config), end="")
        return 0
    return start(config)


def start(config: Config) -> int:
    """Check what can be checked at once (platform, keys, port), then load and serve."""
    check_platform(config.engine.platform)
    keys = read_keys(config.server)
    with contextlib.closing(listen(config.server.host, config.server.port)) as bound:
        return asyncio.run(Server(config, keys, bound, make_display()).serve())


class Server:
    """One run of `jitney serve`: the parts, and the order in which they come and go."""

    def __init__(
        self, config: Config, keys: tuple[str, ...], bound: socket.socket, display: Display
    ):
        from jitney.engine.process.supervisor import ProcessClient
        from jitney.engine.process.trace_recorder import Recorder, recording

        self.config = config
        self.bound = bound
        self.display = display
        self.url = base_url(config.server, bound.getsockname()[1])
        self.client = ProcessClient(config, on_progress=display.progress)
        settings = limits(config, keys)
        self.recorder = Recorder(config.server.record) if config.server.record else None
        self.app = build_app(
            config,
            settings,
            recording(self.client, self.recorder) if self.recorder else self.client,
        )
        self.web = web_server(config, settings, self.app)
        self.signals: asyncio.Queue[int] = asyncio.Queue()

    async def serve(self) -> int:
        """Answer probes at once, load, serve, drain. Returns the exit status; raises JitneyError if
        loading fails.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.signals.put_nowait, number)
        web = asyncio.create_task(self.web.serve(sockets=[self.bound]))
        work = asyncio.create_task(self.work())
        stop = asyncio.create_task(self.signals.get())
        try:
            await asyncio.wait((web, work, stop), return_when=asyncio.FIRST_COMPLETED)
            status = await self.drain() if stop.done() else 1
            if work.done():
                work.result()  # the reason, as an exception
            return status
        finally:
            self.display.close()
            for task in (work, stop):
                task.cancel()
            await self.client.close()
            self.web.should_exit = True
            await asyncio.wait((web,), timeout=FAREWELL_S + 1)
            if self.recorder is not None:
                self.recorder.close()

    async def work(self) -> None:
        """Load everything, say so, and return only when the engine is lost for good."""
        source = await in_thread(lambda: find_model(self.config, self.display))
        await self.client.start()
        service = self.app.state.service
        service.model_name = source.name
        service.tokenizer = tokenizer = await in_thread(lambda: load_tokenizer(source))
        info = await self.client.wait_ready()
        self.display.close()
        for line in greeting(self.config, self.url, info, tokenizer):
            print(line, flush=True)
        await self.client.until("dead")
        await self.client.wait_ready()  # raises the reason

    async def drain(self) -> int:
        """Let running requests finish, at most drain_s seconds; a second signal ends everything at
        once.
        """
        service, limit = self.app.state.service, self.config.server.drain_s
        service.begin_drain()
        self.client.drain()
        log.info("stopping: running requests have %g s; a second signal stops at once", limit)
        done = asyncio.create_task(service.drained())
        again = asyncio.create_task(self.signals.get())
        await asyncio.wait((done, again), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        done.cancel()
        again.cancel()
        if again.done() and not again.cancelled():
            self.client.kill()
            self.web.force_exit = True
            return 128 + again.result()
        return 0


def limits(config: Config, keys: tuple[str, ...]) -> ServerSettings:
    """The [server] section as the endpoint takes it."""
    from jitney.engine.api.settings import ServerSettings, digest_key

    server = config.server
    return ServerSettings(
        api_keys=tuple(digest_key(key) for key in keys),
        hosts=server.hosts or None,
        body_limit=server.body_limit,
        header_timeout_s=server.read_timeout_s,
        body_timeout_s=server.read_timeout_s,
        request_timeout_s=server.request_timeout_s,
        stall_s=server.heartbeat_s,
        metrics_compat=server.metrics_compat,
        key_max_concurrent=server.key_max_concurrent,
        key_tokens_per_minute=server.key_tokens_per_minute,
    )


def build_app(config: Config, settings: ServerSettings, client: EngineClient) -> Starlette:
    """The endpoint and the page; the endpoint answers 503 until model and tokenizer are there."""
    from jitney.dashboard import dashboard_routes
    from jitney.engine.api.app import create_app

    def decode(ids: list[int]) -> str:
        tokenizer = app.state.service.tokenizer
        return tokenizer.decode(ids) if tokenizer is not None else ""

    routes = dashboard_routes(
        client,
        settings,
        DASHBOARD,
        config.engine,
        decode if config.server.dashboard_show_text else None,
    )
    # The page's own sign-in guards it: a browser cannot send a bearer key with a page.
    settings = replace(
        settings,
        public_prefixes=(DASHBOARD + "/",),
        public_paths=frozenset({DASHBOARD}),
    )
    app = create_app(client, None, settings, config.model.id, extra_routes=routes)
    return app


def web_server(config: Config, settings: ServerSettings, app: Starlette) -> uvicorn.Server:
    """uvicorn with bounded headers; signals are ours, because a drain is more than closing
    connections.
    """
    import uvicorn

    from jitney.engine.api.protocol import http_protocol

    class WebServer(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return WebServer(
        uvicorn.Config(
            app,
            http=http_protocol(settings),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=max(1, round(config.server.keep_alive_s)),
            timeout_graceful_shutdown=FAREWELL_S,
            h11_max_incomplete_event_size=HEADER_LIMIT,
        )
    )


def find_model(config: Config, display: Display) -> ModelSource:
    """The model's files, fetched if need be. Raises ModelError."""
    from jitney.engine.checkpoints.sources import resolve

    return resolve(
        config.model.id,
        revision=config.model.revision or None,
        progress=lambda *news: display.progress(Progress(*news)),
    )


def load_tokenizer(source: ModelSource) -> Tokenizer:
    from jitney.engine.text.tokenizer import load_tokenizer

    return load_tokenizer(source)


async def in_thread[T](work: Callable[[], T]) -> T:
    """Run blocking work on a thread that the program's end does not wait for, such as a
    download.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error else future.set_result(value)  # pyright: ignore[reportArgumentType]

    def body() -> None:
        value, error = None, None
        try:
            value = work()
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=body, daemon=True).start()
    return await future


def greeting(config: Config, url: str, info: EngineInfo, tokenizer: Tokenizer) -> Iterator[str]:
    """What a person wants to know now: what runs, a line that works as it stands, and where the
    page is.
    """
    narrow = [
        f"{name} {kept}, "
        for name, kept in (("weights", info.weights), ("KV", info.kv_dtype))
        if kept not in ("", info.dtype)
    ]
    yield (
        f"Jitney serves {info.model} ({info.dtype}, {''.join(narrow)}{info.kernels} kernels on "
        f"{info.device}): "
        f"{info.seats} seats, {info.pages * info.page_size:,} tokens of KV memory, context "
        f"{info.context_length:,}"
    )
    if info.kernels_out:
        yield (
            f"  WRONG HERE: {', '.join(info.kernels_out)} of the {info.kernels} kernels; the "
            "slower reference "
            "serves in their place (jitney doctor says more)"
        )
    yield f"  endpoint  {url}/v1"
    yield f"  try       {curl_line(config, url, info.model, chat=tokenizer.has_chat_template)}"
    yield f"  page      {url}{DASHBOARD}"


def curl_line(config: Config, url: str, model: str, *, chat: bool) -> str:
    """A shell command that asks the running endpoint for a few words."""
    what = (
        {"messages": [{"role": "user", "content": "Say hello."}]} if chat else {"prompt": "Hello"}
    )
    body = json.dumps({"model": model, **what, "max_tokens": 32})
    server, key = config.server, ""
    if server.api_key_file:
        first_line = f"grep -m1 '^[^#]' {shlex.quote(server.api_key_file)}"
        key = f' -H "authorization: Bearer $({first_line})"'
    elif server.api_keys:
        key = ' -H "authorization: Bearer ${JITNEY_API_KEYS%%,*}"'
    route = "chat/completions" if chat else "completions"
    return f"curl {url}/v1/{route} -H 'content-type: application/json'{key} -d {shlex.quote(body)}"
