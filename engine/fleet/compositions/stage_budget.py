"""The limit of requests that a pipeline works on at once."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from jitney.engine.common.errors import RequestError

#: Share of the newest time in a stage's mean.
_NEW_SHARE = 0.1
#: Seconds until a retry, where no request has been timed yet.
_RETRY_S = 1.0


def _in_flight(seats: Mapping[str, int], seconds: Mapping[str, float]) -> int:
    """Requests that keep all seats of the slowest model busy while others are at the other models
    (Little's law): its seats, times the time of all over its own. The slowest is the one that the
    fewest requests a second get through.

    seats, seconds: of each model; seconds: of one request, 0 where none was timed.
    """
    if not all(seconds.values()):
        return min(seats.values())
    slowest = max(seats, key=lambda model: seconds[model] / seats[model])
    return math.ceil(seats[slowest] * sum(seconds.values()) / seconds[slowest])


class StageBudget:
    """The one limit over all stages of a pipeline. Those beyond it wait in the order in which they
    came; more than `max_waiting` are refused.
    """

    def __init__(self, models: Sequence[str], max_waiting: int):
        """models: of the stages, in their order; one may stand twice."""
        self._models = list(models)
        self._max_waiting = max_waiting
        #: Seats of each model, and mean seconds that a request spends in each stage.
        self._seats = dict.fromkeys(models, 1)
        self._stage_s = [0.0] * len(self._models)
        #: Mean seconds of a whole request.
        self._request_s = 0.0
        #: Requests that are worked on.
        self.open = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def set_seats(self, model: str, seats: int) -> None:
        """Requests that a model computes at once, at least 1."""
        self._seats[model] = seats
        self._let_in()

    @property
    def limit(self) -> int:
        """Requests that may be worked on now."""
        seconds = dict.fromkeys(self._seats, 0.0)
        for model, stage_s in zip(self._models, self._stage_s, strict=True):
            seconds[model] += stage_s
        return _in_flight(self._seats, seconds)

    def spent(self, stage: int, seconds: float) -> None:
        """A request has spent this time in a stage, counted from 0."""
        self._stage_s[stage] = _mean(self._stage_s[stage], seconds)
        self._let_in()

    def seats(self, model: str) -> int:
        """As they were set."""
        return self._seats[model]

    @asynccontextmanager
    async def place(self, deadline: float | None) -> AsyncIterator[None]:
        """For one request. deadline: time.monotonic() until which it may wait; None: for ever.
        Raises RequestError (queue_full, deadline_exceeded).
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
        """Wait no longer; a place that was given already goes to the next."""
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        elif not waiter.cancelled():
            self.open -= 1
            self._let_in()

    def _let_in(self) -> None:
        """Give out the places that are free."""
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
    """Moving; the first value is the first mean."""
    return value if mean == 0.0 else mean + _NEW_SHARE * (value - mean)
