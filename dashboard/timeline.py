"""The recent past: step records as columns or in bins, stays in seats, and both as a Chrome trace.
Each may take seconds for ten minutes of history, so generators are work for `TimeSlices`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from jitney.dashboard.latency import Latencies
from jitney.dashboard.sse import tenth_ms as _t
from jitney.engine.common.device_use import DeviceUse
from jitney.engine.common.engine_info import EngineInfo
from jitney.engine.common.history import History
from jitney.engine.common.records import ROW_KINDS, STEP_DTYPE
from jitney.engine.common.request_record import RequestRecord, SeatStay, Stay
from jitney.engine.common.requests import JsonDict
from jitney.engine.server import EVERYBODY, Identity

_MAX_STAYS = 20_000
#: Most step records in one answer.
_MAX_RECORDS = 4096
#: Beyond every step's number.
_NEWEST = 2**62
#: Most steps in one trace.
_MAX_TRACED = 50_000
#: Records that are copied, and requests, stays, bins and steps that are processed, between two
#: pauses.
_COPIED, _TOLD = 8192, 32
#: Fields of a step record that a bin adds up.
_SUMMED = ("boarded", "finished", "preempted", "compiled", "cached_tokens")
#: Fields of which a bin has the highest.
_HIGHEST = ("waiting", "pages_used")
_STAY_COLUMNS = (
    "seat",
    "request",
    "index",
    "from",
    "first_token",
    "to",
    "end",
    "n_prompt",
    "n_output",
    "accepted",
)
#: Makes JSON, with pauses in between.
type Work = Generator[None, None, JsonDict]

#: Fields of a step in a trace.
_TRACED = ("step", "bucket_tokens", *ROW_KINDS, "seats_busy", "waiting")


def record_columns(history: History, after: int, until: int, now: float) -> Work:
    """The newest _MAX_RECORDS of the steps after < step <= until: one list per field of STEP_DTYPE,
    seconds to the microsecond, and `ready`, when each step was done. left_out: number of
    older requested steps that are missing.
    """
    copies = yield from _copied(history, after, until)
    records, ready = copies
    columns: dict[str, list[Any]] = {}
    for name in STEP_DTYPE.names or ():
        columns[name] = _column(records[-_MAX_RECORDS:][name])
        yield
    columns["ready"] = _column(ready[-_MAX_RECORDS:])
    return {
        "t": round(now, 4),
        "row_kinds": ROW_KINDS,
        "left_out": max(0, len(records) - _MAX_RECORDS),
        "columns": columns,
    }


def own_columns(history: History, after: int, until: int, now: float, identity: Identity) -> Work:
    """As `record_columns`, for a viewer who is no administrator: the rows of its own requests, in
    the steps in which it had any, and totals of all steps that are kept, whosever they were.
    """
    copies = yield from _copied(history, -1, history.records.last_step)
    records, ready = copies
    rows = _OwnRows(records["step"].astype(np.int64))
    for place, record in enumerate([*history.ended(now - History.keep_s), *history.open()]):
        if identity.may_see(record.tenant):
            rows.add(record)
        if place % _TOLD == 0:
            yield
    number = rows.number
    places = np.flatnonzero(rows.any() & (number > after) & (number <= until))
    shown = places[-_MAX_RECORDS:]
    columns = {name: counts[shown].tolist() for name, counts in rows.counts.items()}
    columns |= {"step": number[shown].tolist(), "ready": _column(ready[shown])}
    return {
        "t": round(now, 4),
        "row_kinds": list(rows.counts),
        "left_out": len(places) - len(shown),
        "columns": columns,
        "totals": {name: int(records[name].sum()) for name in (*ROW_KINDS, *_SUMMED)}
        | {"steps": len(records)},
    }


class _OwnRows:
    """Rows of some requests, by step and kind."""

    def __init__(self, number: np.ndarray):
        #: int64[steps]: ascending numbers of the steps that are kept.
        self.number = number
        kinds = ("prefill", "recomputed", "decode")
        self.counts = {kind: np.zeros(len(number), np.int64) for kind in kinds}

    def any(self) -> np.ndarray:
        """bool[steps]: they had rows in it."""
        return np.add.reduce(list(self.counts.values())) > 0

    def add(self, request: RequestRecord) -> None:
        for chunk in list(request.chunks):
            self._add("prefill", chunk.step, chunk.step, chunk.count - chunk.recomputed)
            self._add("recomputed", chunk.step, chunk.step, chunk.recomputed)
        for stay in request.stays:
            if stay.first_step >= 0:
                last = stay.last_step if stay.end is not None else _NEWEST
                self._add("decode", stay.first_step + 1, last, 1)

    def _add(self, kind: str, first: int, last: int, rows: int) -> None:
        """So many rows in each of the steps from `first` to `last`."""
        low, high = np.searchsorted(self.number, (first, last + 1))
        self.counts[kind][low:high] += rows


def _copied(
    history: History, after: int, until: int
) -> Generator[None, None, tuple[np.ndarray, np.ndarray]]:
    """`RecordRing.steps` in pieces, as all records are 22 MB."""
    until = min(until, history.records.last_step)
    parts = [history.records.steps(after, after)]
    for start in range(max(after, history.records.first_step - 1), until, _COPIED):
        parts.append(history.records.steps(start, min(start + _COPIED, until)))
        yield
    records, ready = zip(*parts, strict=True)
    return np.concatenate(records), np.concatenate(ready)


def _column(values: np.ndarray) -> list[Any]:
    if values.dtype.kind == "f":
        return np.round(values.astype(np.float64), 6).tolist()
    return values.tolist()


@dataclass(frozen=True, slots=True)
class Window:
    """Steps and requests at start < t <= end."""

    history: History
    start: float
    end: float
    #: Facts about step costs and the device; None: bins have no share of the device's limit.
    info: EngineInfo | None = None

    @classmethod
    def shown(
        cls,
        history: History,
        start: float,
        end: float,
        now: float,
        info: EngineInfo | None = None,
    ) -> Window:
        """The part of the requested time that can be shown: within `History.keep_s`, at least a
        millisecond long.
        """
        end = min(end, now)
        start = max(start, now - History.keep_s)
        return cls(history, min(start, end - 1e-3), end, info)

    def timeline(self, bins: int, now: float, *, identity: Identity = EVERYBODY) -> Work:
        """All of it in `bins` equal parts (for a user none shorter than a second), with the stays
        in seats that touch this time, as `identity` may see it.
        """
        history = self.history
        if not identity.is_admin:
            # A bin of one step would tell the rows of all requests in it.
            bins = max(1, min(bins, round(self.end - self.start)))
        stays = yield from self.history.stays(self.start, self.end)
        left_out = max(0, len(stays) - _MAX_STAYS)
        columns = yield from stay_columns(stays[left_out:], identity)
        return {
            "now": round(now, 4),
            "from": round(self.start, 4),
            "to": round(self.end, 4),
            "kept_from": round(history.kept_from, 4),
            "seats": len(history.seats),
            "bins": (yield from self.binned(bins)),
            "stays": columns,
            "stays_left_out": left_out,
            "outages": msgspec.to_builtins(list(history.incidents.outages)),
        }

    def trace(self, now: float, model: str) -> Generator[bytes, None, None]:
        """Chrome's trace event format (JSON, in pieces): a thread a seat in process 1, the step
        loop in process 2; microseconds.
        """
        history = self.history
        stays = yield from _quietly(history.stays(self.start, self.end))
        steps = yield from _quietly(self._steps())
        mark = b'{"displayTimeUnit":"ms","traceEvents":['
        for events in _trace_events(history, stays, steps, now, model):
            yield mark + msgspec.json.encode(events)[1:-1]
            mark = b","
        yield b"]}"

    def _steps(self) -> Generator[None, None, tuple[np.ndarray, np.ndarray]]:
        """The steps' records, and when each was done."""
        return (yield from _copied(self.history, *self.history.records.span(self.start, self.end)))

    def binned(self, bins: int) -> Work:
        """Steps by the time they were done: sums, and the highest or mean of what is not a sum
        (null without steps).
        """
        records, ready = yield from self._steps()
        width = (self.end - self.start) / bins
        parts = _Bins(ready, self.start, width, bins)
        columns = {
            "t": np.round(self.start + width * np.arange(bins), 4).tolist(),
            "width": round(width, 6),
            **_step_columns(parts, records),
        }
        yield
        columns["rows"] = {}
        for kind in ROW_KINDS:
            columns["rows"][kind] = parts.totals(records[kind])
            yield
        for name in _SUMMED:
            columns[name] = parts.totals(records[name])
            yield
        for name in _HIGHEST:
            columns[name] = parts.highest(records[name])
            yield
        columns["floor_s"] = self._floor(parts, records)
        columns["refused"] = self._refused(bins)
        latencies = Latencies(self.history, records, ready, self.start, self.end)
        return columns | (yield from latencies.percentiles(bins))

    def _floor(self, parts: _Bins, records: np.ndarray) -> list[float] | None:
        """Seconds that each bin's steps would take at the device's limit; None: not known."""
        seconds = DeviceUse.least_seconds(self.info, records)
        return None if seconds is None else parts.seconds(seconds)

    def _refused(self, bins: int) -> list[int]:
        times = [t for t, _ in list(self.history.incidents.refused_tenants)]
        return np.histogram(times, bins, (self.start, self.end))[0].tolist()


