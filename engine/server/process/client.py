"""The interface of the engine for the HTTP side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from jitney.engine.common.engine_info import EngineInfo, EngineState
from jitney.engine.common.history import History
from jitney.engine.common.messages import Progress, SeatMap
from jitney.engine.common.outputs import FinishReason, SequenceOutput
from jitney.engine.common.requests import EngineRequest
from jitney.engine.server.process.counters import EngineCounters

#: Called on the event loop with each output of a request, in order. It must not raise.
type OutputListener = Callable[[SequenceOutput], None]


class EngineClient(Protocol):
    """One engine, reached from one event loop. info is None until the first `Ready`."""

    @property
    def state(self) -> EngineState: ...
    @property
    def info(self) -> EngineInfo | None: ...
    @property
    def progress(self) -> Progress | None: ...
    @property
    def counters(self) -> EngineCounters: ...
    @property
    def history(self) -> History: ...

    def submit(self, request: EngineRequest, listener: OutputListener) -> None:
        """Register the request; `listener` gets its outputs, not before this has returned. Each of
        the n sequences ends with an output with `finish`: "error" if the core refuses it, or dies
        without a successor. Raises RequestError (loading, restarting, draining, engine_dead).
        """
        ...

    def forget(self, request_id: str) -> None:
        """Stop listening, and abort open sequences; ended ones are ignored."""
        ...

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = "abort"
    ) -> None:
        """End one request, or one of its sequences; unknown or finished ones are ignored."""
        ...

    async def seat_map(self) -> SeatMap:
        """Seats and page states now. Raises RequestError if the core does not answer."""
        ...

    async def page_map(self) -> SeatMap:
        """Page states without seats, which is cheap for the core. Raises RequestError like
        `seat_map`.
        """
        ...

    async def sleep(self, *, abort: bool = False) -> int:
        """Refuse requests, wait for (abort: end) the open ones, and free the device's memory until
        `wake`. Returns bytes freed, 0 if it slept. Raises RequestError.
        """
        ...

    async def wake(self) -> None:
        """Allocate the memory again and serve; does nothing if awake. Raises RequestError."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Drop all cached pages of prompts. Raises RequestError."""
        ...

    def last_step_age(self) -> float:
        """Seconds since a step finished or the idle loop ticked."""
        ...
