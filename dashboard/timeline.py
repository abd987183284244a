"""The recent past in bins, the seats' stays, and both as a Chrome trace."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from jitney.dashboard import latency
from jitney.engine.records import ROW_KINDS
from jitney.engine.telemetry.history import KEEP_S, History
from jitney.engine.telemetry.request_record import RequestRecord, Stay

MAX_BINS = 600
MAX_STAYS = 20_000
#: Most steps in one trace.
MAX_TRACED = 50_000
SUMMED = ("boarded", "finished", "preempted", "compiled")
HIGHEST = ("waiting", "pages_used")


def timeline(history: History, start: float, end: float, bins: int, now: float) -> dict[str, Any]:
    """What happened at start < t <= end, in `bins` equal parts, with the stays in seats that touch
    this time.
    """
    stays = history.stays(start, end)
    left_out = max(0, len(stays) - MAX_STAYS)
    return {
        "now": round(now, 4),
        "from": round(start, 4),
        "to": round(end, 4),
        "kept_from": round(history.kept_from, 4),
        "seats": len(history.seats),
        "bins": binned(history, start, end, bins),
        "rides": stay_columns(stays[left_out:]),
        "rides_left_out": left_out,
    }


def stay_columns(stays: list[tuple[RequestRecord, Stay]]) -> dict[str, list[Any]]:
    """One list a column; `to` is null for who is still on board, `first_token` for who has none
    yet.
    """
    columns: dict[str, list[Any]] = {
        name: []
        for name in (
            "seat",
            "request",
            "index",
            "from",
            "first_token",
            "to",
            "end",
            "n_in",
            "n_out",
        )
    }
    for request, stay in stays:
        values = (
            stay.seat,
            request.request_id,
            request.index,
            round(stay.start, 4),
            _t(stay.first_token),
            _t(stay.end),
            stay.how,
            request.n_prompt,
            request.n_output,
        )
        for column, value in zip(columns.values(), values, strict=True):
            column.append(value)
    return columns


def binned(history: History, start: float, end: float, bins: int) -> dict[str, Any]:
    """Steps by the time they were done: sums, and the highest or mean of what is not a sum (null
    without steps).
    """
    records, ready = history.records.between(start, end)
    width = (end - start) / bins
    # Bins are open to the left, as the whole window is.
    at = np.clip(np.ceil((ready - start) / width).astype(np.int64) - 1, 0, bins - 1)
    counts = np.bincount(at, minlength=bins)

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(at, values, minlength=bins)

    spans = records["device_s"].astype(np.float64) + records["gap_s"]
    found: dict[str, Any] = {
        "t": np.round(start + width * np.arange(bins), 4).tolist(),
        "width": round(width, 6),
        "steps": counts.tolist(),
        "rows": {kind: total(records[kind]).astype(np.int64).tolist() for kind in ROW_KINDS},
        "step_s": np.round(total(spans), 6).tolist(),
        "gap_s": np.round(total(records["gap_s"]), 6).tolist(),
        "worst_s": _highest(at, spans, counts),
        "seats_busy": [
            None if not n else round(s / n, 2)
            for s, n in zip(total(records["seats_busy"]).tolist(), counts.tolist(), strict=True)
        ],
    }
    found |= {name: total(records[name]).astype(np.int64).tolist() for name in SUMMED}
    found |= {name: _highest(at, records[name], counts) for name in HIGHEST}
    return found | {
        f"{name}_p95": values for name, values in _p95(history, start, end, bins).items()
    }


def _highest(at: np.ndarray, values: np.ndarray, counts: np.ndarray) -> list[float | None]:
    """The highest value of each bin, None where there is none."""
    highest = np.full(len(counts), -np.inf)
    np.maximum.at(highest, at, values)
    return [
        None if not n else round(value, 6)
        for value, n in zip(highest.tolist(), counts.tolist(), strict=True)
    ]


def _p95(history: History, start: float, end: float, bins: int) -> dict[str, list[float | None]]:
    """The 95th percentiles of wait, ttft and itl in each bin."""
    edges = np.linspace(start, end, bins + 1)
    found: dict[str, list[float | None]] = {}
    for name, (t, values, weights) in latency.samples(history, start, end).items():
        cuts = np.searchsorted(t, edges, "right")
        found[name] = []
        for low, high in pairwise(cuts.tolist()):
            told = latency.percentiles(values[low:high], weights[low:high]) if high > low else None
            found[name].append(told["p95"] if told else None)
    return found


def window(history: History, start: float, end: float, now: float) -> tuple[float, float]:
    """The part of the wanted time that can be told: within KEEP_S, at least a millisecond long."""
    end = min(end, now)
    start = max(start, now - KEEP_S)
    return min(start, end - 1e-3), end


def trace(history: History, start: float, end: float, now: float, model: str) -> bytes:
    """Chrome's trace event format (JSON): a thread a seat in process 1, the step loop in process 2;
    microseconds.
    """
    events = [
        _meta(1, 0, "process_name", f"{model}: seats"),
        _meta(2, 0, "process_name", "step loop"),
        *(_meta(1, seat, "thread_name", f"seat {seat}") for seat in range(len(history.seats))),
    ]
    for request, stay in history.stays(start, end):
        events += _stay_events(request, stay, now)
    records, ready = history.records.between(start, end)
    for record, done in zip(records[-MAX_TRACED:], ready[-MAX_TRACED:], strict=True):
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
    events = [
        _span(1, stay.seat, f"prefill {request.request_id}", stay.start, min(first, end), args)
    ]
    if first < end:
        events.append(_span(1, stay.seat, f"decode {request.request_id}", first, end, args))
    return events


def _step_events(record: np.void, done: float) -> list[dict[str, Any]]:
    kind = "mixed" if record["mixed"] else "decode"
    args = {
        name: int(record[name])
        for name in ("step", "bucket_tokens", *ROW_KINDS, "seats_busy", "waiting")
    }
    device = _span(2, 1, kind, done - float(record["device_s"]), done, args)
    return [
        device,
        {
            "ph": "C",
            "pid": 2,
            "tid": 0,
            "name": "waiting",
            "ts": device["ts"],
            "args": {"sequences": int(record["waiting"])},
        },
    ]


def _t(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
