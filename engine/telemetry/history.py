"""What happened in the engine, kept by the API process for whoever looks later: trips, events, step
records.

Fed by the engine's own reports whether anybody watches or not; all of it is bounded in number and
age.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from jitney.engine.messages import Life, StepReport
from jitney.engine.records import RecordRing
from jitney.engine.telemetry.request_record import Ride, Trip
from jitney.engine.types import EngineInfo, EngineRequest, SequenceOutput

#: Ended trips are kept for so many seconds, and so many of them.
KEEP_S = 600.0
KEEP_TRIPS = 16384
KEEP_LIFE = 16384
#: Waits and first tokens kept for their distributions: (when, seconds).
KEEP_SAMPLES = 8192
FINISHES = ("stop", "length", "abort", "deadline", "error")
#: Policies whose batch keeps a seat until its slowest sequence is done.
HOLDING = ("static", "dynamic")


class Journal:
    """One engine's recent past, across the lives of its core.

    seats: who sits where, None for nobody; held: seats that a batch keeps after their passenger's
    end. waits, first_tokens: (time, seconds since arrival) of those who boarded and of first
    tokens. finished, rejected: totals by reason, and by error code of those who were refused.
    keep_tokens: keep token ids too.
    """

    def __init__(self, *, keep_tokens: bool = False, clock: Callable[[], float] = time.monotonic):
        self.records = RecordRing()
        self.seats: list[Trip | None] = []
        self.held: set[int] = set()
        self.waits: deque[tuple[float, float]] = deque(maxlen=KEEP_SAMPLES)
        self.first_tokens: deque[tuple[float, float]] = deque(maxlen=KEEP_SAMPLES)
        self.finished: dict[str, int] = dict.fromkeys(FINISHES, 0)
        self.rejected: dict[str, int] = {}
        self.boarded = self.cached_tokens = self.n_open = self.n_life = 0
        self._keep_tokens, self._clock = keep_tokens, clock
        self._started = clock()
        self._holds = False
        self._renumber = 0
        self._numbers = 0
        self._trips: dict[str, list[Trip]] = {}
        self._closed: deque[Trip] = deque()
        self._life: deque[Life] = deque(maxlen=KEEP_LIFE)

    @property
    def kept_from(self) -> float:
        """The time from which on everything is known."""
        oldest = self._closed[0].finished if len(self._closed) >= KEEP_TRIPS else None
        return max(self._started, self._clock() - KEEP_S, oldest or 0.0)

    @property
    def n_waiting(self) -> int:
        return self.n_open - sum(trip is not None for trip in self.seats) + len(self.held)

    def core_ready(self, info: EngineInfo) -> None:
        """A core starts, its step numbers beginning anew: ours go on rising."""
        self.seats = [None] * info.seats
        self.held.clear()
        self._holds = info.policy in HOLDING
        self._renumber = self.records.last_step + 1

    def core_lost(self, code: str) -> None:
        """The core is gone: every open trip ends with this error."""
        for trip in list(self.open()):
            self._end(trip, "error", code, self.records.last_step, self._clock())
        self.seats = [None] * len(self.seats)
        self.held.clear()

    def submit(self, request: EngineRequest) -> None:
        """A request arrives: one trip for each of its sequences."""
        sampling, trips = request.sampling, []
        for index in range(sampling.n):
            self._numbers += 1
            trips.append(
                Trip(
                    self._numbers,
                    request.id,
                    index,
                    request.tenant,
                    request.priority,
                    len(request.prompt),
                    sampling.max_tokens or 0,
                    request.arrival,
                    list(request.prompt) if self._keep_tokens else None,
                )
            )
        self._trips[request.id] = trips
        self.n_open += len(trips)
        for trip in trips:
            self._tell("queued", trip, self.records.last_step, request.arrival)

    def take(self, report: StepReport) -> np.void | None:
        """Take in a report; returns its record, renumbered, if it has one."""
        record = self.records.add(report.record, self._renumber) if report.record else None
        step, now = (
            self.records.last_step,
            self.records.last_ready if record is not None else self._clock(),
        )
        for rows in report.chunks:
            if trip := self.trip(rows.request_id, rows.index):
                trip.computed(step, rows)
        for output in report.outputs:
            self._output(output, step, now)
        for event in report.life:
            self._happened(event)
        return record

    def _output(self, output: SequenceOutput, step: int, t: float) -> None:
        trip = self.trip(output.request_id, output.index)
        if trip is None or trip.finished is not None:
            return
        if output.tokens and trip.took(output.tokens, step, t):
            trip.cached_tokens = output.cached_tokens
            self.cached_tokens += output.cached_tokens
            self.first_tokens.append((t, t - trip.arrival))
            self._tell("first_token", trip, step, t)
        if output.finish is not None:
            self._end(trip, output.finish, output.error.code if output.error else "", step, t)

    def _happened(self, event: Life) -> None:
        """News of the step that was launched while the one before it ran: they take effect when
        that is done.
        """
        step, t = event.step + self._renumber, max(event.t, self.records.last_ready)
        if event.event == "released":
            self.held.discard(event.seat)
            self.seats[event.seat] = None
            self._add(Life("released", event.request_id, event.index, event.seat, step, t, 0, 0))
            return
        trip = self.trip(event.request_id, event.index)
        if trip is None or trip.finished is not None:
            return  # it ended between the plan and this report
        if event.event == "seated":
            self._board(trip, event.seat, step, t)
        elif event.event == "preempted":
            seat = trip.seat
            trip.preemptions += 1
            trip.leave(step - 1, t, "preempted")
            self._vacate(seat, trip)
            self._tell("preempted", trip, step, t, seat)

    def _board(self, trip: Trip, seat: int, step: int, t: float) -> None:
        if not trip.rides:
            self.boarded += 1
            self.waits.append((t, t - trip.arrival))
        trip.board(seat, step, t)
        self.held.discard(seat)
        self.seats[seat] = trip
        self._tell("seated", trip, step, t)

    def _end(self, trip: Trip, finish: str, code: str, step: int, t: float) -> None:
        seat = trip.seat
        trip.leave(step, t, finish)
        trip.finished, trip.finish, trip.code = t, finish, code
        self.n_open -= 1
        if finish == "error" and not trip.rides and code not in ("engine_dead", "internal_error"):
            self.rejected[code] = self.rejected.get(code, 0) + 1
        else:
            self.finished[finish] += 1
        self._vacate(seat, trip)
        reason = code or finish
        self._tell("aborted" if finish == "abort" else "finished", trip, step, t, seat, reason)
        self._closed.append(trip)
        self._forget(t)

    def _vacate(self, seat: int, trip: Trip) -> None:
        """Its passenger has left: the seat is free, unless the batch keeps it."""
        if seat < 0 or self.seats[seat] is not trip:
            return
        if self._holds:
            self.held.add(seat)
        else:
            self.seats[seat] = None

    def _forget(self, now: float) -> None:
        """Let go of what is too old or too much."""
        while self._closed and (
            len(self._closed) > KEEP_TRIPS or (self._closed[0].finished or 0) < now - KEEP_S
        ):
            old = self._closed.popleft()
            siblings = self._trips.get(old.request, [])
            if all(trip.finished is not None for trip in siblings):
                self._trips.pop(old.request, None)

    def _tell(
        self, event: str, trip: Trip, step: int, t: float, seat: int | None = None, reason: str = ""
    ) -> None:
        self._add(
            Life(
                event,
                trip.request,
                trip.index,
                trip.seat if seat is None else seat,
                step,
                t,
                trip.n_prompt,
                trip.n_output,
                reason,
            )
        )

    def _add(self, event: Life) -> None:
        self._life.append(event)
        self.n_life += 1

    def life_since(self, number: int) -> list[Life]:
        """Events after the first `number`, as far back as they are kept."""
        new = min(self.n_life - number, len(self._life))
        return list(islice(self._life, len(self._life) - new, None)) if new > 0 else []

    def trip(self, request: str, index: int) -> Trip | None:
        trips = self._trips.get(request)
        return trips[index] if trips is not None and 0 <= index < len(trips) else None

    def newest(self) -> Iterator[Trip]:
        """All trips that are known, the newest first."""
        for trips in reversed(self._trips.values()):
            yield from reversed(trips)

    def open(self) -> Iterator[Trip]:
        """Trips that have not ended, the oldest first."""
        return (trip for trips in self._trips.values() for trip in trips if trip.finished is None)

    def rides(self, start: float, end: float) -> list[tuple[Trip, Ride]]:
        """Stays that touch the time from start to end, by their beginning."""
        since = bisect_right(self._closed, start, key=lambda trip: trip.finished or 0.0)
        trips = [*islice(self._closed, since, None), *self.open()]
        found = [
            (trip, ride)
            for trip in trips
            for ride in trip.rides
            if ride.start < end and (ride.end is None or ride.end > start)
        ]
        return sorted(found, key=lambda pair: pair[1].start)

    def ended(self, start: float) -> list[Trip]:
        """Trips that ended after `start`, by their end."""
        since = bisect_right(self._closed, start, key=lambda trip: trip.finished or 0.0)
        return list(islice(self._closed, since, None))
