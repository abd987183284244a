"""How long sequences waited for a seat, for their first token, and between tokens: percentiles and
histograms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from jitney.engine.telemetry.history import History
from jitney.engine.types import JsonDict

#: Upper bounds in seconds of the histograms.
_LONG_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
_ITL_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_BOUNDS = {"wait": _LONG_BOUNDS, "ttft": _LONG_BOUNDS, "itl": _ITL_BOUNDS}
_PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

#: When, how many seconds, how often: three arrays of one length, by time.
type _Samples = tuple[np.ndarray, np.ndarray, np.ndarray]


def _samples(history: History, start: float, end: float) -> dict[str, _Samples]:
    """wait, ttft and itl of what happened at start < t <= end.

    Every sequence that decodes has one token from each step, so the time between two tokens is the
    time between two steps' results, as often as the later one had decode rows.
    """
    records, ready = history.records.between(start, end)
    return samples_of(history, records, ready, start, end)


def samples_of(
    history: History, records: np.ndarray, ready: np.ndarray, start: float, end: float
) -> dict[str, _Samples]:
    """The same; records, ready: of that time, from `RecordRing.between`."""
    return {
        "wait": _within(history.waits, start, end),
        "ttft": _within(history.first_tokens, start, end),
        "itl": _gaps(records["decode"], ready),
    }


def _gaps(decode_rows: np.ndarray, ready: np.ndarray) -> _Samples:
    return ready[1:], np.diff(ready), decode_rows[1:].astype(np.int64)


def _within(values: Iterable[tuple[float, float]], start: float, end: float) -> _Samples:
    t, seconds = np.fromiter(chain.from_iterable(values), np.float64).reshape(-1, 2).T
    kept = (t > start) & (t <= end)
    return t[kept], seconds[kept], np.ones(kept.sum(), np.int64)


def percentiles(values: np.ndarray, weights: np.ndarray) -> dict[str, float] | None:
    """The least value that at least p of all do not exceed; None if there are none."""
    if not weights.any():
        return None
    shares = list(_PERCENTILES.values())
    points = np.quantile(values, shares, weights=weights, method="inverted_cdf")
    return dict(zip(_PERCENTILES, points.round(6).tolist(), strict=True))


def summary(history: History, start: float, end: float) -> JsonDict:
    """Percentiles of wait, ttft and itl, seconds or None."""
    columns = _samples(history, start, end)
    return {name: percentiles(*column[1:]) for name, column in columns.items()}


def histograms(history: History, start: float, end: float) -> JsonDict:
    """Counts per upper bound, and one more for what is longer."""
    columns = _samples(history, start, end)
    return {name: _histogram(_BOUNDS[name], column) for name, column in columns.items()}


def _histogram(bounds: Sequence[float], column: _Samples) -> JsonDict:
    _, values, weights = column
    places = np.searchsorted(bounds, values)
    counts = np.bincount(places, weights, minlength=len(bounds) + 1)
    return {"bounds": bounds, "counts": counts.astype(int).tolist()}
