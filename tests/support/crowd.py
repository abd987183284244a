"""An open loop of clients on the virtual clock, who retry after the wait that the server gives."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from jitney.engine.common.errors import RequestError
from jitney.engine.common.history import RequestRecords
from jitney.engine.common.messages import StepReport
from jitney.engine.common.request_record import RequestRecord
from jitney.engine.common.requests import EngineRequest
from jitney.engine.common.trace import Arrival
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.measuring.engine_shape import EngineShape
from jitney.engine.core.measuring.virtual import StepTimes, VirtualDevice
from jitney.engine.core.scheduler.sequence import Matcher
from jitney.engine.lab.simulation.drive import Offer, drive


@dataclass(slots=True)
class _Visit:
    """One attempt of a client."""

    client: int
    number: int = 0
    #: Whether it is a retry before the last client's first attempt.
    during: bool = False


@dataclass(slots=True)
class CrowdRun:
    """The results of a crowd."""

    #: All accepted attempts, in order of completion.
    served: list[RequestRecord] = field(default_factory=list)
    #: Number of first attempts that were refused.
    turned_away: int = 0
    #: Number of retries, and of accepted retries.
    returns: int = 0
    taken: int = 0
    #: The same for retries before the last client's first attempt.
    returns_during: int = 0
    taken_during: int = 0
    #: Wait of each refusal, in seconds.
    waits: list[float] = field(default_factory=list)
    #: Number of refusals while a seat and pages were free and no request waited.
    refused_beside_free_seats: int = 0

    @property
    def share_taken(self) -> float:
        return self.taken / max(1, self.returns)

    def first_token_s(self, quantile: float) -> float:
        """Quantile of the seconds from an accepted attempt to its first token."""
        waits = sorted(r.first_token - r.arrival for r in self.served if r.first_token is not None)
        return waits[min(len(waits) - 1, int(quantile * len(waits)))]


class _Comings(Offer):
    """Arrivals and retries by time. obeys: the share of clients that retry."""

    def __init__(self, arrivals: list[Arrival], obeys: float):
        super().__init__([], self._request, 0)
        self.arrivals = arrivals
        self.run = CrowdRun()
        self._obeys = obeys
        self._rng = random.Random(5)
        self._heap: list[tuple[float, int, int]] = []
        for client, arrival in enumerate(arrivals):
            heappush(self._heap, (arrival.at, client, 0))
        self._visits: dict[str, _Visit] = {}

    @property
    def empty(self) -> bool:
        return not self._heap

    @property
    def next_at(self) -> float:
        return self._heap[0][0] if self._heap else math.inf

    def take(self, now: float) -> EngineRequest:
        at, client, number = heappop(self._heap)
        name = f"{client}.{number}"
        during = number > 0 and at < self.arrivals[-1].at
        self._visits[name] = _Visit(client, number, during)
        self.run.returns += number > 0
        self.run.returns_during += during
        # A prompt of its own, so that no cached pages match.
        arrival = self.arrivals[client]
        return arrival.request(name, [client + 1] * arrival.n_prompt, at)

    def _request(self, number: int, at: float) -> EngineRequest:
        raise NotImplementedError

    def reported(self, report: StepReport, now: float) -> None:
        for output in report.outputs:
            if output.finish is None:
                continue
            visit = self._visits.pop(output.request_id)
            if output.error is None:
                self.run.taken += visit.number > 0
                self.run.taken_during += visit.during
                continue
            assert output.error.code == "queue_full" and output.error.retry_after
            self._turn_away(visit, now, output.error.retry_after)

    def _turn_away(self, visit: _Visit, now: float, wait: float) -> None:
        self.run.turned_away += visit.number == 0
        self.run.waits.append(wait)
        if self._rng.random() < self._obeys:
            heappush(self._heap, (now + wait, visit.client, visit.number + 1))


def _has_free_seat(core: EngineCore, request: EngineRequest) -> bool:
    """Whether a request would get a seat and pages at once, by the core's seat map."""
    pool = core.scheduler.pool
    free = sum(seat.state == "free" for seat in core.seat_map().seats)
    pages = pool.pages_for(len(request.prompt)) + len(core.seat_map().seats) - free
    return free > core.scheduler.n_waiting and pages <= pool.available


def crowd(
    arrivals: list[Arrival], shape: EngineShape, table: StepTimes, *, obeys: float = 1.0
) -> CrowdRun:
    """Run until all clients are served or have given up."""
    device = VirtualDevice(table, 0)
    core = device.new_core(shape)
    comings = _Comings(arrivals, obeys)
    records = RequestRecords()
    add = core.scheduler.add

    def watched_add(
        request: EngineRequest, new_matcher: Callable[[], Matcher] | None = None
    ) -> None:
        try:
            add(request, new_matcher)
        except RequestError:
            comings.run.refused_beside_free_seats += _has_free_seat(core, request)
            raise

    core.scheduler.add = watched_add

    def reported(report: StepReport) -> None:
        device.reported(report)
        comings.reported(report, device.clock.now)

    drive(core, device.clock, comings, records, reported)
    core.check()
    comings.run.served = [r for r in records.oldest() if r.finish == "length"]
    return comings.run
