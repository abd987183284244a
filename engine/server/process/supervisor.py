"""Keeps a core process running: starts another one when it dies or hangs. Everything here runs on
one asyncio loop, and nothing imports jax.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

import zmq

from jitney.engine.common import messages
from jitney.engine.common.engine_info import EngineInfo, EngineState
from jitney.engine.common.errors import EngineDead
from jitney.engine.config import Config
from jitney.engine.server.process.counters import EngineCounters
from jitney.engine.server.process.faults import CoreEnd, RestartPolicy
from jitney.engine.server.process.link import CoreLink, LinkRuntime
from jitney.engine.server.process.watchdog import Watchdog

_log = logging.getLogger("jitney.process")

#: Seconds to wait for the last messages of a dead core, and for a core to end when asked.
_LAST_MESSAGES_S = 0.1
_SHUTDOWN_S = 5.0
#: Seconds between two checks of a core's silence.
_CHECK_S = 0.25


def ignore(what: object) -> None:
    """A listener that does nothing."""


@dataclass(eq=False)
class CoreSupervisor:
    """Runs one core process after another. The subclass handles the requests."""

    config: Config
    _: KW_ONLY
    #: MODULE:FUNCTION that builds the core in its process. Tests pass one that needs no model.
    builder: str = "jitney.engine.core.build:build_engine"
    #: Called with each progress report of a start.
    on_progress: Callable[[messages.Progress], None] = ignore
    #: "dead" is final; `failure` says why.
    state: EngineState = "loading"
    #: None until the first core is ready.
    info: EngineInfo | None = None
    #: The newest progress report of the current start.
    progress: messages.Progress | None = None
    counters: EngineCounters = field(default_factory=EngineCounters)
    #: Why the engine is dead; empty before.
    failure: str = ""
    #: The leader of the engine has ended this host.
    dismissed: bool = False
    #: None while no core is running.
    _link: CoreLink | None = None
    _supervision: asyncio.Task[None] | None = None
    _closing: bool = False
    _draining: bool = False
    #: Replaced by a new event with each change of state.
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    #: time.monotonic() of the core's newest message.
    _alive_at: float = field(default_factory=time.monotonic)
    _watchdog: Watchdog = field(init=False)
    _restarts: RestartPolicy = field(init=False)
    #: None before the start and after the end.
    _runtime: LinkRuntime | None = None
    #: JSON; "" until it is known.
    _tokenizer: str = ""

    def __post_init__(self) -> None:
        server = self.config.server
        self._watchdog = Watchdog(server.step_timeout_s, server.start_timeout_s)
        self._restarts = RestartPolicy(
            max_restarts=server.max_restarts if server.restart else 0,
            several_hosts=self.config.engine.n_hosts > 1,
        )

    async def start(self) -> None:
        """Start the core process and return at once; the state is "loading"."""
        self._runtime = LinkRuntime()
        self._supervision = asyncio.create_task(self._supervise())

    def learn(self, tokenizer: str) -> None:
        """Give this core and later ones the tokenizer's JSON, which grammars need."""
        self._tokenizer = tokenizer
        link = self._ready_link
        if link is not None:
            self._teach(link)

    @property
    def _ready_link(self) -> CoreLink | None:
        """The link to a core that handles messages."""
        return self._link if self._link is not None and self._link.ready else None

    def _teach(self, link: CoreLink) -> None:
        """Send the tokenizer to a core, once."""
        if self._tokenizer and not link.learned:
            link.send(messages.TokenizerJson(self._tokenizer))
            link.learned = True

    async def until(self, *states: EngineState) -> EngineState:
        """Wait for one of `states`; returns it."""
        while self.state not in states:
            await self._changed.wait()
        return self.state

    async def wait_ready(self) -> EngineInfo:
        """The engine's info, once it is ready. Raises EngineDead if it cannot start."""
        await self.until("ready", "dead")
        if self.state == "dead" or self.info is None:
            raise EngineDead(self.failure)
        return self.info

    async def close(self) -> None:
        """Stop the core process; does nothing the second time."""
        self._closing = True
        if self._supervision is not None:
            link = self._ready_link
            if link is not None:
                link.send(messages.Shutdown())
                await asyncio.wait([self._supervision], timeout=_SHUTDOWN_S)
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None
        self._set_state("dead")

    def kill(self) -> None:
        if self._link is not None:
            self._link.kill()

    def _take_ready(self, link: CoreLink) -> None:
        """Called when a core can serve."""

    def _take_report(self, report: messages.StepReport) -> None:
        """Called with the report of each step."""

    def _take_drain_state(self, *, drained: bool) -> None:
        """Called when the engines that share experts drain, or have drained."""

    def _has_requests(self) -> bool:
        """Whether any request is open."""
        return False

    def _lose_core(self, end: CoreEnd) -> tuple[int, int]:
        """Called when a core ended and another will start; returns requests that go on and end."""
        return 0, 0

    def _lose_engine(self, end: CoreEnd) -> None:
        """Called when a core ended and no other will start."""

    async def _supervise(self) -> None:
        """Run cores until closed, or until starting another is hopeless."""
        while True:
            end = await self._run_core()
            if self._closing:
                return
            done = self._draining and not self._has_requests()
            delay = None if done else self._restarts.delay(end)
            if delay is None:
                self._give_up(end)
                return
            resumed, ended = self._lose_core(end)
            _log.error(
                "%s; starting it again in %.1f s (restart %d of at most %d in ten minutes); "
                "%d open requests go on in the new one, %d have ended",
                end.why,
                delay,
                len(self._restarts.restarts),
                self._restarts.max_restarts,
                resumed,
                ended,
            )
            self.counters.observe_restart(end.cause, resumed)
            self.progress = None  # was the dead core's
            if self._draining:
                self._set_state("draining")
            else:
                self._set_state("restarting" if self.info is not None else "loading")
            await asyncio.sleep(delay)

    def _give_up(self, end: CoreEnd) -> None:
        """Set the final state "dead"."""
        self.failure = end.why
        if end.lost_host and self._draining and not self._has_requests():
            self.dismissed = True
        if self._restarts.restarts:
            n_restarts = len(self._restarts.restarts)
            self.failure += f"; given up after {n_restarts} restarts in ten minutes"
        self._lose_engine(end)
        self._set_state("dead")

    async def _run_core(self) -> CoreEnd:
        """Start a core process and wait for its end."""
        try:
            return await self._run_link()
        except (OSError, zmq.ZMQError) as error:
            reason = error.strerror or str(error)
            return CoreEnd("not started", f"the engine process cannot be started: {reason}")

    async def _run_link(self) -> CoreEnd:
        """Start a core process and wait for its end. Raises OSError or ZMQError."""
        runtime = self._runtime
        assert runtime is not None  # `start` made it
        runtime.free_spare()
        numbers = {} if self.info is None else self.info.model.adapters
        async with runtime.open_link(self.config, self.builder, numbers) as link:
            self._link = link
            self._watchdog.core_starts()
            tasks = [
                asyncio.create_task(self._read(link)),
                asyncio.create_task(self._watch(link)),
            ]
            try:
                await link.process.wait()
                await asyncio.sleep(_LAST_MESSAGES_S)
            finally:
                for task in tasks:
                    task.cancel()
                self._link = None
                link.lost()
            return self._end_of(link)

    def _end_of(self, link: CoreLink) -> CoreEnd:
        """The end of a core, once its process has ended."""
        if link.left:
            return CoreEnd("left", link.left, link.ready)
        if link.fatal is not None:
            crashed = link.fatal.code != messages.Fatal.host_lost
            refused = link.fatal.code == messages.Fatal.refused
            return CoreEnd("failed", link.fatal.message, link.ready, crashed, refused)
        if link.hung and self._watchdog.others_overdue:
            names = ", ".join(f"host {number}" for number in link.awaits) or "another engine"
            why = (
                f"{names} took no part in a step for {self._watchdog.awaited:.0f} s, and the "
                "engine process, which waited for that, was killed"
            )
            return CoreEnd("hung", why, link.ready)
        if link.hung:
            why = f"the engine process said nothing for {self._watchdog.silence:.0f} s"
            why += f"{self._stage(link)} and was killed"
            return CoreEnd("hung", why, link.ready, crashed=True)
        status = link.process.returncode
        why = f"the engine process died ({_status_text(status)})"
        return CoreEnd("died", why, link.ready, crashed=status != -signal.SIGKILL)

    def _stage(self, link: CoreLink) -> str:
        """The progress of a core's start, as part of a sentence; "" for one that is ready."""
        if link.ready:
            return ""
        if self.progress is None:
            return " at the beginning of its start"
        return f" after {self.progress.stage} {self.progress.so_far}"

    async def _watch(self, link: CoreLink) -> None:
        """Kill a core that has been silent for too long. A check counts at most two intervals: this
        process may have been suspended.
        """
        before = time.monotonic()
        while True:
            await asyncio.sleep(_CHECK_S)
            now = time.monotonic()
            self._watchdog.waited(min(now - before, 2 * _CHECK_S))
            before = now
            if self._watchdog.overdue:
                link.hung = True
                link.kill()
                return

    async def _read(self, link: CoreLink) -> None:
        try:
            while True:
                self._take(link, await link.receive())
                await asyncio.sleep(0)  # `receive` does not yield while messages are there
        except Exception:  # otherwise requests would wait for ever
            _log.exception("lost track of the engine process")
            link.kill()

    def _keep_adapters(self, adapters: tuple[str, ...]) -> None:
        """Use these adapters, NAME=FOLDER each, for later cores."""
        model = self.config.model.model_copy(update={"adapters": adapters})
        self.config = self.config.model_copy(update={"model": model})

    def _take(self, link: CoreLink, message: messages.FromCore) -> None:
        self._alive_at = time.monotonic()
        self._watchdog.heard(awaits_others=isinstance(message, messages.WaitingFor))
        self._teach(link)  # before its first request
        match message:
            case messages.StepReport():
                self._take_report(message)
                for answer in message.answers:
                    link.answer(answer)
            case messages.FirstStep(step=step):
                self._watchdog.first_step(step)
            case messages.Progress():
                self.progress = message
                self.on_progress(message)
            case messages.Ready(info=info):
                self.info, link.ready = info, True
                if self._runtime is not None:
                    self._runtime.keep_spare()
                self._restarts.core_ready()
                self._watchdog.core_ready()
                self._take_ready(link)
                if self.state in ("loading", "restarting"):
                    self._set_state("ready")
            case messages.WaitingFor(hosts=hosts):
                link.awaits = hosts
            case messages.SeatMap() | messages.Done() | messages.AdaptersSet():
                link.answer(message)
            case messages.AdaptersFollowed(folders=folders):
                self._keep_adapters(tuple(f"{name}={each}" for name, each in folders.items()))
            case messages.Fatal(error=error):
                link.fatal = link.fatal or error  # the first error causes the others
            case messages.DrainState(drained=drained):
                self._take_drain_state(drained=drained)
            case messages.PeerLeft(reason=reason):
                link.left = reason
                self.dismissed = True
            case messages.Heartbeat(waiting=waiting):
                self.counters.observe_idle(waiting)

    def _set_state(self, state: EngineState) -> None:
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()

    def last_step_age(self) -> float:
        """Seconds since the core's newest message: a step, a heartbeat, progress of its start."""
        return time.monotonic() - self._alive_at


def _status_text(status: int | None) -> str:
    """A process's exit status in words; negative: the number of the signal that killed it."""
    if status is None:
        return "its status is not known"
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "a signal without a name"
    return f"killed by {name}, signal {-status}"