def stay_columns(
    stays: list[SeatStay], identity: Identity = EVERYBODY
) -> Generator[None, None, dict[str, list[Any]]]:
    """One list a column; `to` is null for who is still on board, `first_token` for who has none
    yet. Of others than `identity` may see there is the time alone.
    """
    columns: dict[str, list[Any]] = {name: [] for name in _STAY_COLUMNS}
    for place, (request, stay) in enumerate(stays):
        row = _stay_times(stay) | _passenger(request, stay, identity)
        for name, value in row.items():
            columns[name].append(value)
        if place % _TOLD == 0:
            yield
    return columns


def _stay_times(stay: Stay) -> JsonDict:
    return {
        "seat": stay.seat,
        "from": _t(stay.start),
        "first_token": _t(stay.first_token),
        "to": _t(stay.end),
    }


def _passenger(request: RequestRecord, stay: Stay, identity: Identity) -> JsonDict:
    """The sequence of a stay, as far as `identity` may see it."""
    if not identity.may_see(request.tenant):
        nothing = dict.fromkeys(("index", "n_prompt", "n_output", "accepted"), 0)
        return {"request": "", "end": "", **nothing}
    return {
        "request": request.request_id,
        "index": request.index,
        "end": stay.how,
        "n_prompt": request.n_prompt,
        "n_output": request.n_output,
        "accepted": request.accepted,
    }


