"""The book of one run, kept from outside the core: every request's times, and who sat where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jitney.engine.scheduler.plan import Plan
from jitney.engine.simulation.workload import Arrival
from jitney.engine.telemetry.summary import RequestTimes
from jitney.engine.types import SequenceOutput

#: Seconds that a loop on a real clock sleeps while its core has work but a policy lets everybody
#: wait.
LOOK_AGAIN_S = 0.001


class Ride(NamedTuple):
    """One stay of a request (its number in the arrivals) in a seat, virtual seconds. first_token
    None: not here.
    """

    seat: int
    request: int
    start: float
    first_token: float | None
    end: float


@dataclass(slots=True)
class Passenger:
    """A request on its way; last: when its newest token came."""

    times: RequestTimes
    n_output: int
    last: float = -1.0


class Conductor:
    """Keeps the book of one run: every request's times, and who sat where."""

    def __init__(self, keep_tokens: bool = False):
        self.keep_tokens = keep_tokens
        self.times: list[RequestTimes] = []
        self.rides: list[list[Any]] = []  # as Ride, still being written; end None while it lasts
        self.gaps: list[float] = []
        self.gap_counts: list[int] = []
        self._open: dict[str, Passenger] = {}
        self._by_seat: dict[int, list[Any]] = {}
        self._by_request: dict[str, list[Any]] = {}
        self._newest = math.nan  # when the last step that brought tokens was taken in

    @property
    def n_open(self) -> int:
        """Requests without an end."""
        return len(self._open)

    def enter(self, number: int, arrival: Arrival, at: float) -> str:
        """A request comes at `at`; returns its id."""
        tokens: list[float] | None = [] if self.keep_tokens else None
        times = RequestTimes(
            number, arrival.tenant, arrival.n_prompt, 0, at, None, None, at, "", tokens
        )
        self.times.append(times)
        self._open[name := str(number)] = Passenger(times, max(1, arrival.n_output))
        return name

    def planned(self, plan: Plan, now: float) -> None:
        """Take down who left a seat or took one in a plan made at `now`."""
        for seq in plan.preempted:
            self._leave(seq.request.id, now)
        for seq in plan.boarded:
            name = seq.request.id
            if (before := self._by_seat.get(seq.seat)) is not None and before[4] is None:
                before[4] = now  # its last token is still on its way; its seat is not
            times = self._open[name].times
            if times.boarded is None:
                times.boarded = now
            ride = [seq.seat, times.request, now, None, None]
            self.rides.append(ride)
            self._by_seat[seq.seat] = self._by_request[name] = ride

    def took(self, outputs: Sequence[SequenceOutput], now: float) -> None:
        """Take down what a step brought at `now`."""
        riders, open_now, newest = 0, self._open, self._newest
        for output in outputs:
            passenger = open_now[output.request_id]
            if output.tokens:
                if passenger.last == newest:
                    riders += 1
                elif passenger.last >= 0:
                    self._note_gap(now - passenger.last, 1)
                else:
                    self._first_token(output.request_id, passenger, now)
                passenger.last = now
                if self.keep_tokens:
                    passenger.times.token_times.append(now)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
            if output.finish is not None:
                self._end(output, passenger, now)
        if riders:
            self._note_gap(now - newest, riders)
        self._newest = now

    def _note_gap(self, gap: float, count: int) -> None:
        self.gaps.append(gap)
        self.gap_counts.append(count)

    def _first_token(self, name: str, passenger: Passenger, now: float) -> None:
        passenger.times.first_token = now
        if (
            ride := self._by_request.get(name)
        ) is not None:  # else it lost its seat while the token was on its way
            ride[3] = now

    def _end(self, output: SequenceOutput, passenger: Passenger, now: float) -> None:
        times = passenger.times
        times.finished, times.finish = now, str(output.finish)
        times.n_output = passenger.n_output if times.served else 0
        del self._open[output.request_id]
        self._leave(output.request_id, now)

    def _leave(self, name: str, now: float) -> None:
        ride = self._by_request.pop(name, None)
        if ride is not None and ride[4] is None:
            ride[4] = now
