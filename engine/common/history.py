"""Records of requests, filled from the core's reports: one `RequestRecord` for each sequence.
`RequestRecords` serves a run of the simulator or a bench; `History` adds a server's events,
incidents and step records, bounded in number and age.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import msgspec
import numpy as np

from jitney.engine.common.engine_info import EngineInfo
from jitney.engine.common.errors import RequestError
from jitney.engine.common.incidents import Incidents
from jitney.engine.common.messages import PromptChunk, SequenceEvent, StepReport
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.records import RecordRing
from jitney.engine.common.request_record import ComputedChunk, RequestRecord, SeatStay, Stay
from jitney.engine.common.requests import EngineRequest

#: Most ended requests that are stored.
_KEEP_REQUESTS = 16384
_KEEP_EVENTS = 16384
#: Most waits and first tokens stored for their distributions: (time, seconds).
_KEEP_SAMPLES = 8192
#: Records that are looked at between two pauses of `TimeSlices`.
_LOOKS = 32
_FINISHES = ("stop", "length", "abort", "deadline", "error")
#: Policies whose batch holds all its seats until its slowest sequence is done.
_HOLDING = ("static", "dynamic")
#: Called with a record when it has ended; must not wait.
_Listener = Callable[[RequestRecord], None]


@dataclass(eq=False, kw_only=True)
class RequestRecords:
    """The records of all requests since the start, filled from a core's reports."""

    #: Whether to fill `RequestRecord.tokens`, and `token_times`.
    keep_tokens: bool = False
    keep_times: bool = False
    #: Called with each record at its end.
    listeners: list[_Listener] = field(default_factory=list)
    #: Open sequences, and those of them in the background.
    n_open: int = 0
    n_open_background: int = 0
    #: Request id -> a record per sequence; in order of arrival.
    _records: dict[str, list[RequestRecord]] = field(default_factory=dict)
    _next_number: int = 0
    #: Number of the core's step 0.
    _first_step: int = 0
    #: The newest stay in each seat.
    _newest_stays: dict[int, Stay] = field(default_factory=dict)

    def submit(self, request: EngineRequest) -> None:
        """Add a new request: one record for each of its sequences."""
        n = request.sampling.n
        self._records[request.id] = [self._new_record(request, index) for index in range(n)]
        self.n_open += n
        if request.background:
            self.n_open_background += n

    def _new_record(self, request: EngineRequest, index: int) -> RequestRecord:
        record = RequestRecord(
            number=self._next_number,
            request_id=request.id,
            index=index,
            tenant=request.tenant,
            user=request.user,
            client_id=request.client_id,
            route=request.route,
            parameters=request.sampling.in_words,
            priority=request.priority,
            background=request.background,
            adapter=request.adapter,
            n_prompt=len(request.prompt),
            max_tokens=request.sampling.max_tokens or 0,
            arrival=request.arrival,
        )
        self._next_number += 1
        if self.keep_tokens:
            record.tokens = list(request.prompt)
        if self.keep_times:
            record.token_times = []
        return record

    def apply(self, report: StepReport, step: int, now: float) -> None:
        """Apply a report. step: of the report, else the step before; now: time of its end."""
        records_of = self._records.get
        keep_times = self.keep_times
        for output in report.outputs:
            records = records_of(output.request_id)
            if records is None:
                continue
            record = records[output.index]
            if record.finished is not None:
                continue
            if output.tokens:
                # Hot path: called for every token of every sequence; most need only these lines.
                record.n_output += len(output.tokens)
                record.accepted += output.accepted
                record.rejected += output.rejected
                if keep_times and record.token_times is not None:
                    record.token_times += [now] * len(output.tokens)
                if self.keep_tokens or not record.stays or record.stays[-1].first_token is None:
                    self._take_tokens(record, output, step, now)
            if output.finish is not None:
                if output.error is not None:
                    record.message, record.retry_s = output.error.message, output.error.retry_after
                self._end(record, output.finish, output.error_code, step, now)
        for event in report.events:
            self._take_event(event)

    def _take_tokens(
        self, record: RequestRecord, output: SequenceOutput, step: int, now: float
    ) -> None:
        if record.tokens is not None:
            record.tokens += output.tokens
        # A token of a sequence that was just preempted belongs to the stay before.
        if record.stays and record.stays[-1].first_token is None:
            record.stays[-1].first_token = now
            record.stays[-1].first_step = step
        if record.first_token is None:
            record.first_token = now
            record.cached_tokens = output.cached_tokens
            self._first_token(record, step, now)

    def _first_token(self, record: RequestRecord, step: int, now: float) -> None:
        """Record the first token."""

    def _take_event(self, event: SequenceEvent) -> None:
        record = self.find(event.request_id, event.index)
        if record is None or record.finished is not None:
            return  # it ended between the plan and this report
        step = event.step + self._first_step
        t = self._time_of(event)
        if event.event == "seated":
            self._board(record, event.seat, step, t)
        elif event.event == "preempted":
            self._preempt(record, step, t)

    def _time_of(self, event: SequenceEvent) -> float:
        """Time at which an event took effect: the planning of its step."""
        return event.t

    def _board(self, record: RequestRecord, seat: int, step: int, t: float) -> None:
        if record.boarded is None:
            record.boarded = t
        before = self._newest_stays.get(seat)
        if before is not None and before.end is not None and before.end > t:
            _end_stay(before, t)  # its last token was in flight when the seat was given on
        stay = self._newest_stays[seat] = Stay(seat, step, t)
        record.stays.append(stay)

    def _preempt(self, record: RequestRecord, step: int, t: float) -> None:
        record.preemptions += 1
        _leave(record, step - 1, t, "preempted")

    def _end(self, record: RequestRecord, finish: str, code: str, step: int, t: float) -> None:
        _leave(record, step, t, finish)
        record.finished = t
        record.finish = finish
        record.code = code
        self.n_open -= 1
        if record.background:
            self.n_open_background -= 1
        for listener in self.listeners:
            listener(record)

    def find(self, request_id: str, index: int) -> RequestRecord | None:
        """The record of one sequence, None if there is none."""
        records = self._records.get(request_id, ())
        if not 0 <= index < len(records):
            return None
        return records[index]

    def oldest(self) -> Iterator[RequestRecord]:
        """All records, in the order of their arrival."""
        for records in self._records.values():
            yield from records

    def newest(self) -> Iterator[RequestRecord]:
        """All records, the newest first."""
        for records in reversed(list(self._records.values())):  # which may change meanwhile
            yield from reversed(records)

    def open(self) -> Iterator[RequestRecord]:
        """Records without an end, the oldest first."""
        return (record for record in self.oldest() if record.finished is None)