def _step_columns(parts: _Bins, records: np.ndarray) -> JsonDict:
    spans = records["device_s"].astype(np.float64) + records["gap_s"]
    return {
        "steps": parts.counts.tolist(),
        "step_s": parts.seconds(spans),
        "gap_s": parts.seconds(records["gap_s"]),
        "longest_step_s": parts.highest(spans),
        "seats_busy": parts.means(records["seats_busy"]),
    }


class _Bins:
    """Assignment of steps to bins. Bins are open to the left, like the whole window."""

    def __init__(self, ready: np.ndarray, start: float, width: float, bins: int):
        places = np.ceil((ready - start) / width).astype(np.int64) - 1
        #: int64[steps]: the step's bin.
        self.place = np.clip(places, 0, bins - 1)
        #: int64[bins]: how many steps there are.
        self.counts = np.bincount(self.place, minlength=bins)

    def _sums(self, values: np.ndarray) -> np.ndarray:
        return np.bincount(self.place, values, minlength=len(self.counts))

    def totals(self, values: np.ndarray) -> list[int]:
        return self._sums(values).astype(np.int64).tolist()

    def seconds(self, values: np.ndarray) -> list[float]:
        return np.round(self._sums(values), 6).tolist()

    def means(self, values: np.ndarray) -> list[float | None]:
        means = self._sums(values) / np.maximum(1, self.counts)
        return self._or_none(np.round(means, 2))

    def highest(self, values: np.ndarray) -> list[float | None]:
        highest = np.full(len(self.counts), -np.inf)
        np.maximum.at(highest, self.place, values)
        return self._or_none(np.round(highest, 6))

    def _or_none(self, values: np.ndarray) -> list[float | None]:
        """The values, with None for bins without steps."""
        pairs = zip(values.tolist(), self.counts, strict=True)
        return [value if count else None for value, count in pairs]


