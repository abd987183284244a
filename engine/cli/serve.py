"""`jitney serve`: runs the HTTP server in this process and the engine in another."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import shlex
import signal
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jitney.engine.common.display import Display, make_display
from jitney.engine.common.machine import raise_descriptor_limit
from jitney.engine.common.platforms import check_platform
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.terminal import say, visible
from jitney.engine.config import (
    FOR,
    Arguments,
    Command,
    Config,
    Flag,
    FlagGroup,
    ResolvedConfig,
    ServerSection,
)
from jitney.engine.core import placed
from jitney.engine.lab import ServerSizes
from jitney.engine.server import Equipment, FreshSettings, HttpServer

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from jitney.engine.common.engine_info import EngineInfo, ModelInfo
    from jitney.engine.core import Tokenizer
    from jitney.engine.server import (
        AdapterNews,
        ApiKeys,
        ProcessClient,
        ServerSettings,
    )

_log = logging.getLogger("jitney")
#: New objects between two collections of the young generation; seconds between full collections.
_YOUNG_OBJECTS, _COLLECT_S = 2000, 60.0
_DASHBOARD = "/dashboard"
#: Origin of settings that were reloaded.
_REREAD = "read again"

#: Called before settings are reloaded; may block.
before_rereading: list[Callable[[], None]] = []
#: Makes the engine serve the adapters of a configuration.
type _TakeAdapters = Callable[[Config], Awaitable[AdapterNews]]

_PRINT_CONFIG = Flag.switch("--print-config", "print the settings as TOML and exit")
_COMMAND = Command(
    "serve",
    "Serve a model over HTTP (OpenAI-compatible), with in-flight batching. vLLM's common flags "
    "are understood too: docs/from_vllm.md.",
    [FlagGroup([_PRINT_CONFIG, FOR])],
    sections=Command.ALL_SECTIONS,
)


def run(arguments: Sequence[str]) -> int:
    """Serve until a signal. Exit status: 0 if all requests finished while draining, 128 + its
    number after a second signal, else 1.
    """
    parser = _COMMAND.parser()
    if any(word.startswith("-") for word in arguments):
        from jitney.engine.cli.vllm_flags import add_vllm_flags

        add_vllm_flags(parser)
    args = parser.parse(arguments, Arguments)
    resolved = at_start = args.load_layers()
    notes: list[str] = []
    if args.goal is not None:
        filled_in = ", ".join(resolved.preset_flags) or "nothing: all its settings are given"
        notes.append(f"--for {args.goal} sets {filled_in}")
    resolved = replace(resolved, config=placed(resolved.config, os.environ))
    measured = ServerSizes(resolved)
    sizes = measured.kept()
    if sizes is not None:
        notes.append(str(sizes))
        resolved = sizes.applied_to(resolved)
    if args.print_config:
        _say_all(notes)
        print(resolved.to_toml(), end="")
        return 0
    if resolved.config.engine.follows:
        return _start_following(resolved.config, notes)
    return _start(
        resolved,
        notes,
        partial(_reread, args, at_start),
        times_steps=measured.used and sizes is None,
    )


def _reread(
    args: Arguments, at_start: ResolvedConfig, take_adapters: _TakeAdapters
) -> FreshSettings:
    """Read the settings again from file, environment and flags. Raises ConfigError."""
    for catch_up in before_rereading:
        catch_up()
    fresh = args.load_layers()
    live, adapters = ("adapters",), fresh.config
    if at_start.config.engine.data_parallel > 1:
        # Adapters cannot change, but changed files are named.
        live, adapters = (), at_start.config
    return FreshSettings.of(
        fresh.config.server,
        at_start.values,
        fresh.values,
        *live,
        take_adapters=partial(take_adapters, adapters),
    )


def _say_all(lines: Iterable[str]) -> None:
    for line in lines:
        say(line)


def _start_following(config: Config, notes: Sequence[str]) -> int:
    """Check the platform, then follow the first host of the engine."""
    from jitney.engine.cli.follow import follow

    check_platform(config.engine.platform)
    _say_all(notes)
    raise_descriptor_limit()
    return follow(config)


def _start(
    resolved: ResolvedConfig,
    notes: Sequence[str],
    reread: Callable[[_TakeAdapters], FreshSettings],
    *,
    times_steps: bool,
) -> int:
    """Check platform, keys and port, print notes on chosen settings, then load and serve.

    A refused setting prints one line and nothing else. times_steps: see `_Server`.
    """
    section = resolved.config.server
    check_platform(resolved.config.engine.platform)
    http = HttpServer.of(section)
    _warn_of_closed_pages(http.settings)
    with http.listening():
        display = make_display(section.log_level)
        server = _Server(resolved, http, display, reread, times_steps=times_steps)
        _say_all(notes)
        return asyncio.run(server.serve())


def _warn_of_closed_pages(settings: ServerSettings) -> None:
    if settings.api_keys and not settings.admin_keys:
        _log.warning(
            "no administrator's key is set: no client can see metrics, slots, texts, traces, "
            "reports, the policy lab or other users' requests (set admin_key_file)"
        )


class _Server:
    def __init__(
        self,
        resolved: ResolvedConfig,
        http: HttpServer,
        display: Display,
        reread: Callable[[_TakeAdapters], FreshSettings],
        *,
        times_steps: bool = False,
    ):
        config = self.config = resolved.config
        self.http = http
        self.display = display
        #: Whether to time this machine's steps while serving, to choose sizes for the next start.
        self.times_steps = times_steps
        self.equipment = Equipment(config, display)
        self.client = self.equipment.client
        self.app = _build_app(config, http.settings, self.client, http.accepted)
        service = self.app.state.service
        service.observe_requests()
        service.resolved = resolved
        http.serve_app(self.app)
        http.reloads(
            service,
            partial(reread, partial(self.equipment.take_adapters, service)),
            self._show_taken,
        )
        #: A signal was received; another engine that shares the experts has begun the drain.
        self._signalled = self._ends_with_others = False

    async def serve(self) -> int:
        """Answer probes at once, load, serve, drain; returns the exit status.

        Raises JitneyError if loading fails.
        """
        server = self.config.server
        folders = [server.data_folder]
        if server.record:
            folders.append(Path(server.record).absolute().parent)
        try:
            return await self.http.run(
                self._work(),
                self._drain,
                folders,
                self.client.history.incidents.disk_full,
                self._take_signal,
                (_collect_regularly(), self._stop_with_others()),
            )
        finally:
            await self._close()

    def _take_signal(self, number: int) -> None:
        """Queue a signal: the first begins the drain, the second ends it. If another engine began
        the drain, this server's first signal does not count as the second.
        """
        counts = self._signalled or not self._ends_with_others
        self._signalled = True
        if counts:
            self.http.signals.put_nowait(number)

    async def _stop_with_others(self) -> None:
        """Stop when another engine that shares the experts stops."""
        await self.client.until_others_drain()
        if not self._signalled:
            _log.info("an engine that shares experts with this one stops; all of them stop")
            self._ends_with_others = True
            self.http.signals.put_nowait(signal.SIGTERM)

    def _show_taken(self, live: JsonDict, _: tuple[str, ...]) -> None:
        service = self.app.state.service
        before: ResolvedConfig = service.resolved
        new = live | {"adapters": self.client.config.model.adapters}
        old = before.values
        changed = {name: value for name, value in new.items() if value != old[name]}
        service.resolved = before.with_values(changed, _REREAD)

    async def _close(self) -> None:
        self.display.close()
        await self.client.close()
        await self.http.close()
        await self.equipment.close()
        self.app.state.service.end_observing()

    async def _work(self) -> None:
        """Load, print the greeting, wait for the engine's end; raises why unless dismissed."""
        service = self.app.state.service
        source = await self.equipment.find_model()
        service.model_names = self.config.server.served_model_name or (source.name,)
        tokenizer, info = await self.equipment.equip(service, source)
        _freeze_objects()
        self.display.close()
        for line in _greeting(self.config, self.http.url, info, tokenizer):
            print(visible(line), flush=True)
        timing = None
        if self.times_steps and source.config.encoder is None:
            sizes = ServerSizes(self.app.state.service.resolved)
            timing = asyncio.create_task(sizes.time_behind(self.client))
        try:
            await self.client.until("dead")
        finally:
            if timing is not None:
                timing.cancel()
        if not self.client.dismissed:
            await self.client.wait_ready()  # raises the reason

    async def _drain(self) -> int:
        """Let requests finish for drain_s seconds; a second signal ends them. -> exit status."""
        self.app.state.service.begin_drain()
        self.http.connections.hurry()
        self.client.drain()
        status = await self.http.drained(self._drained())
        if status > 128:
            self.client.kill()
        elif status:
            limit = self.config.server.drain_s
            _log.warning("draining ends after %g s: running requests are aborted", limit)
        return status

    async def _drained(self) -> None:
        """Wait until no request is open here or at engines that share experts with this one."""
        await self.app.state.service.drained()
        await self.client.drained_together()


