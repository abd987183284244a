"""The loop that submits requests to a core and collects its reports: on a virtual clock for the
simulator, on a real clock for benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from jitney.engine.common.history import RequestRecords
from jitney.engine.common.messages import StepReport
from jitney.engine.common.records import STEP_DTYPE, step_of
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core import EngineCore


class _LoopClock(Protocol):
    """The clock of a loop, in seconds."""

    def __call__(self) -> float: ...
    def wait_until(self, t: float) -> None: ...


_RequestAt = Callable[[int, float], EngineRequest]


class Offer:
    """The requests of a run that have not been submitted yet.

    times: arrival times in seconds of the loop's clock, ascending. request_at: makes request
    `number` (from 0) with its arrival time. concurrency: in a closed loop, the number of open
    requests below which the next one comes, regardless of its time; 0: open loop, by times.
    """

    def __init__(
        self,
        times: Sequence[float],
        request_at: _RequestAt,
        concurrency: int = 0,
    ):
        self._times = times
        self._request_at = request_at
        self._concurrency = concurrency
        self._taken = 0

    @property
    def empty(self) -> bool:
        """Whether all requests have come."""
        return self._taken == len(self._times)

    @property
    def next_at(self) -> float:
        """Arrival time of the next request; infinity in a closed loop, or if there is none."""
        if self.empty or self._concurrency:
            return math.inf
        return self._times[self._taken]

    def due(self, now: float, n_open: int) -> bool:
        """Whether the next request comes now, while `n_open` are open."""
        if self._concurrency:
            return not self.empty and n_open < self._concurrency
        return self.next_at <= now

    def take(self, now: float) -> EngineRequest:
        """The next request. In an open loop its arrival may be a little before now."""
        number = self._taken
        self._taken += 1
        return self._request_at(number, now if self._concurrency else self._times[number])


@dataclass(slots=True)
class StepLog:
    """Every step of a run."""

    #: One STEP_DTYPE item per step, as bytes.
    packed: list[bytes] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """Number of the newest step, -1 before the first."""
        return step_of(self.packed[-1]) if self.packed else -1

    @property
    def records(self) -> np.ndarray:
        """[steps] STEP_DTYPE."""
        return np.frombuffer(b"".join(self.packed), STEP_DTYPE)


def step_or_wait(core: EngineCore, clock: _LoopClock, until: float) -> StepReport | None:
    """Run a step of a core that has work. If the core pauses, wait instead, at most to `until`."""
    if core.pause_s <= 0:
        return core.step()
    # The next larger float, since rounding must not end the wait before its time.
    wakes = math.nextafter(clock() + core.pause_s, math.inf)
    clock.wait_until(min(wakes, until))
    return None


def drive(
    core: EngineCore,
    clock: _LoopClock,
    offer: Offer,
    requests: RequestRecords,
    reported: Callable[[StepReport], None] = lambda report: None,
) -> StepLog:
    """Submit requests as they come, run steps, and record the results until all have ended.

    reported: called with each report before it is recorded; the simulator adds its host time there.
    """
    log = StepLog()
    while not offer.empty or core.has_work:
        while offer.due(clock(), requests.n_open):
            request = offer.take(clock())
            requests.submit(request)
            core.add(request)
        core.scheduler.boarding.more_to_come = offer.next_at < math.inf
        if not core.has_work:
            clock.wait_until(offer.next_at)
            continue
        report = step_or_wait(core, clock, offer.next_at)
        if report is None:
            continue
        reported(report)
        now = clock()
        if report.record:
            log.packed.append(report.record)
        requests.apply(report, log.last_step, now)
    return log
