"""The recent past: step records as columns or in bins, the seats' stays, and both as a Chrome
trace.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from jitney.dashboard import latency
from jitney.engine.api.access import EVERYBODY, Identity
from jitney.engine.records import FIELDS, ROW_KINDS
from jitney.engine.telemetry.history import KEEP_S, History
from jitney.engine.telemetry.request_record import RequestRecord, Stay

MAX_BINS = 600
_MAX_STAYS = 20_000
#: Most step records in one answer.
MAX_RECORDS = 4096
#: Most steps in one trace.
_MAX_TRACED = 50_000
#: Fields of a step record that a bin adds up.
_SUMMED = ("boarded", "finished", "preempted", "compiled")
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
)
#: Fields that a trace tells of a step.
_TRACED = ("step", "bucket_tokens", *ROW_KINDS, "seats_busy", "waiting")


def record_columns(records: np.ndarray, ready: np.ndarray, now: float) -> dict[str, Any]:
    """The newest MAX_RECORDS of `records`: one list per field of STEP_DTYPE, seconds to the
    microsecond.

    ready: when each step was done. left_out: how many older ones were asked for and are not here.
    """
    kept = records[-MAX_RECORDS:]
    columns = {name: _column(kept[name]) for name in FIELDS}
    columns["ready"] = _column(ready[-MAX_RECORDS:])
    return {
        "t": round(now, 4),
        "row_kinds": ROW_KINDS,
        "left_out": len(records) - len(kept),
        "columns": columns,
    }


def _column(values: np.ndarray) -> list[Any]:
    if values.dtype.kind == "f":
        return np.round(values.astype(np.float64), 6).tolist()
    return values.tolist()


def timeline(
    history: History,
    start: float,
    end: float,
    bins: int,
    now: float,
    *,
    identity: Identity = EVERYBODY,
) -> dict[str, Any]:
    """What happened at start < t <= end, in `bins` equal parts, with the stays in seats that touch
    this time, as `identity` may see it.
    """
    stays = history.stays(start, end)
    left_out = max(0, len(stays) - _MAX_STAYS)
    return {
        "now": round(now, 4),
        "from": round(start, 4),
        "to": round(end, 4),
        "kept_from": round(history.kept_from, 4),
        "seats": len(history.seats),
        "bins": binned(history, start, end, bins),
        "stays": stay_columns(stays[left_out:], identity),
        "stays_left_out": left_out,
        "outages": msgspec.to_builtins(list(history.outages)),
    }


def stay_columns(
    stays: list[tuple[RequestRecord, Stay]], identity: Identity = EVERYBODY
) -> dict[str, list[Any]]:
    """One list a column; `to` is null for who is still on board, `first_token` for who has none
    yet. Of others than `identity` may see there is the time alone.
    """
    columns: dict[str, list[Any]] = {name: [] for name in _STAY_COLUMNS}
    for request, stay in stays:
        shown = identity.may_see(request.tenant)
        columns["seat"].append(stay.seat)
        columns["request"].append(request.request_id if shown else "")
        columns["index"].append(request.index if shown else 0)
        columns["from"].append(_t(stay.start))
        columns["first_token"].append(_t(stay.first_token))
        columns["to"].append(_t(stay.end))
        columns["end"].append(stay.how if shown else "")
        columns["n_prompt"].append(request.n_prompt if shown else 0)
        columns["n_output"].append(request.n_output if shown else 0)
    return columns


def binned(history: History, start: float, end: float, bins: int) -> dict[str, Any]:
    """Steps by the time they were done: sums, and the highest or mean of what is not a sum (null
    without steps).
    """
    records, ready = history.records.between(start, end)
    width = (end - start) / bins
    parts = _Bins(ready, start, width, bins)
    spans = records["device_s"].astype(np.float64) + records["gap_s"]
    columns: dict[str, Any] = {
        "t": np.round(start + width * np.arange(bins), 4).tolist(),
        "width": round(width, 6),
        "steps": parts.counts.tolist(),
        "rows": {kind: parts.totals(records[kind]) for kind in ROW_KINDS},
        "step_s": parts.seconds(spans),
        "gap_s": parts.seconds(records["gap_s"]),
        "longest_step_s": parts.highest(spans),
        "seats_busy": parts.means(records["seats_busy"]),
    }
    for name in _SUMMED:
        columns[name] = parts.totals(records[name])
    for name in _HIGHEST:
        columns[name] = parts.highest(records[name])
    for name, values in _p95(history, start, end, bins).items():
        columns[f"{name}_p95"] = values
    return columns


class _Bins:
    """Which bin each step is in. Bins are open to the left, as the whole window is."""

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
        """None where there is no step."""
        pairs = zip(values.tolist(), self.counts.tolist(), strict=True)
        return [value if count else None for value, count in pairs]


def _p95(history: History, start: float, end: float, bins: int) -> dict[str, list[float | None]]:
    """The 95th percentiles of wait, ttft and itl in each bin."""
    edges = np.linspace(start, end, bins + 1)
    result: dict[str, list[float | None]] = {}
    for name, (t, values, weights) in latency.samples(history, start, end).items():
        cuts = np.searchsorted(t, edges, "right").tolist()
        result[name] = [
            _p95_of(values[low:high], weights[low:high]) if high > low else None
            for low, high in pairwise(cuts)
        ]
    return result


def _p95_of(values: np.ndarray, weights: np.ndarray) -> float | None:
    points = latency.percentiles(values, weights)
    return None if points is None else points["p95"]


def window(history: History, start: float, end: float, now: float) -> tuple[float, float]:
    """The part of the wanted time that can be shown: within KEEP_S, at least a millisecond long."""
    end = min(end, now)
    start = max(start, now - KEEP_S)
    return min(start, end - 1e-3), end


def trace(history: History, start: float, end: float, now: float, model: str) -> bytes:
    """Chrome's trace event format (JSON): a thread a seat in process 1, the step loop in process 2;
    microseconds.
    """
    events = [_meta(1, 0, "process_name", f"{model}: seats")]
    events.append(_meta(2, 0, "process_name", "step loop"))
    for seat in range(len(history.seats)):
        events.append(_meta(1, seat, "thread_name", f"seat {seat}"))
    for request, stay in history.stays(start, end):
        events += _stay_events(request, stay, now)
    records, ready = history.records.between(start, end)
    for record, done in zip(records[-_MAX_TRACED:], ready[-_MAX_TRACED:], strict=True):
        events += _step_events(record, float(done))
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _meta(pid: int, tid: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


def _span(
    pid: int, tid: int, name: str, start: float, end: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "ts": round(start * 1e6),
        "dur": max(0, round((end - start) * 1e6)),
        "args": args,
    }


def _stay_events(request: RequestRecord, stay: Stay, now: float) -> list[dict[str, Any]]:
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


def _step_events(record: np.void, done: float) -> list[dict[str, Any]]:
    kind = "mixed" if record["mixed"] else "decode"
    args = {name: int(record[name]) for name in _TRACED}
    device = _span(2, 1, kind, done - float(record["device_s"]), done, args)
    waiting = {
        "ph": "C",
        "pid": 2,
        "tid": 0,
        "name": "waiting",
        "ts": device["ts"],
        "args": {"sequences": int(record["waiting"])},
    }
    return [device, waiting]


def _t(value: float | None) -> float | None:
    """Seconds to a tenth of a millisecond."""
    return None if value is None else round(value, 4)