def _freeze_objects() -> None:
    """Exclude modules and tokenizer from garbage collection, where scanning them would block the
    event loop for 60 ms. Full collections are left to `_collect_regularly`.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 10, 1_000_000)


async def _collect_regularly() -> None:
    """Run full garbage collections by the clock. One blocks the event loop for 10 to 50 ms with
    thousands of requests in the history; by object count they would run every few seconds.
    """
    while True:
        await asyncio.sleep(_COLLECT_S)
        gc.collect()


def _build_app(
    config: Config, settings: ServerSettings, client: ProcessClient, keys: ApiKeys
) -> Starlette:
    """The endpoint and the page; the endpoint answers 503 until model and tokenizer are loaded."""
    from jitney.dashboard import Dashboard
    from jitney.engine.lab import Lab
    from jitney.engine.server import create_app

    def decode(ids: list[int]) -> str:
        tokenizer = app.state.service.tokenizer
        return tokenizer.decode(ids) if tokenizer is not None else ""

    shown = decode if config.server.dashboard_show_text else None
    lab = Lab(client, lambda: client.config.engine)
    page = Dashboard(
        client,
        settings,
        lab=lab,
        decode=shown,
        keys=keys,
        service=lambda: app.state.service,
    )
    own = settings.with_page(_DASHBOARD)
    routes = page.mounted(_DASHBOARD)
    app = create_app(client, None, own, config.model.id, extra_routes=routes, keys=keys)
    return app


def _greeting(config: Config, url: str, info: EngineInfo, tokenizer: Tokenizer) -> Iterator[str]:
    """Lines for the user: what is served, a curl command to try it, and the page's URL."""
    yield _serving(info)
    if info.kernels.out:
        yield _wrong_kernels(info)
    yield f"  endpoint  {url}/v1"
    call = _curl_line(config, url, info.model, chat=tokenizer.has_chat_template)
    yield f"  try       {call}"
    yield f"  page      {url}{_DASHBOARD}"


