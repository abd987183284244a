"""`jitney serve`: the endpoint in this process, the engine in its own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import shlex
import signal
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jitney.engine.common.terminal import visible
from jitney.engine.config import (
    FOR,
    Arguments,
    Command,
    Config,
    Flag,
    FlagGroup,
    KeptSizes,
    Layered,
    ServerSection,
    add_vllm_flags,
    check_platform,
    say,
    settings,
    values,
)
from jitney.engine.core import Display, make_display, placed
from jitney.engine.lab import ServerSizes
from jitney.engine.server import (
    FAREWELL_S,
    LIVE,
    AcceptedKeys,
    Equipment,
    FreshSettings,
    Reloader,
    at_a_start_only,
    base_url,
    check_adapter_names,
    check_tls,
    drain_status,
    limits,
    listen,
    raise_descriptor_limit,
    web_server,
)

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from jitney.engine.common.engine_info import EngineInfo, ModelInfo
    from jitney.engine.core import Tokenizer
    from jitney.engine.server import (
        AdapterNews,
        ApiKeys,
        ProcessClient,
        Recorder,
        ServerSettings,
        Tracing,
    )

_log = logging.getLogger("jitney")
#: Objects made between two looks of the garbage collector at the young ones, and seconds between
#: two at all of them.
_YOUNG_OBJECTS, _COLLECT_S = 2000, 60.0
_DASHBOARD = "/dashboard"
#: Where settings come from that were read again.
_REREAD = "read again"

#: Called before the settings are read again; may block.
before_rereading: list[Callable[[], None]] = []
#: Has the engine serve the adapters that are configured now.
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
    """Serve until told to stop. Exit status: 0 after a drain in which all requests finished, 128 +
    its number after a second signal, else 1.
    """
    parser = _COMMAND.parser()
    add_vllm_flags(parser)
    args = parser.parse(arguments, Arguments)
    layered = given = args.load_layers()
    chosen = [] if args.goal is None else [_filled_in(args.goal, layered)]
    layered = replace(layered, config=placed(layered.config, os.environ))
    measures = KeptSizes.are_for(layered)
    kept = ServerSizes(layered).kept()
    if kept is not None:
        chosen.append(str(kept))
        layered = kept.applied_to(layered)
    if args.print_config:
        _say_all(chosen)
        print(layered.to_toml(), end="")
        return 0
    if layered.config.engine.follows:
        return _start_following(layered.config, chosen)
    return _start(
        layered, chosen, partial(_reread, args, given), times_steps=measures and kept is None
    )


def _reread(args: Arguments, given: Layered, take_adapters: _TakeAdapters) -> FreshSettings:
    """The settings as file, environment and flags have them now. given: as they had them at the
    start. Raises ConfigError.
    """
    for catch_up in before_rereading:
        catch_up()
    before, fresh = given.config, args.load_layers().config
    if before.engine.n_hosts > 1:  # each host reads its own files, and all change together
        return FreshSettings(fresh.server, at_a_start_only(values(before), values(fresh)))
    changed = at_a_start_only(values(before), values(fresh), "adapters")
    return FreshSettings(fresh.server, changed, take_adapters=partial(take_adapters, fresh))


def _say_all(lines: Iterable[str]) -> None:
    for line in lines:
        say(line)


def _filled_in(goal: str, layered: Layered) -> str:
    """What `--for` set, in one line."""
    places = settings()
    values = []
    for name in layered.from_preset:
        section = getattr(layered.config, places[name].section)
        values.append(f"{places[name].flag} {getattr(section, places[name].key)}")
    return f"--for {goal} sets {', '.join(values) or 'nothing: all of it is given'}"


def _start_following(config: Config, chosen: Sequence[str]) -> int:
    """Check what can be checked at once, then follow the first host of the engine."""
    from jitney.engine.cli.follow import follow

    check_platform(config.engine.platform)
    _say_all(chosen)
    raise_descriptor_limit()
    return follow(config)


def _start(
    layered: Layered,
    chosen: Sequence[str],
    reread: Callable[[_TakeAdapters], FreshSettings],
    *,
    times_steps: bool,
) -> int:
    """Check what can be checked at once (platform, keys, port), say what was chosen for the user,
    then load and serve. A setting that is refused is one line, and the only one. times_steps: see
    `_Server`.
    """
    section = layered.config.server
    check_platform(layered.config.engine.platform)
    check_tls(section)
    keys = AcceptedKeys.of(section)
    _warn_of_closed_pages(keys)
    raise_descriptor_limit()
    with contextlib.closing(listen(section.host, section.port)) as bound:
        display = make_display(section.log_level)
        server = _Server(layered, keys, bound, display, reread, times_steps=times_steps)
        _say_all(chosen)
        return asyncio.run(server.serve())


def _warn_of_closed_pages(keys: AcceptedKeys) -> None:
    if keys.users and not keys.admins:
        _log.warning(
            "no administrator's key is set: metrics, slots, texts, traces, reports, the policy lab "
            "and other users' requests are closed to everybody (admin_key_file opens them)"
        )


class _Server:
    """One run of `jitney serve`: the parts, and the order in which they come and go."""

    def __init__(
        self,
        layered: Layered,
        keys: AcceptedKeys,
        bound: socket.socket,
        display: Display,
        reread: Callable[[_TakeAdapters], FreshSettings],
        *,
        times_steps: bool = False,
    ):
        from jitney.engine.server import ApiKeys, Connections, ProcessClient

        config = self.config = layered.config
        #: The listening socket, and its address as a client here writes it.
        self.bound = bound
        self.url = base_url(config.server, bound.getsockname()[1])
        self.display = display
        #: This machine's steps are timed once the engine serves, for the sizes of the next start.
        self.times_steps = times_steps
        #: The engine's process.
        self.client = ProcessClient(config, on_progress=display.progress)
        #: Writes down what traffic comes, if that is asked for.
        self.recorder = self._make_recorder(config.server.record)
        #: Makes spans for OpenTelemetry, if that is asked for.
        self.tracing = self._make_tracing() if config.server.otel else None
        settings = limits(config, keys)
        accepted = ApiKeys(settings)
        self.app = _build_app(config, settings, self.client, accepted)
        service = self.app.state.service
        service.tracing = self.tracing
        service.layered = layered
        self.equipment = Equipment(config, self.client, display)
        self.connections = Connections(settings)
        self.web = web_server(config, settings, self.app, self.connections)
        self.reload = service.reload = Reloader(
            config.server,
            partial(reread, self._take_adapters),
            accepted,
            self.connections,
            service,
            tls=lambda: self.web.config.ssl,
            on_taken=self._show_taken,
        )
        #: Numbers of the signals that came, but one that said nothing new.
        self.signals: asyncio.Queue[int] = asyncio.Queue()
        #: One has come; and an engine that shares experts with this one had one before.
        self._signalled = self._ends_with_others = False

    def _make_recorder(self, file: str) -> Recorder | None:
        from jitney.engine.server import Recorder

        if not file:
            return None
        recorder = Recorder(file, engine=lambda: self.client.info)
        self.client.history.listeners.append(recorder.ended)
        return recorder

    def _make_tracing(self) -> Tracing:
        from jitney.engine.server import Tracing

        tracing = Tracing()
        self.client.history.listeners.append(tracing.ended)
        return tracing

    async def serve(self) -> int:
        """Answer probes at once, load, serve, drain. Returns the exit status; raises JitneyError if
        loading fails.
        """
        self._catch_signals()
        web = asyncio.create_task(self.web.serve(sockets=[self.bound]))
        work = asyncio.create_task(self._work())
        stop = asyncio.create_task(self.signals.get())
        beside = [
            asyncio.create_task(work)
            for work in (_collect_regularly(), self._stop_with_others(), self._watch_disks())
        ]
        try:
            await asyncio.wait((web, work, stop), return_when=asyncio.FIRST_COMPLETED)
            status = await self._drain() if stop.done() else 1
            if work.done():
                work.result()  # the reason, as an exception
            return status
        finally:
            for task in (work, stop, *beside):
                task.cancel()
            await self._close(web)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._take_signal, number)
        self.reload.listen(self._take_signal)

    def _take_signal(self, number: int) -> None:
        """The first one begins a drain and the second one ends it; where others began the drain,
        the first one is no second.
        """
        is_news = self._signalled or not self._ends_with_others
        self._signalled = True
        if is_news:
            self.signals.put_nowait(number)

    async def _stop_with_others(self) -> None:
        """Engines that share experts end together: stop once one of them is told to."""
        await self.client.until_others_drain()
        if not self._signalled:
            _log.info("an engine that shares experts with this one stops, and all stop together")
            self._ends_with_others = True
            self.signals.put_nowait(signal.SIGTERM)

    def _show_taken(self, fresh: FreshSettings, keys: AcceptedKeys) -> None:
        """The settings that count now are those that /config shows."""
        service = self.app.state.service
        before: Layered = service.layered
        now = {name: getattr(fresh.server, name) for name in LIVE}
        now["adapters"] = self.client.config.model.adapters
        were = values(before.config)
        changed = {name: value for name, value in now.items() if value != were[name]}
        service.layered = before.with_values(changed, _REREAD)

    async def _take_adapters(self, config: Config) -> AdapterNews:
        """Have the engine serve those that are configured now. One that is not ready has read those
        that it has, or will.
        """
        from jitney.engine.server import AdapterNews

        adapters, before = config.model.adapters, self.client.config.model.adapters
        if adapters == before and (not adapters or self.client.state != "ready"):
            return AdapterNews()
        check_adapter_names(config, self.app.state.service.model_names)
        done = await self.client.set_adapters(adapters)
        return AdapterNews(added=done.added, removed=done.removed, replaced=done.replaced)

    async def _watch_disks(self) -> None:
        """Those that are written to while requests are answered; never returns."""
        from jitney.engine.server import watch_disks

        server = self.config.server
        folders = [server.data_folder]
        if server.record:
            folders.append(Path(server.record).absolute().parent)
        await watch_disks(folders, self.client.history.incidents.disk_full)

    async def _close(self, web: asyncio.Task[None]) -> None:
        self.display.close()
        await self.client.close()
        self.web.should_exit = True
        await asyncio.wait((web,), timeout=FAREWELL_S + 1)
        await self.equipment.close()
        for listener in filter(None, (self.recorder, self.tracing)):
            listener.close()

    async def _work(self) -> None:
        """Load everything, say so, and return only when the engine is lost for good; raises the
        reason, if it is missed.
        """
        service = self.app.state.service
        source = await self.equipment.find_model()
        service.model_names = self.config.server.served_model_name or (source.name,)
        tokenizer, info = await self.equipment.equip(service, source)
        _put_aside()
        self.display.close()
        for line in _greeting(self.config, self.url, info, tokenizer):
            print(visible(line), flush=True)
        timing = None
        if self.times_steps and source.config.encoder is None:
            sizes = ServerSizes(self.app.state.service.layered)
            timing = asyncio.create_task(sizes.time_behind(self.client))
        try:
            await self.client.until("dead")
        finally:
            if timing is not None:
                timing.cancel()
        if not self.client.dismissed:
            await self.client.wait_ready()  # raises the reason

    async def _drain(self) -> int:
        """Let running requests finish, at most drain_s seconds; a second signal ends everything at
        once. Returns the exit status.
        """
        limit = self.config.server.drain_s
        self._begin_drain(limit)
        status = await drain_status(self._drained(), self.signals, limit)
        if status > 128:
            self.client.kill()
            self.web.force_exit = True
        elif status:
            _log.warning("%g s are over: requests that still run are cut off (draining)", limit)
        return status

    async def _drained(self) -> None:
        """No request is open, here and at engines that share experts with this one."""
        await self.app.state.service.drained()
        await self.client.drained_together()

    def _begin_drain(self, limit: float) -> None:
        self.app.state.service.begin_drain()
        self.connections.hurry()
        self.client.drain()
        _log.info("stopping: running requests have %g s; a second signal stops at once", limit)


def _put_aside() -> None:
    """Modules and tokenizer live for ever: a collection that looked at them would hold the event
    loop for 60 ms. The collector looks at young objects by itself, and at all of them only when
    `_collect_regularly` says so.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 10, 1_000_000)


