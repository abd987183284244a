"""Supervises the core process for the API process: start it, talk to it, notice its death, start
the next one and give it what the dead one had.

Single-threaded: everything here runs on one asyncio loop. Nothing here imports jax.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import numpy as np
import zmq
from msgspec.structs import replace

from jitney.engine.common import messages
from jitney.engine.common.engine_info import EngineInfo, EngineState
from jitney.engine.common.errors import EngineDead, ErrorInfo, RequestError
from jitney.engine.common.history import History
from jitney.engine.common.outputs import FinishReason, SequenceOutput
from jitney.engine.common.records import step_of
from jitney.engine.common.requests import EngineRequest
from jitney.engine.config import Config
from jitney.engine.server.process.client import OutputListener
from jitney.engine.server.process.counters import EngineCounters
from jitney.engine.server.process.link import CoreLink, Workshop
from jitney.engine.server.process.quarantine import Quarantine
from jitney.engine.server.process.stream import Stream
from jitney.engine.server.process.suspicion import Suspicion
from jitney.engine.server.process.watchdog import Watchdog

_log = logging.getLogger("jitney.process")

#: Restarts are counted within this many seconds.
_RESTART_WINDOW_S = 600.0
#: A core that was ready for so many seconds is no sign that cores cannot live here: restarts before
#: it do not count.
_PROVEN_S = 60.0
#: The pause before a restart doubles from the first to the second number while cores end in the
#: same way, each within `_LIVED_S` seconds of being ready.
_BACKOFF_S = (0.5, 30.0)
_LIVED_S = 5.0
#: Seconds to wait for a SeatMap, for the last messages of a dead core, and for a core to leave when
#: asked.
_SEAT_MAP_S = 2.0
#: Seconds to wait for a core to free its device's memory, or to take it again: some 100 GB.
_SLEEP_S = 120.0
_LAST_MESSAGES_S = 0.1
_SHUTDOWN_S = 5.0
#: Seconds between two looks at a core's silence.
_LOOK_S = 0.25
#: Seconds after its deadline at which a request is ended here if the core has not done so.
_DEADLINE_GRACE_S = 1.0
_REFUSALS = {
    "loading": "the model is still loading",
    "restarting": "the engine is being started again after it died",
    "sleeping": "the engine is asleep: POST /wake_up wakes it",
    "draining": "the server is shutting down",
    "engine_dead": "the engine is gone",
}
#: States that pass by themselves, soon.
_PASSING = ("loading", "restarting", "draining")
_DEADLINE = ErrorInfo("deadline_exceeded", "the request's deadline passed before it was done")
_CUT_OFF = ErrorInfo(
    "draining", "the server is shutting down, and this request was not done in time"
)
_LOST = ErrorInfo("engine_dead", "the engine stopped before this request was done")
_GUILTY = ErrorInfo(
    "request_failed", "the engine stopped each time it had this request, which is not tried again"
)

#: Why a core ended: by itself or killed from outside; after saying why; killed for its silence;
#: with the first host of its engine, in order; or it could not even be started.
_Cause = Literal["died", "failed", "hung", "left", "not started"]


@dataclass(frozen=True, slots=True)
class _CoreEnd:
    """How the life of a core ended."""

    cause: _Cause
    #: One line for the log, and for who asks why the engine is dead.
    why: str
    #: It had got ready.
    ready: bool = False
    #: One of its requests may be the reason: nobody killed it from outside.
    crashed: bool = False
    #: It refused its model, its settings or this machine.
    refused: bool = False

    @property
    def lost_host(self) -> bool:
        """It ended because another host of its engine, or of one that it shares experts with, is
        gone.
        """
        return self.cause == "failed" and not self.crashed

    def repeats(self, earlier: _CoreEnd | None) -> bool:
        """Whether an earlier core ended in the same way."""
        return earlier is not None and (self.cause, self.crashed) == (
            earlier.cause,
            earlier.crashed,
        )

    @property
    def summary(self) -> str:
        """One line for the page, without an exception's text."""
        if self.cause == "failed":
            return "the engine process stopped after an error, which the log names"
        return self.why


def _nobody(output: SequenceOutput) -> None:
    """Listens to what is left of a request that was forgotten."""


def _ignore(what: object) -> None:
    pass