def _wrong_kernels(info: EngineInfo) -> str:
    return (
        f"  WRONG HERE: {', '.join(info.kernels.out)} of the {info.kernels.label} kernels; the "
        "slower reference kernels replace them (see jitney doctor)"
    )


def _serving(info: EngineInfo) -> str:
    capacity = f"{info.sizes.pages * info.sizes.page_size:,} tokens of KV memory"
    if info.model.encoder:
        capacity = f"steps of {info.sizes.token_budget:,} tokens"
    runs = f"{_formats(info)}, {info.kernels.label} kernels on {info.device.name}"
    return (
        f"Jitney serves {info.model.name} ({runs}): {info.sizes.seats} seats, {capacity}, "
        f"context {info.model.context_length:,}"
    )


def _formats(info: EngineInfo) -> str:
    """The dtype, and the formats of weights and KV where they differ."""
    dtype = info.formats.dtype
    stored = {"weights": info.formats.weights, "KV": info.formats.kv_dtype}
    others = [f"{name} {format_}" for name, format_ in stored.items() if format_ not in ("", dtype)]
    return ", ".join([dtype, *others])


def _curl_line(config: Config, url: str, model: ModelInfo, *, chat: bool) -> str:
    if not model.encoder:
        route, body = _CHAT if chat else _TEXT
    else:
        route, body = _SCORES if model.pooling == "classify" else _VECTOR
    name = (*config.server.served_model_name, model.name)[0]
    data = shlex.quote(json.dumps({"model": name, **body}))
    key = _key_header(config.server)
    return f"curl {url}/v1/{route} -H 'content-type: application/json'{key} -d {data}"


#: A route and the body of a small request.
type _Example = tuple[str, dict[str, object]]
_SAY_HELLO = [{"role": "user", "content": "Say hello."}]
_CHAT: _Example = "chat/completions", {"max_tokens": 32, "messages": _SAY_HELLO}
_TEXT: _Example = "completions", {"max_tokens": 32, "prompt": "Hello"}
_VECTOR: _Example = "embeddings", {"input": "Hello"}
_SCORES: _Example = "rerank", {"query": "Who says hello?", "documents": ["Hello.", "Goodbye."]}


def _key_header(server: ServerSection) -> str:
    """The flag of curl that sends the first accepted key without showing it."""
    for name in ("api", "admin"):
        file = getattr(server, f"{name}_key_file")
        if file:
            first_line = f"grep -m1 '^[^#]' {shlex.quote(file)}"
            return f' -H "authorization: Bearer $({first_line})"'
        if getattr(server, f"{name}_keys"):
            variable = f"JITNEY_{name.upper()}_KEYS"
            return f' -H "authorization: Bearer ${{{variable}%%,*}}"'
    return ""