async def _collect_regularly() -> None:
    """By the clock: with thousands of requests in the history a full collection holds the event
    loop for 10 to 50 ms, and by the number of objects made it would come every few seconds.
    """
    while True:
        await asyncio.sleep(_COLLECT_S)
        gc.collect()


def _build_app(
    config: Config, settings: ServerSettings, client: ProcessClient, keys: ApiKeys
) -> Starlette:
    """The endpoint and the page; the endpoint answers 503 until model and tokenizer are there."""
    from jitney.dashboard import Dashboard
    from jitney.engine.lab import Lab
    from jitney.engine.server import create_app

    def decode(ids: list[int]) -> str:
        tokenizer = app.state.service.tokenizer
        return tokenizer.decode(ids) if tokenizer is not None else ""

    shown = decode if config.server.dashboard_show_text else None
    lab = Lab(client, lambda: client.config.engine)
    page = Dashboard(client, settings, lab=lab, decode=shown, keys=keys)
    own = settings.with_page(_DASHBOARD)
    routes = page.mounted(_DASHBOARD)
    app = create_app(client, None, own, config.model.id, extra_routes=routes, keys=keys)
    return app


def _greeting(config: Config, url: str, info: EngineInfo, tokenizer: Tokenizer) -> Iterator[str]:
    """What a person wants to know now: what runs, a line that works as it stands, and where the
    page is.
    """
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
        "slower reference serves in their place (jitney doctor says more)"
    )


