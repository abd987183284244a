"""Supervises the core process for the API process: start it, talk to it, notice its death, start
the next one.

Single-threaded: everything here runs on one asyncio loop. Nothing here imports jax.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

import numpy as np

from jitney.engine import messages
from jitney.engine.config.schema import Config
from jitney.engine.errors import EngineDead, ErrorInfo, RequestError
from jitney.engine.process.client import EngineCounters, EngineState
from jitney.engine.process.link import CoreLink, open_link
from jitney.engine.process.main import BUILDER
from jitney.engine.telemetry.history import History
from jitney.engine.types import EngineInfo, EngineRequest, FinishReason, SequenceOutput

log = logging.getLogger("jitney.process")

#: Restarts are counted within this many seconds; the wait before one doubles from the first to the
#: second number.
_RESTART_WINDOW_S = 600.0
_BACKOFF_S = (0.5, 30.0)
#: Seconds to wait for a SeatMap, for the last messages of a dead core, and for a core to leave when
#: asked.
_SEAT_MAP_S = 2.0
_LAST_MESSAGES_S = 0.1
_SHUTDOWN_S = 5.0
_REFUSALS = {
    "loading": "the model is still loading",
    "draining": "the server is shutting down",
    "engine_dead": "the engine is gone",
}


class Stream:
    """The outputs of one request, in order; ends after each of its sequences had its terminal
    output.

    Closing it earlier, or cancelling a wait on it, aborts what is left of the request.
    """

    def __init__(self, client: ProcessClient, request: EngineRequest):
        self.id = request.id
        self.open = set(range(request.sampling.n))
        self._client = client
        self._outputs: asyncio.Queue[SequenceOutput] = asyncio.Queue()

    def __aiter__(self) -> AsyncIterator[SequenceOutput]:
        return self

    async def __anext__(self) -> SequenceOutput:
        if self._outputs.empty() and not self.open:
            raise StopAsyncIteration
        try:
            return await self._outputs.get()
        except asyncio.CancelledError:
            self._client.forget(self)
            raise

    async def aclose(self) -> None:
        self._client.forget(self)

    def put(self, output: SequenceOutput) -> None:
        """Called by the client for each output of this request; what follows a sequence's end is
        dropped.
        """
        if output.index in self.open:
            if output.finish is not None:
                self.open.discard(output.index)
            self._outputs.put_nowait(output)

    def fail(self, error: ErrorInfo) -> None:
        """End every sequence that is still open."""
        for index in sorted(self.open):
            self.put(SequenceOutput(request_id=self.id, index=index, finish="error", error=error))


class ProcessClient:
    """`jitney.engine.process.client.EngineClient` over a core process.

    on_progress: called with each progress of the start.
    """

    def __init__(
        self,
        config: Config,
        *,
        builder: str = BUILDER,
        on_progress: Callable[[messages.Progress], None] = lambda progress: None,
    ):
        #: "dead" is for good; `failure` says why.
        self.state: EngineState = "loading"
        #: None until first ready.
        self.info: EngineInfo | None = None
        #: The latest of the start.
        self.progress: messages.Progress | None = None
        self.counters = EngineCounters()
        self.history = History(keep_tokens=config.server.dashboard_show_text)
        self.failure = ""
        self._config = config
        self._builder = builder
        self._on_progress = on_progress
        self._streams: dict[str, Stream] = {}
        self._tickets = itertools.count()
        self._link: CoreLink | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._closing = False
        self._changed = asyncio.Event()
        self._alive_at = time.monotonic()

    async def start(self) -> None:
        """Start the core process and return at once; it is `loading`."""
        self._supervision = asyncio.create_task(self._supervise())

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
        self._end_requests("the server is stopping")
        if self._supervision is not None:
            if self._link is not None and self._link.ready:
                self._link.send(messages.Shutdown())
                await asyncio.wait([self._supervision], timeout=_SHUTDOWN_S)
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
        self._set_state("dead")

    def kill(self) -> None:
        """End the core process without asking it."""
        if self._link is not None:
            self._link.kill()

    async def _supervise(self) -> None:
        """One core process after another, until closed or past hope."""
        restarts: deque[float] = deque()
        while True:
            ready, fatal = await self._run_core()
            why = fatal.message if fatal else "the engine process died"
            if ready:
                self.history.outage_began(why, n_resumed=0, n_lost=len(self._streams))
            self._end_requests(why)
            if self._closing:
                return
            delay = self._restart_delay(ready, restarts)
            if delay is None:
                self.failure = why
                self._set_state("dead")
                return
            log.error("%s; restarting in %.1f s", why, delay)
            self.counters.engine_restarts += 1
            self.progress = None  # it was the dead core's
            self._set_state("loading")
            await asyncio.sleep(delay)

    def _restart_delay(self, ready: bool, restarts: deque[float]) -> float | None:
        """Seconds to wait before the next start, or None to give up.

        A core that never got ready would fail the same way again: a wrong model name is no reason
        to loop.
        """
        server, now = self._config.server, time.monotonic()
        while restarts and now - restarts[0] > _RESTART_WINDOW_S:
            restarts.popleft()
        never_ready = self.info is None and not ready
        if (
            never_ready
            or not server.restart
            or self.state == "draining"
            or len(restarts) >= server.max_restarts
        ):
            return None
        restarts.append(now)
        return min(_BACKOFF_S[0] * 2 ** (len(restarts) - 1), _BACKOFF_S[1])

    async def _run_core(self) -> tuple[bool, ErrorInfo | None]:
        """From the start of a core process to its end. Returns whether it got ready, and why it
        ended, if it said so.
        """
        async with open_link(self._config, self._builder) as link:
            self._link = link
            reader = asyncio.create_task(self._read(link))
            try:
                await link.process.wait()
                await asyncio.sleep(_LAST_MESSAGES_S)
            finally:
                reader.cancel()
                self._link = None
            return link.ready, link.fatal

    async def _read(self, link: CoreLink) -> None:
        try:
            while True:
                self._take(link, await link.receive())
        except Exception:  # a message we cannot follow leaves requests hanging; a new core does not
            log.exception("lost track of the engine process")
            link.kill()

    def _take(self, link: CoreLink, message: messages.FromCore) -> None:
        self._alive_at = time.monotonic()
        match message:
            case messages.StepReport():
                self._take_report(message)
                for answer in message.answers:
                    link.answer(answer)
            case messages.Progress():
                self.progress = message
                self._on_progress(message)
            case messages.Ready(info=info):
                self.info, link.ready = info, True
                self.history.core_ready(info)
                if self.state == "loading":
                    self._set_state("ready")
            case messages.SeatMap():
                link.answer(message)
            case messages.Fatal(error=error):
                link.fatal = error
            case messages.Tick(waiting=waiting):
                self.counters.observe_idle(waiting)

    def _take_report(self, report: messages.StepReport) -> None:
        record = self.history.take(report)
        if record is not None:
            self.counters.observe_step(record)
        self.counters.observe_outputs(report.outputs)
        self.counters.observe_canary(report.canary)
        for output in report.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
                if not stream.open:
                    del self._streams[output.request_id]

    def _end_requests(self, why: str) -> None:
        self.history.core_lost("engine_dead")
        for stream in self._streams.values():
            stream.fail(
                ErrorInfo("engine_dead", f"the engine stopped before this request was done: {why}")
            )
        self._streams.clear()

    def _set_state(self, state: EngineState) -> None:
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()

    def drain(self) -> None:
        """Take no new requests; running ones go on."""
        if self.state != "dead":
            self._set_state("draining")

    def submit(self, request: EngineRequest) -> Stream:
        """Hand a request to the core; its id must be new. Raises RequestError (loading, draining,
        engine_dead).
        """
        if self.state != "ready" or self._link is None:
            raise self._refusal()
        stream = Stream(self, request)
        self._streams[request.id] = stream
        self.history.submit(request)
        self._link.send(messages.Add(request))
        return stream

    def _refusal(self) -> RequestError:
        """Why no request is taken now."""
        if self.state in ("loading", "draining"):
            return RequestError(_REFUSALS[self.state], code=self.state, retry_after=1.0)
        return RequestError(_REFUSALS["engine_dead"], code="engine_dead")

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = "abort"
    ) -> None:
        """End an open request, or one of its sequences; its stream still brings the terminal
        outputs.
        """
        if request_id in self._streams and self._link is not None:
            self._link.send(messages.Abort(request_id, index, reason))

    def forget(self, stream: Stream) -> None:
        """Nobody listens to `stream` any more: abort what is left of its request."""
        if self._streams.get(stream.id) is stream:
            self.abort(stream.id)
            del self._streams[stream.id]

    async def page_states(self) -> bytes:
        """The state of every page now. Raises RequestError if no core answers in time."""
        return (await self.seat_map(seats=False)).page_states

    async def seat_map(self, *, seats: bool = True) -> messages.SeatMap:
        """Who sits where now. Raises RequestError if no core answers in time."""
        link = self._link
        if link is None or not link.ready:
            raise RequestError(_REFUSALS["loading"], code="loading", retry_after=1.0)
        ticket = next(self._tickets)
        waiter = asyncio.get_running_loop().create_future()
        link.tickets[ticket] = waiter
        link.send(messages.AskSeatMap(ticket, seats))
        try:
            return await asyncio.wait_for(waiter, _SEAT_MAP_S)
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