def _quietly[T](work: Generator[None, None, T]) -> Generator[bytes, None, T]:
    """The same work, as a part of work whose pauses yield pieces of a text."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value
        yield b""


def _trace_events(
    history: History,
    stays: list[SeatStay],
    steps: tuple[np.ndarray, np.ndarray],
    now: float,
    model: str,
) -> Iterator[list[JsonDict]]:
    """The events in groups, none of them empty. taken: records, and when each step was done."""
    yield _thread_names(len(history.seats), model)
    for request, stay in stays:
        yield _stay_events(request, stay, now)
    records, ready = steps[0][-_MAX_TRACED:], steps[1][-_MAX_TRACED:]
    for first in range(0, len(records), _TOLD):
        yield _step_events(records[first : first + _TOLD], ready[first : first + _TOLD])


def _thread_names(seats: int, model: str) -> list[JsonDict]:
    return [
        _meta(1, 0, "process_name", f"{model}: seats"),
        _meta(2, 0, "process_name", "step loop"),
        *(_meta(1, seat, "thread_name", f"seat {seat}") for seat in range(seats)),
    ]


def _meta(pid: int, tid: int, kind: str, name: str) -> JsonDict:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


def _span(pid: int, tid: int, name: str, start: float, end: float, args: JsonDict) -> JsonDict:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "ts": round(start * 1e6),
        "dur": max(0, round((end - start) * 1e6)),
        "args": args,
    }


def _stay_events(request: RequestRecord, stay: Stay, now: float) -> list[JsonDict]:
    end = stay.end if stay.end is not None else now
    first = stay.first_token if stay.first_token is not None else end
    args = {
        "request": request.request_id,
        "index": request.index,
        "prompt_tokens": request.n_prompt,
        "output_tokens": request.n_output,
        "end": stay.how,
    }
    name = request.request_id
    events = [_span(1, stay.seat, f"prefill {name}", stay.start, min(first, end), args)]
    if first < end:
        events.append(_span(1, stay.seat, f"decode {name}", first, end, args))
    return events


def _step_events(records: np.ndarray, ready: np.ndarray) -> list[JsonDict]:
    """Trace events of a few steps: two each."""
    columns = {name: records[name].tolist() for name in {*_TRACED, "mixed", "device_s"}}
    events: list[JsonDict] = []
    for place, done in enumerate(ready.tolist()):
        args = {name: columns[name][place] for name in _TRACED}
        kind = "mixed" if columns["mixed"][place] else "decode"
        device = _span(2, 1, kind, done - columns["device_s"][place], done, args)
        events += [device, _waiting(device["ts"], args["waiting"])]
    return events


def _waiting(ts: int, sequences: int) -> JsonDict:
    return {
        "ph": "C",
        "pid": 2,
        "tid": 0,
        "name": "waiting",
        "ts": ts,
        "args": {"sequences": sequences},
    }