def _leave(record: RequestRecord, step: int, t: float, how: str) -> None:
    """End the sequence's stay, if it has one, after `step`, done at t."""
    stay = record.stay
    if stay is not None:
        _end_stay(stay, t)
        stay.last_step = step
        stay.how = how


def _end_stay(stay: Stay, t: float) -> None:
    """Set the end of a stay."""
    stay.end = max(t, stay.start)
    if stay.first_token is not None and stay.first_token > stay.end:
        stay.first_token = None


def _newest(most: int) -> Callable[[], deque[Any]]:
    """A factory of deques that hold the newest `most` items."""
    return partial(deque, maxlen=most)


@dataclass(eq=False)
class _EventLog:
    """The newest events of sequences."""

    #: Events since the start.
    n: int = 0
    _newest: deque[SequenceEvent] = field(default_factory=_newest(_KEEP_EVENTS))

    def add(self, event: SequenceEvent) -> None:
        self._newest.append(event)
        self.n += 1

    def since(self, number: int) -> list[SequenceEvent]:
        """Events after the first `number`, as far as they are stored."""
        forgotten = self.n - len(self._newest)
        return list(islice(self._newest, max(0, number - forgotten), None))


@dataclass(eq=False, kw_only=True)
class History(RequestRecords):
    """The recent past of one engine, as recorded by the server across restarts of its core."""

    #: Seconds that ended requests are stored.
    keep_s: ClassVar[float] = 600.0
    #: Seconds.
    clock: Callable[[], float] = time.monotonic
    #: Records of the newest steps; numbers continue when a core is replaced.
    records: RecordRing = field(default_factory=RecordRing)
    #: The record of the sequence in each seat; None: free.
    seats: list[RequestRecord | None] = field(default_factory=list)
    #: Seats that a batch holds after their sequence's end.
    held_seats: set[int] = field(default_factory=set)
    #: Names of the engine's adapters by number, removed ones included.
    adapters: dict[int, str] = field(default_factory=dict[int, str])
    #: (time, seconds since arrival) of boardings and of first tokens.
    waits: deque[tuple[float, float]] = field(default_factory=_newest(_KEEP_SAMPLES))
    first_tokens: deque[tuple[float, float]] = field(default_factory=_newest(_KEEP_SAMPLES))
    #: Totals since the start: ends by reason, boardings, cached prompt tokens.
    finished: dict[str, int] = field(init=False)
    boarded: int = 0
    cached_tokens: int = 0
    events: _EventLog = field(default_factory=_EventLog)
    incidents: Incidents = field(init=False)
    #: Time at which the newest core got ready.
    ready_at: float = 0.0
    #: Whether the policy holds seats of ended sequences.
    _holds: bool = False
    #: Ended requests, by their end.
    _ended: deque[RequestRecord] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.finished = dict.fromkeys(_FINISHES, 0)
        self.incidents = Incidents(self.clock)
        self._started = self.clock()

    @classmethod
    def check_minutes(cls, minutes: float) -> None:
        """Raise RequestError if the history is shorter than this."""
        most = cls.keep_s / 60
        if not 0 < minutes <= most:
            raise RequestError(f"minutes must be more than 0 and at most {most:g}", param="minutes")

    @property
    def kept_from(self) -> float:
        """The time from which on the history is complete."""
        kept_from = max(self._started, self.clock() - self.keep_s)
        if len(self._ended) >= _KEEP_REQUESTS:
            kept_from = max(kept_from, _end_of(self._ended[0]))
        return kept_from

    @property
    def oldest_end(self) -> float:
        """Time of the oldest stored end of a request; infinity: there is none."""
        return _end_of(self._ended[0]) if self._ended else math.inf

    @property
    def n_waiting(self) -> int:
        """Sequences without a seat."""
        n_seated = sum(record is not None for record in self.seats)
        return self.n_open - n_seated + len(self.held_seats)

    def adapter_of(self, record: RequestRecord) -> str:
        """The name of a record's adapter; empty: none."""
        return self.adapters.get(record.adapter, "")

    def learn_adapters(self, info: EngineInfo) -> None:
        """Store the names of the engine's adapters."""
        self.adapters |= {number: name for name, number in info.model.adapters.items()}

    def core_ready(self, info: EngineInfo) -> None:
        """Prepare for a new core, whose step numbers begin anew, while those of the history
        continue.
        """
        self.ready_at = self.clock()
        self.incidents.core_ready(self.ready_at)
        self.seats = [None] * info.sizes.seats
        self.learn_adapters(info)
        self.held_seats.clear()
        self._holds = info.queue.policy in _HOLDING
        self._first_step = self.records.last_step + 1

    def core_lost(self) -> None:
        """End every open request, since the core is lost for good."""
        for record in list(self.open()):
            self._end(record, "error", "engine_dead", self.records.last_step, self.clock())
        self._clear_seats()

    def _clear_seats(self) -> None:
        self.seats = [None] * len(self.seats)
        self.held_seats.clear()

    def seats_lost(self) -> None:
        """Empty the seats, since open requests wait for another core."""
        step, t = self.records.last_step, self.clock()
        for record in list(self.open()):
            seat = record.seat
            if record.n_output:
                self.incidents.stream_stopped((record.request_id, record.index))
            if seat >= 0:
                super()._preempt(record, step + 1, t)
                self._add_event("preempted", record, step, t, seat, "engine_died")
        self._clear_seats()

    def submit(self, request: EngineRequest) -> None:
        super().submit(request)
        for record in self._records[request.id]:
            step = self.records.last_step
            self._add_event("queued", record, step, request.arrival, reason=request.client_id)

    def take(self, report: StepReport) -> np.void | None:
        """Apply a report; returns its step record, renumbered, if it has one."""
        step_record = None
        now = self.clock()
        if report.record:
            step_record = self.records.add(report.record, self._first_step)
            now = self.records.last_ready
        self._take_chunks(report.chunks, self.records.last_step)
        self.apply(report, self.records.last_step, now)
        return step_record

    def _take_chunks(self, chunks: list[PromptChunk], step: int) -> None:
        for rows in chunks:
            record = self.find(rows.request_id, rows.index)
            if record is not None:
                record.chunks.append(ComputedChunk(step, rows.start, rows.count, rows.recomputed))

    def _take_tokens(
        self, record: RequestRecord, output: SequenceOutput, step: int, now: float
    ) -> None:
        super()._take_tokens(record, output, step, now)
        self.incidents.stream_flows((record.request_id, record.index), now)

    def _first_token(self, record: RequestRecord, step: int, now: float) -> None:
        self.cached_tokens += record.cached_tokens
        if not record.background:
            self.first_tokens.append((now, now - record.arrival))
        self._add_event("first_token", record, step, now)

    def _time_of(self, event: SequenceEvent) -> float:
        """Time at which an event took effect: the end of the step before its own."""
        return max(event.t, self.records.last_ready)

    def _take_event(self, event: SequenceEvent) -> None:
        if event.event == "released":
            self._release(event)
        else:
            super()._take_event(event)

    def _release(self, event: SequenceEvent) -> None:
        """Free a seat that a batch held."""
        self.held_seats.discard(event.seat)
        self.seats[event.seat] = None
        step = event.step + self._first_step
        self.events.add(msgspec.structs.replace(event, step=step, t=self._time_of(event)))

    def _board(self, record: RequestRecord, seat: int, step: int, t: float) -> None:
        if record.boarded is None:
            self.boarded += 1
            if not record.background:
                self.waits.append((t, t - record.arrival))
        super()._board(record, seat, step, t)
        self.held_seats.discard(seat)
        self.seats[seat] = record
        self._add_event("seated", record, step, t)

    def _preempt(self, record: RequestRecord, step: int, t: float) -> None:
        seat = record.seat
        super()._preempt(record, step, t)
        self._vacate(seat, record)
        self._add_event("preempted", record, step, t, seat)

    def _end(self, record: RequestRecord, finish: str, code: str, step: int, t: float) -> None:
        seat = record.seat
        super()._end(record, finish, code, step, t)
        if not record.refused:  # an answer that refuses it is one of `incidents`
            self.finished[finish] += 1
        self.incidents.stream_flows((record.request_id, record.index), t)
        self._vacate(seat, record)
        event = "aborted" if finish == "abort" else "finished"
        self._add_event(event, record, step, t, seat, code or finish)
        self._ended.append(record)
        self._forget(t)

    def _vacate(self, seat: int, record: RequestRecord) -> None:
        """Free a sequence's seat, or mark it as held by its batch."""
        if seat < 0 or self.seats[seat] is not record:
            return
        if self._holds:
            self.held_seats.add(seat)
        else:
            self.seats[seat] = None

    def _forget(self, now: float) -> None:
        """Drop ended requests that are too old or too many."""
        ended = self._ended
        while len(ended) > _KEEP_REQUESTS or (ended and _end_of(ended[0]) < now - self.keep_s):
            request_id = ended.popleft().request_id
            siblings = self._records.get(request_id, [])
            if all(record.finished is not None for record in siblings):
                self._records.pop(request_id, None)

    def _add_event(
        self,
        event: str,
        record: RequestRecord,
        step: int,
        t: float,
        seat: int | None = None,
        reason: str = "",
    ) -> None:
        """seat: its seat at that time; None: its present one."""
        self.events.add(
            SequenceEvent(
                event=event,
                request_id=record.request_id,
                index=record.index,
                seat=record.seat if seat is None else seat,
                step=step,
                t=t,
                n_in=record.n_prompt,
                n_out=record.n_output,
                reason=reason,
            )
        )

    def ended(self, start: float) -> list[RequestRecord]:
        """Requests that ended after `start`, by their end."""
        since = bisect_right(self._ended, start, key=_end_of)
        return list(islice(self._ended, since, None))

    def stays(self, start: float, end: float) -> Generator[None, None, list[SeatStay]]:
        """Stays that touch a time, by their beginning. Work for `TimeSlices`."""
        pairs: list[SeatStay] = []
        for place, record in enumerate([*self.ended(start), *self.open()]):
            pairs += record.stays_within(start, end)
            if place % _LOOKS == 0:
                yield
        pairs.sort(key=lambda pair: pair[1].start)
        return pairs


def _end_of(record: RequestRecord) -> float:
    """Time of the end of an ended request."""
    return record.finished or 0.0
