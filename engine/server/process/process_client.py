"""The open requests of the server: outputs, ends, and their continuation in the next core."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from jitney.engine.common import messages
from jitney.engine.common.errors import ErrorInfo, RequestError
from jitney.engine.common.history import History
from jitney.engine.common.outputs import FinishReason, SequenceOutput
from jitney.engine.common.records import step_of
from jitney.engine.common.requests import EngineRequest
from jitney.engine.common.tasks import until
from jitney.engine.server.process.client import OutputListener
from jitney.engine.server.process.faults import Blocklist, CoreEnd, CrashBlame
from jitney.engine.server.process.link import CoreLink
from jitney.engine.server.process.stream import Stream
from jitney.engine.server.process.supervisor import CoreSupervisor, ignore

#: Seconds to wait for an answer about seats or pages.
_SEAT_MAP_S = 2.0
#: Seconds to wait for a core to free or allocate its device's memory (some 100 GB).
_SLEEP_S = 120.0
#: Seconds between two tries to put a busy core to sleep.
_SLEEP_RETRY_S = 0.25
#: Seconds after a request's deadline at which the server ends it if the core has not.
_DEADLINE_GRACE_S = 1.0
_REFUSALS = {
    "loading": "the model is still loading",
    "restarting": "the engine is being started again after it died",
    "sleeping": "the engine is asleep: POST /wake_up wakes it",
    "draining": "the server is shutting down",
    "engine_dead": "the engine is gone",
}
#: States that soon end by themselves.
_PASSING = ("loading", "restarting", "draining")
_DEADLINE = ErrorInfo("deadline_exceeded", "the request's deadline passed before it was done")
_CUT_OFF = ErrorInfo(
    "draining", "the server is shutting down, and this request was not done in time"
)
_LOST = ErrorInfo("engine_dead", "the engine stopped before this request was done")
_BLAMED = ErrorInfo(
    "request_failed", "the engine stopped each time it had this request, which is not tried again"
)


@dataclass(eq=False)
class _JointDrain:
    """State of a joint drain: engines that share experts drain and end together."""

    #: The engine shares experts with others.
    shares_experts: bool
    #: This engine has no open request left.
    drained: bool = False
    #: Another engine drains.
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    #: All have drained.
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    def announce(self, link: CoreLink) -> None:
        """Tell the other engines that this one drains, or has drained."""
        if self.shares_experts:
            link.send(messages.Drain(self.drained))


@dataclass(eq=False)
class ProcessClient(CoreSupervisor):
    """`jitney.engine.server.process.client.EngineClient` over a core process."""

    #: Called with True when the first request is open, with False when the last one has ended.
    on_busy: Callable[[bool], None] = ignore
    history: History = field(init=False)
    #: Open requests by id.
    _streams: dict[str, Stream] = field(default_factory=dict)
    #: Set when a request has ended.
    _stream_closed: asyncio.Event = field(default_factory=asyncio.Event)
    _blocklist: Blocklist = field(default_factory=Blocklist)
    _blame: CrashBlame = field(default_factory=CrashBlame)
    _joint_drain: _JointDrain = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._joint_drain = _JointDrain(self.config.engine.data_parallel > 1)
        self.history = History(keep_tokens=self.config.server.dashboard_show_text)

    async def close(self) -> None:
        """Stop the core process and end every open request; does nothing the second time."""
        self._end_streams(_CUT_OFF)
        await super().close()

    def submit(self, request: EngineRequest, listener: OutputListener) -> None:
        """Send a request, with a new id, to the core. Raises RequestError."""
        if self.state != "ready" or self._link is None:
            raise self._refusal()
        self._blocklist.check(request)
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
        """The error for a request in a state other than "ready"."""
        state = self.state if self.state in _REFUSALS else "engine_dead"
        retry_after = 1.0 if state in _PASSING else None
        return RequestError(_REFUSALS[state], code=state, retry_after=retry_after)

    def _end_late(self, stream: Stream) -> None:
        """End a request whose deadline has passed and which the core has not ended."""
        self.abort(stream.id, reason="deadline")
        self._take_outputs(stream.ends("deadline", _DEADLINE))

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = "abort"
    ) -> None:
        """End a request or a sequence; its listener still gets the terminal outputs."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        stream.ask_end(index, reason)
        link = self._ready_link
        if link is not None and not self._blame.waits(stream):
            link.send(messages.Abort(request_id, index, reason))
        else:  # the core does not have the request
            self._take_outputs(stream.asked_ends())

    def forget(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        stream.listener = ignore
        if (
            not stream.open <= stream.requested_ends.keys()
        ):  # not all ends have been sent to the core yet
            self.abort(request_id)
        self._close_stream(stream)
        self._go_on_after_trial(stream)

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
        """Deliver outputs made by the server in place of the core."""
        self.history.take(messages.StepReport(outputs))
        self._deliver(outputs)

    def _deliver(self, outputs: Iterable[SequenceOutput]) -> None:
        """Give outputs to the listeners of their requests."""
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.error_code == "request_failed":
                self._blocklist.add(stream.request)
            stream.put(output)
            if not stream.open:
                self._close_stream(stream)
            self._go_on_after_trial(stream)

    def _go_on_after_trial(self, stream: Stream) -> None:
        """If this request is on trial and has progressed, send the next requests to the core."""
        if stream is not self._blame.on_trial:
            return
        link = self._ready_link
        if link is not None:
            _send_resumed(link, self._blame.progressed(stream))

    def _close_stream(self, stream: Stream) -> None:
        """Remove a request that gets no more outputs."""
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
        for stream in list(self._streams.values()):
            self._take_outputs(stream.ends("error", error))

    def _has_requests(self) -> bool:
        return bool(self._streams)

    def _take_ready(self, link: CoreLink) -> None:
        assert self.info is not None  # it came with the core's message
        self.history.core_ready(self.info)
        _send_resumed(link, self._blame.core_ready(self._streams.values()))
        if self._draining:
            self._joint_drain.announce(link)

    def _lose_core(self, end: CoreEnd) -> tuple[int, int]:
        n_open = len(self._streams)
        if self.config.server.on_core_death != "resume":
            self._end_streams(_LOST)
        for stream in list(self._streams.values()):
            self._take_outputs(stream.asked_ends())
        blamed = None
        if end.crashed:
            blamed = self._blame.core_crashed(list(self._streams.values()))
        if blamed is not None:
            self._take_outputs(blamed.ends("error", _BLAMED))
        self.history.seats_lost()
        self.counters.observe_idle(sum(len(stream.open) for stream in self._streams.values()))
        resumed, ended = len(self._streams), n_open - len(self._streams)
        if self.info is not None:
            self.history.incidents.outage_began(end.summary, n_resumed=resumed, n_lost=ended)
        return resumed, ended

    def _lose_engine(self, end: CoreEnd) -> None:
        if self.info is not None:
            self.history.incidents.outage_began(end.summary, n_resumed=0, n_lost=len(self._streams))
        self._end_streams(_LOST)
        self.history.core_lost()
        self.counters.observe_idle(0)

    def drain(self) -> None:
        """Accept no new requests; engines that share experts drain, too."""
        self._draining = True
        self.history.incidents.drain_began(self.history.n_open)
        if self.state != "dead":
            self._set_state("draining")
        if self._ready_link is not None:
            self._joint_drain.announce(self._ready_link)

    def _take_drain_state(self, *, drained: bool) -> None:
        drain = self._joint_drain
        (drain.finished if drained else drain.begun).set()

    async def until_others_drain(self) -> None:
        """Wait until an engine that shares experts drains; for ever if there is none."""
        await self._joint_drain.begun.wait()

    async def drained_together(self) -> None:
        """With no open request, wait until the engines that share experts have none either."""
        drain = self._joint_drain
        drain.drained = True
        if not drain.shares_experts:
            return
        if self._ready_link is not None:
            drain.announce(self._ready_link)
        await until(self.until("dead"), drain.finished.wait())

    async def page_map(self) -> messages.SeatMap:
        return await self.seat_map(seats=False)

    async def seat_map(self, *, seats: bool = True) -> messages.SeatMap:
        """The seats and pages now. Raises RequestError if no core answers in time."""
        link = self._answering_link()
        return await link.ask(lambda ticket: messages.AskSeatMap(ticket, seats), _SEAT_MAP_S)

    async def sleep(self, *, abort: bool = False) -> int:
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
        """Wait until no request is open, and put the core to sleep. Returns bytes freed."""
        while True:
            while self._streams:
                self._stream_closed.clear()
                await self._stream_closed.wait()
            if self.state != "sleeping":
                raise RequestError("it was woken before it slept", code="busy")
            done = await self._answering_link().ask(messages.Sleep, _SLEEP_S)
            if done.error is None:
                return done.freed
            if done.error.code != "busy":
                raise RequestError.from_info(done.error)
            await asyncio.sleep(_SLEEP_RETRY_S)  # the last step of a request that was aborted

    async def wake(self) -> None:
        if self.state == "sleeping":
            await self._answering_link().ask(messages.Wake, _SLEEP_S)
            if self.state == "sleeping":
                self._set_state("ready")

    async def reset_prefix_cache(self) -> None:
        await self._answering_link().ask(messages.ResetPrefixCache, _SEAT_MAP_S)

    async def set_adapters(self, adapters: tuple[str, ...]) -> messages.AdaptersSet:
        """Serve these adapters, NAME=FOLDER each, also in later cores. Engines that share experts
        only report changed ones. Raises RequestError, naming one that cannot be loaded.
        """
        model = self.config.model.model_copy(update={"adapters": adapters})
        first = 1 + max(self.history.adapters, default=0)
        done: messages.AdaptersSet = await self._answering_link().ask(
            lambda ticket: messages.SetAdapters(ticket, model.adapter_folders, first), None
        )
        if done.error is not None:
            raise RequestError.from_info(done.error)
        if self.config.engine.data_parallel > 1:
            return done
        assert self.info is not None  # a core has answered
        self._keep_adapters(adapters)
        self.info = replace(
            self.info,
            config_digest=done.config_digest,
            model=replace(self.info.model, adapters=done.adapters),
        )
        self.history.learn_adapters(self.info)
        return done

    def _answering_link(self) -> CoreLink:
        """The link to a core that answers. Raises RequestError if there is none."""
        if self._ready_link is None:
            raise self._refusal()
        return self._ready_link


def _send_resumed(link: CoreLink, streams: list[Stream]) -> None:
    """Make a core continue these requests."""
    for stream in streams:
        link.send(messages.Add(stream.resumed()))


def _with_seed(request: EngineRequest) -> EngineRequest:
    """The request with a seed, so that every core draws the same tokens for it."""
    sampling = request.sampling
    if sampling.seed is not None:
        return request
    return replace(request, sampling=replace(sampling, seed=secrets.randbits(63)))