def _serving(info: EngineInfo) -> str:
    room = f"{info.sizes.pages * info.sizes.page_size:,} tokens of KV memory"
    if info.model.encoder:
        room = f"steps of {info.sizes.token_budget:,} tokens"
    runs = f"{_formats(info)}, {info.kernels.label} kernels on {info.device.name}"
    return (
        f"Jitney serves {info.model.name} ({runs}): {info.sizes.seats} seats, {room}, "
        f"context {info.model.context_length:,}"
    )


def _formats(info: EngineInfo) -> str:
    """The dtype, and what is stored in another one."""
    computed = info.formats.dtype
    stored = {"weights": info.formats.weights, "KV": info.formats.kv_dtype}
    others = [f"{name} {dtype}" for name, dtype in stored.items() if dtype not in ("", computed)]
    return ", ".join([computed, *others])


def _curl_line(config: Config, url: str, model: ModelInfo, *, chat: bool) -> str:
    """A shell command that asks the running endpoint for a few words, or for what the model makes
    instead.
    """
    if not model.encoder:
        route, asked = _CHAT if chat else _TEXT
    else:
        route, asked = _SCORES if model.pooling == "classify" else _VECTOR
    name = (*config.server.served_model_name, model.name)[0]
    data = shlex.quote(json.dumps({"model": name, **asked}))
    key = _key_header(config.server)
    return f"curl {url}/v1/{route} -H 'content-type: application/json'{key} -d {data}"


#: Routes, and what the greeting asks of them.
_Asked = tuple[str, dict[str, object]]
_SAY_HELLO = [{"role": "user", "content": "Say hello."}]
_CHAT: _Asked = "chat/completions", {"max_tokens": 32, "messages": _SAY_HELLO}
_TEXT: _Asked = "completions", {"max_tokens": 32, "prompt": "Hello"}
_VECTOR: _Asked = "embeddings", {"input": "Hello"}
_SCORES: _Asked = "rerank", {"query": "Who says hello?", "documents": ["Hello.", "Goodbye."]}


def _key_header(server: ServerSection) -> str:
    """A flag of curl that gives the first accepted key without showing it."""
    for name in ("api", "admin"):
        file = getattr(server, f"{name}_key_file")
        if file:
            first_line = f"grep -m1 '^[^#]' {shlex.quote(file)}"
            return f' -H "authorization: Bearer $({first_line})"'
        if getattr(server, f"{name}_keys"):
            variable = f"JITNEY_{name.upper()}_KEYS"
            return f' -H "authorization: Bearer ${{{variable}%%,*}}"'
    return ""