@dataclass(eq=False)
class ProcessClient:
    """`jitney.engine.server.process.client.EngineClient` over a core process."""

    config: Config
    _: KW_ONLY
    #: Where the core's process finds what it runs, MODULE:FUNCTION; a test names one that needs no
    #: model.
    builder: str = "jitney.engine.core.build:build_engine"
    #: Called with each progress of the start.
    on_progress: Callable[[messages.Progress], None] = _ignore
    #: Called with True when a request is open and none was, with False when the last one has ended.
    on_busy: Callable[[bool], None] = _ignore
    #: "dead" is for good; `failure` says why.
    state: EngineState = "loading"
    #: None until first ready.
    info: EngineInfo | None = None
    #: The latest of the start.
    progress: messages.Progress | None = None
    counters: EngineCounters = field(default_factory=EngineCounters)
    history: History = field(init=False)
    #: Empty while it lives.
    failure: str = ""
    #: It is dead because the first host of the engine has ended in order, or because another host
    #: is gone and there was nothing left to do.
    dismissed: bool = False
    #: Open requests by id.
    _streams: dict[str, Stream] = field(default_factory=dict)
    #: Numbers of questions to the core.
    _tickets: Iterator[int] = field(default_factory=itertools.count)
    #: Set when a request has ended.
    _stream_closed: asyncio.Event = field(default_factory=asyncio.Event)
    #: None while no core is running.
    _link: CoreLink | None = None
    _supervision: asyncio.Task[None] | None = None
    _closing: bool = False
    _draining: bool = False
    #: Of engines that share experts: another one was told to end; all of them have drained; and
    #: this one has, and said so.
    _others_drain: asyncio.Event = field(default_factory=asyncio.Event)
    _all_drained: asyncio.Event = field(default_factory=asyncio.Event)
    _has_drained: bool = False
    #: Set, and made anew, with each change of state.
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    #: When the core was last heard of, time.monotonic().
    _alive_at: float = field(default_factory=time.monotonic)
    _watchdog: Watchdog = field(init=False)
    #: What each link to a core needs; None before the start and after the end.
    _workshop: Workshop | None = None
    _quarantine: Quarantine = field(default_factory=Quarantine)
    #: JSON; "" until it is known.
    _tokenizer: str = ""
    _suspicion: Suspicion = field(default_factory=Suspicion)
    #: When cores were started again, seconds; those that count.
    _restarts: deque[float] = field(default_factory=deque)
    #: When the newest core got ready, seconds.
    _ready_at: float = 0.0
    #: How the core before this one ended; None: this is the first.
    _last_end: _CoreEnd | None = None
    #: Cores that ended like that in a row, each soon.
    _repeats: int = 0

    def __post_init__(self) -> None:
        server = self.config.server
        self.history = History(keep_tokens=server.dashboard_show_text)
        self._watchdog = Watchdog(server.step_timeout_s, server.start_timeout_s)

    async def start(self) -> None:
        """Start the core process and return at once; it is `loading`."""
        self._workshop = Workshop()
        self._supervision = asyncio.create_task(self._supervise())

    def learn(self, tokenizer: str) -> None:
        """Have this core and those after it hold answers to grammars. tokenizer: the model's, as
        the `tokenizers` library writes it (JSON).
        """
        self._tokenizer = tokenizer
        link = self._ready_link
        if link is not None:
            self._teach(link)

    @property
    def _ready_link(self) -> CoreLink | None:
        """To a core that can hear us."""
        return self._link if self._link is not None and self._link.ready else None

    def _teach(self, link: CoreLink) -> None:
        """Tell a core that can hear us the tokenizer, once."""
        if self._tokenizer and not link.learned:
            link.send(messages.TokenizerJson(self._tokenizer))
            link.learned = True

    async def until(self, *states: EngineState) -> EngineState:
        """Wait for one of `states`; returns it."""
        while self.state not in states:
            await self._changed.wait()
        return self.state

    async def wait_ready(self) -> EngineInfo:
        """What is running, once it runs. Raises EngineDead with the reason if the core cannot
        start.
        """
        await self.until("ready", "dead")
        if self.state == "dead" or self.info is None:
            raise EngineDead(self.failure)
        return self.info

    async def close(self) -> None:
        """Stop the core process and end every open request; does nothing the second time."""
        self._closing = True
        self._end_streams(_CUT_OFF)
        if self._supervision is not None:
            link = self._ready_link
            if link is not None:
                link.send(messages.Shutdown())
                await asyncio.wait([self._supervision], timeout=_SHUTDOWN_S)
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
        if self._workshop is not None:
            self._workshop.close()
            self._workshop = None
        self._set_state("dead")

    def kill(self) -> None:
        """End the core process without asking it."""
        if self._link is not None:
            self._link.kill()

    async def _supervise(self) -> None:
        """One core process after another, until closed or past hope."""
        while True:
            end = await self._run_core()
            if self._closing:
                return
            delay = self._restart_delay(end)
            if delay is None:
                self._give_up(end)
                return
            went_on, ended = self._lose_core(end)
            _log.error(
                "%s; starting it again in %.1f s (restart %d of at most %d in ten minutes); "
                "%d open requests go on in the new one, %d have ended",
                end.why,
                delay,
                len(self._restarts),
                self.config.server.max_restarts,
                went_on,
                ended,
            )
            if self.info is not None:
                self.history.outage_began(end.summary, n_resumed=went_on, n_lost=ended)
            self.counters.observe_restart(end.cause, went_on)
            self.progress = None  # it was the dead core's
            self._set_state(self._state_without_core())
            await asyncio.sleep(delay)

    def _state_without_core(self) -> EngineState:
        """While the next one is awaited."""
        if self._draining:
            return "draining"
        return "restarting" if self.info is not None else "loading"

    def _restart_delay(self, end: _CoreEnd) -> float | None:
        """Seconds to wait before the next start, or None to give up."""
        server, now, restarts = self.config.server, time.monotonic(), self._restarts
        if end.ready and now - self._ready_at >= _PROVEN_S:
            restarts.clear()
        while restarts and now - restarts[0] > _RESTART_WINDOW_S:
            restarts.popleft()
        if (
            self._is_hopeless(end)
            or end.cause == "left"
            or not server.restart
            or (self._draining and not self._streams)
            or len(restarts) >= server.max_restarts
        ):
            return None
        restarts.append(now)
        lived = end.ready and now - self._ready_at >= _LIVED_S
        self._repeats = 0 if lived or not end.repeats(self._last_end) else self._repeats + 1
        self._last_end = end
        return min(_BACKOFF_S[0] * 2**self._repeats, _BACKOFF_S[1])

    def _is_hopeless(self, end: _CoreEnd) -> bool:
        """Whether a core that ended before any was ready would end the same way again: it refused
        what it was given, such as a wrong model name, it made no progress for very long, or it
        failed with the words of the one before. Other hosts of the engine have ended with it, and
        are started again by whoever started them.
        """
        if self.info is not None or end.ready or end.cause == "died":
            return False
        if end.refused or end.cause == "hung" or self.config.engine.n_hosts > 1:
            return True
        return self._last_end is not None and self._last_end.why == end.why

    def _give_up(self, end: _CoreEnd) -> None:
        """The engine is dead for good."""
        self.failure = end.why
        if end.lost_host and self._draining and not self._streams:
            self.dismissed = True
        if self.info is not None:
            self.history.outage_began(end.summary, n_resumed=0, n_lost=len(self._streams))
        if self._restarts:
            self.failure += f"; given up after {len(self._restarts)} restarts in ten minutes"
        self._end_streams(_LOST)
        self.history.core_lost("engine_dead")
        self.counters.observe_lost(0)
        self._set_state("dead")

    def _lose_core(self, end: _CoreEnd) -> tuple[int, int]:
        """The core is gone: its requests wait for the next one, or end. Returns how many of
        each.
        """
        n_open = len(self._streams)
        resume = self.config.server.on_core_death == "resume"
        if not resume:
            self._end_streams(_LOST)
        for stream in list(self._streams.values()):
            self._take_outputs(stream.asked_ends())
        guilty = None
        if end.crashed:
            guilty = self._suspicion.core_crashed(list(self._streams.values()))
        if guilty is not None:
            self._take_outputs(guilty.ends("error", _GUILTY))
        self.history.seats_lost()
        self.counters.observe_lost(sum(len(stream.open) for stream in self._streams.values()))
        return len(self._streams), n_open - len(self._streams)

    async def _run_core(self) -> _CoreEnd:
        """From the start of a core process to its end."""
        try:
            return await self._run_link()
        except (OSError, zmq.ZMQError) as error:
            reason = error.strerror or str(error)
            return _CoreEnd("not started", f"the engine process cannot be started: {reason}")

    async def _run_link(self) -> _CoreEnd:
        """As `_run_core`. Raises OSError or ZMQError if there is no way to start a process."""
        workshop = self._workshop
        assert workshop is not None  # `start` made it
        workshop.free_spare()
        async with workshop.open_link(self.config, self.builder) as link:
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

    def _end_of(self, link: CoreLink) -> _CoreEnd:
        """How a core ended, once its process has."""
        if link.left:
            return _CoreEnd("left", link.left, link.ready)
        if link.fatal is not None:
            crashed = link.fatal.code != messages.Fatal.host_lost
            refused = link.fatal.code == messages.Fatal.refused
            return _CoreEnd("failed", link.fatal.message, link.ready, crashed, refused)
        if link.hung and self._watchdog.others_overdue:
            return _CoreEnd("hung", self._why_others_hang(link), link.ready)
        if link.hung:
            why = f"the engine process said nothing for {self._watchdog.silence:.0f} s"
            why += f"{self._stage(link)} and was killed"
            return _CoreEnd("hung", why, link.ready, crashed=True)
        status = link.process.returncode
        why = f"the engine process died ({_how_it_ended(status)})"
        return _CoreEnd("died", why, link.ready, crashed=status != -signal.SIGKILL)

    def _why_others_hang(self, link: CoreLink) -> str:
        """One line for a core that was ended since others kept it waiting."""
        names = ", ".join(f"host {number}" for number in link.awaits) or "another engine"
        return (
            f"{names} took no part in a step for {self._watchdog.awaited:.0f} s, and the engine "
            "process, which waited for that, was killed"
        )

    def _stage(self, link: CoreLink) -> str:
        """How far a core's start has come, for a sentence; nothing of one that is ready."""
        if link.ready:
            return ""
        if self.progress is None:
            return " at the beginning of its start"
        return f" after {self.progress.stage} {self.progress.done} of {self.progress.total}"

    async def _watch(self, link: CoreLink) -> None:
        """Kill a core that has been silent for too long.

        While this process itself stands still it hears nothing, so each look counts as no more
        than two.
        """
        before = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            self._watchdog.waited(min(now - before, 2 * _LOOK_S))
            before = now
            if self._watchdog.overdue:
                link.hung = True
                link.kill()
                return

    async def _read(self, link: CoreLink) -> None:
        try:
            while True:
                self._take(link, await link.receive())
                await asyncio.sleep(0)  # `receive` lets nobody else run while messages are there
        except Exception:  # a message we cannot follow leaves requests hanging; a new core does not
            _log.exception("lost track of the engine process")
            link.kill()

    def _take(self, link: CoreLink, message: messages.FromCore) -> None:
        self._alive_at = time.monotonic()
        self._watchdog.heard(awaits_others=isinstance(message, messages.Awaiting))
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
                self._take_ready(link, info)
            case messages.Awaiting(hosts=hosts):
                link.awaits = hosts
            case messages.SeatMap() | messages.Done():
                link.answer(message)
            case messages.Fatal(error=error):
                link.fatal = link.fatal or error  # the first one is the reason of the others
            case messages.Parting(drained=True):
                self._all_drained.set()
            case messages.Parting():
                self._others_drain.set()
            case messages.Left(reason=reason):
                link.left = reason
                self.dismissed = True
            case messages.Tick(waiting=waiting):
                self.counters.observe_idle(waiting)

    def _take_ready(self, link: CoreLink, info: EngineInfo) -> None:
        """A core can serve: it gets the requests that one before it had."""
        if self._workshop is not None:
            self._workshop.keep_spare()
        self.info, link.ready = info, True
        self._ready_at = time.monotonic()
        self.history.core_ready(info)
        self._watchdog.core_ready()
        self._send_resumed(link, self._suspicion.core_ready(self._streams.values()))
        if self._draining:
            self._part(link)
        if self.state in ("loading", "restarting"):
            self._set_state("ready")

    def _send_resumed(self, link: CoreLink, streams: list[Stream]) -> None:
        """Have the core go on with these."""
        for stream in streams:
            link.send(messages.Add(stream.resumed()))

    def _take_report(self, report: messages.StepReport) -> None:
        record = self.history.take(report)
        if record is not None:
            self.counters.observe_step(record)
            self._watchdog.step_done(step_of(report.record), record)
        self.counters.observe_outputs(report.outputs)
        self.counters.observe_canary(report.canary)
        if report.grammars is not None:
            self.counters.observe_grammars(report.grammars)
        if report.predicted_wait is not None:
            self.counters.predicted_wait = report.predicted_wait
        self._deliver(report.outputs)

    def _take_outputs(self, outputs: list[SequenceOutput]) -> None:
        """Outputs made here, because no core will make them."""
        self.history.take(messages.StepReport(outputs))
        self._deliver(outputs)

    def _deliver(self, outputs: Iterable[SequenceOutput]) -> None:
        """Give outputs to those who wait for them."""
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                self._put(stream, output)

    def _put(self, stream: Stream, output: SequenceOutput) -> None:
        if output.error_code == "request_failed":
            self._quarantine.add(stream.request)
        stream.put(output)
        if not stream.open:
            self._close_stream(stream)
        self._go_on_after_trial(stream)

    def _go_on_after_trial(self, stream: Stream) -> None:
        """Something came of a request: if it is suspected, others may be given to the core now."""
        if stream is not self._suspicion.on_trial:
            return
        link = self._ready_link
        if link is not None:
            self._send_resumed(link, self._suspicion.progressed(stream))

    def _close_stream(self, stream: Stream) -> None:
        """Nothing more is to come of a request."""
        if stream.closed:
            return
        del self._streams[stream.id]
        self._stream_closed.set()
        if not self._streams:
            self.on_busy(False)
        stream.closed = True
        if stream.timer is not None:
            stream.timer.cancel()

    def _end_streams(self, error: ErrorInfo) -> None:
        """End every open request."""
        for stream in list(self._streams.values()):
            self._take_outputs(stream.ends("error", error))

    def _set_state(self, state: EngineState) -> None:
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()

    def drain(self) -> None:
        """Take no new requests; running ones go on. Engines that share experts with this one are
        told to drain, too.
        """
        self._draining = True
        if self.state != "dead":
            self._set_state("draining")
        if self._ready_link is not None:
            self._part(self._ready_link)

    def _part(self, link: CoreLink) -> None:
        """Tell the others, if there are some, how far the drain is."""
        if self._is_joined:
            link.send(messages.Part(self._has_drained))

    @property
    def _is_joined(self) -> bool:
        """It shares experts with other engines, and ends with them."""
        return self.config.engine.data_parallel > 1

    async def until_others_drain(self) -> None:
        """Until an engine that shares experts with this one has been told to end; for ever, if
        there is none.
        """
        await self._others_drain.wait()

    async def drained_together(self) -> None:
        """No request is open here any more: wait until that is so at the engines that share experts
        with this one, whose steps it takes part in. Returns at once where there are none.
        """
        self._has_drained = True
        if not self._is_joined:
            return
        if self._ready_link is not None:
            self._part(self._ready_link)
        waiting = [
            asyncio.create_task(self._all_drained.wait()),
            asyncio.create_task(self.until("dead")),
        ]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    def submit(self, request: EngineRequest, listener: OutputListener) -> None:
        """Hand a request to the core; its id must be new. Raises RequestError (loading, restarting,
        draining, engine_dead, request_quarantined).
        """
        if self.state != "ready" or self._link is None:
            raise self._refusal()
        self._quarantine.check(request)
        request = _with_seed(request)
        stream = Stream(request, listener)
        self._streams[request.id] = stream
        if len(self._streams) == 1:
            self.on_busy(True)
        if request.deadline is not None:
            wait = max(0.0, request.deadline - time.monotonic()) + _DEADLINE_GRACE_S
            loop = asyncio.get_running_loop()
            stream.timer = loop.call_later(wait, self._end_late, stream)
        self.history.submit(request)
        self._link.send(messages.Add(request))

    def _refusal(self) -> RequestError:
        """Why no request is taken now."""
        state = self.state if self.state in _REFUSALS else "engine_dead"
        retry_after = 1.0 if state in _PASSING else None
        return RequestError(_REFUSALS[state], code=state, retry_after=retry_after)

    def _end_late(self, stream: Stream) -> None:
        """A request's deadline has passed and the core has not ended it."""
        self.abort(stream.id, reason="deadline")
        self._take_outputs(stream.ends("deadline", _DEADLINE))

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = "abort"
    ) -> None:
        """End an open request, or one of its sequences; its listener still hears of the terminal
        outputs.
        """
        stream = self._streams.get(request_id)
        if stream is None:
            return
        stream.ask_end(index, reason)
        link = self._ready_link
        if link is not None and not self._suspicion.waits(stream):
            link.send(messages.Abort(request_id, index, reason))
        else:  # no core has it
            self._take_outputs(stream.asked_ends())

    def forget(self, request_id: str) -> None:
        """See `EngineClient`."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        stream.listener = _nobody
        if not stream.open <= stream.asked.keys():  # the core has not heard of all ends yet
            self.abort(request_id)
        self._close_stream(stream)
        self._go_on_after_trial(stream)

    async def page_states(self) -> bytes:
        """The state of every page now. Raises RequestError if no core answers in time."""
        return (await self.seat_map(seats=False)).page_states

    async def seat_map(self, *, seats: bool = True) -> messages.SeatMap:
        """Who sits where now. Raises RequestError if no core answers in time."""
        return await self._ask(lambda ticket: messages.AskSeatMap(ticket, seats), _SEAT_MAP_S)

    async def sleep(self, *, abort: bool = False) -> int:
        """See `EngineClient`."""
        is_first = self.state == "ready"
        if not is_first and self.state != "sleeping":
            raise self._refusal()
        if is_first:
            self._set_state("sleeping")
        try:
            if abort:
                for request_id in list(self._streams):
                    self.abort(request_id)
            return await self._fall_asleep()
        except BaseException:
            if is_first and self.state == "sleeping":
                self._set_state("ready")
            raise

    async def _fall_asleep(self) -> int:
        """Once nothing is open. -> bytes freed."""
        while True:
            while self._streams:
                self._stream_closed.clear()
                await self._stream_closed.wait()
            if self.state != "sleeping":
                raise RequestError("it was woken before it slept", code="busy")
            done = await self._ask(messages.Sleep, _SLEEP_S)
            if done.error is None:
                return done.freed
            if done.error.code != "busy":
                raise RequestError.from_info(done.error)
            await asyncio.sleep(_LOOK_S)  # the last step of somebody who was given up

    async def wake(self) -> None:
        """See `EngineClient`."""
        if self.state == "sleeping":
            await self._ask(messages.Wake, _SLEEP_S)
            if self.state == "sleeping":
                self._set_state("ready")

    async def reset_prefix_cache(self) -> None:
        """See `EngineClient`."""
        await self._ask(messages.ResetPrefixCache, _SEAT_MAP_S)

    async def _ask(self, question: Callable[[int], messages.ToCore], wait_s: float) -> Any:
        """What the core answers. question: made of a ticket. Raises RequestError if no core answers
        in time.
        """
        link = self._ready_link
        if link is None:
            raise self._refusal()
        ticket = next(self._tickets)
        waiter = asyncio.get_running_loop().create_future()
        link.tickets[ticket] = waiter
        link.send(question(ticket))
        try:
            return await asyncio.wait_for(waiter, wait_s)
        except EngineDead:
            raise RequestError("the engine died over it", code="engine_dead") from None
        except TimeoutError:
            raise RequestError(
                "the engine is busy and did not answer in time", code="internal_error"
            ) from None
        finally:
            link.tickets.pop(ticket, None)

    def records(self, after_step: int) -> np.ndarray:
        """Step records newer than `after_step`, oldest first, as many as the history keeps
        (`records.STEP_DTYPE`).
        """
        return self.history.records.since(after_step)

    def last_step_age(self) -> float:
        """Seconds since the core last said anything: a step, a tick, progress of its start."""
        return time.monotonic() - self._alive_at


def _with_seed(request: EngineRequest) -> EngineRequest:
    """The request with a seed of its own, so that every core would draw the same tokens for it."""
    sampling = request.sampling
    if sampling.seed is not None:
        return request
    return replace(request, sampling=replace(sampling, seed=secrets.randbits(63)))


def _how_it_ended(status: int | None) -> str:
    """A process's exit status in words; a negative one is the number of a signal that killed
    it.
    """
    if status is None:
        return "its status is not known"
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "a signal without a name"
    return f"killed by {name}, signal {-status}"
