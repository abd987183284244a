"""The limit of requests that a pipeline runs at the same time."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from jitney.engine.common.errors import RequestError

#: Weight of the newest time in a moving average.
_NEW_SHARE = 0.1
#: Seconds until a retry, used before a request has been timed.
_RETRY_S = 1.0


def _in_flight(seats: Mapping[str, int], seconds: Mapping[str, float]) -> int:
    """Requests in the pipeline that keep all seats of the slowest model busy (Little's law): that
    model's seats, times the seconds in all models divided by the seconds in it. The slowest model
    is the one that completes the fewest requests a second.

    seats: of each model. seconds: of one request at each model; 0 before a request was timed.
    """
    if not all(seconds.values()):
        return min(seats.values())
    slowest = max(seats, key=lambda model: seconds[model] / seats[model])
    return math.ceil(seats[slowest] * sum(seconds.values()) / seconds[slowest])


class StageBudget:
    """One limit of open requests over all stages of a pipeline. Requests beyond it wait first in,
    first out; if `max_waiting` are waiting, a new one is refused.
    """

    def __init__(self, models: Sequence[str], max_waiting: int):
        """models: the model of each stage, in order; a model may occur twice."""
        self._models = list(models)
        self._max_waiting = max_waiting
        #: Seats of each model; moving average of a request's seconds in each stage.
        self._seats = dict.fromkeys(models, 1)
        self._stage_s = [0.0] * len(self._models)
        #: Moving average of a request's seconds in all stages.
        self._request_s = 0.0
        #: Requests that run now.
        self.open = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def set_seats(self, model: str, seats: int) -> None:
        """Set the requests that a model runs at the same time, at least 1."""
        self._seats[model] = seats
        self._let_in()

    @property
    def limit(self) -> int:
        """Most requests that may run now."""
        seconds = dict.fromkeys(self._seats, 0.0)
        for model, stage_s in zip(self._models, self._stage_s, strict=True):
            seconds[model] += stage_s
        return _in_flight(self._seats, seconds)

    def spent(self, stage: int, seconds: float) -> None:
        """Record the seconds of a request in a stage. stage: index, from 0."""
        self._stage_s[stage] = _mean(self._stage_s[stage], seconds)
        self._let_in()

    def seats(self, model: str) -> int:
        """The seats of a model, from `set_seats`."""
        return self._seats[model]

    @asynccontextmanager
    async def place(self, deadline: float | None) -> AsyncIterator[None]:
        """Context in which one request runs. deadline: time.monotonic() until which it may wait;
        None: no limit. Raises RequestError (queue_full, deadline_exceeded).
        """
        try:
            async with asyncio.timeout(deadline and deadline - time.monotonic()):
                await self._enter()
        except TimeoutError:
            raise RequestError("the request's time ran out", code="deadline_exceeded") from None
        began = time.monotonic()
        try:
            yield
        finally:
            self.open -= 1
            self._request_s = _mean(self._request_s, time.monotonic() - began)
            self._let_in()

    async def _enter(self) -> None:
        if self.open < self.limit and not self._waiting:
            self.open += 1
            return
        if len(self._waiting) >= self._max_waiting:
            raise self._full()
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            self._leave(waiter)
            raise

    def _leave(self, waiter: asyncio.Future[None]) -> None:
        """Stop waiting. If the waiter was admitted already, the next one is admitted instead."""
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        elif not waiter.cancelled():
            self.open -= 1
            self._let_in()

    def _let_in(self) -> None:
        """Admit waiting requests up to the limit."""
        while self._waiting and self.open < self.limit:
            waiter = self._waiting.popleft()
            if not waiter.done():
                self.open += 1
                waiter.set_result(None)

    def _full(self) -> RequestError:
        turns = (len(self._waiting) + 1) / self.limit
        return RequestError(
            f"{len(self._waiting)} requests wait for this pipeline already",
            code="queue_full",
            retry_after=turns * (self._request_s or _RETRY_S),
        )


def _mean(mean: float, value: float) -> float:
    """Exponential moving average; the first value is the first mean."""
    return value if mean == 0.0 else mean + _NEW_SHARE * (value - mean)
