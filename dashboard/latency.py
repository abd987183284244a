"""How long sequences waited for a seat, for their first token, and between tokens: percentiles and
histograms.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np

from jitney.engine.telemetry.history import History

#: Upper bounds in seconds of the histograms.
_LONG_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
_ITL_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

#: When, how many seconds, how often: three arrays of one length, by time.
type Samples = tuple[np.ndarray, np.ndarray, np.ndarray]


def samples(history: History, start: float, end: float) -> dict[str, Samples]:
    """wait, ttft and itl of what happened at start < t <= end.

    Every sequence that decodes has one token from each step, so the time between two tokens is the
    time between two steps' results, as often as the later one had decode rows.
    """
    records, ready = history.records.between(start, end)
    return samples_of(history, records, ready, start, end)


def samples_of(
    history: History, records: np.ndarray, ready: np.ndarray, start: float, end: float
) -> dict[str, Samples]:
    """The same; records, ready: of that time, from `RecordRing.between`."""
    return {
        "wait": _within(history.waits, start, end),
        "ttft": _within(history.first_tokens, start, end),
        "itl": (ready[1:], np.diff(ready), records["decode"][1:].astype(np.int64)),
    }


def _within(values: Iterable[tuple[float, float]], start: float, end: float) -> Samples:
    pairs = np.fromiter(chain.from_iterable(values), np.float64).reshape(-1, 2)
    kept = pairs[(pairs[:, 0] > start) & (pairs[:, 0] <= end)]
    return kept[:, 0], kept[:, 1], np.ones(len(kept), np.int64)


def percentiles(values: np.ndarray, weights: np.ndarray) -> dict[str, float] | None:
    """The least value that at least p of all do not exceed; None if there are none."""
    if not weights.any():
        return None
    points = np.quantile(
        values, list(_PERCENTILES.values()), weights=weights, method="inverted_cdf"
    )
    return dict(zip(_PERCENTILES, points.round(6).tolist(), strict=True))


def summary(history: History, start: float, end: float) -> dict[str, Any]:
    """Percentiles of wait, ttft and itl, seconds or None."""
    result = {}
    for name, (_, values, weights) in samples(history, start, end).items():
        result[name] = percentiles(values, weights)
    return result


def histograms(history: History, start: float, end: float) -> dict[str, Any]:
    """Counts per upper bound, and one more for what is longer."""
    result = {}
    for name, (_, values, weights) in samples(history, start, end).items():
        bounds = _ITL_BOUNDS if name == "itl" else _LONG_BOUNDS
        places = np.searchsorted(bounds, values)
        counts = np.bincount(places, weights, minlength=len(bounds) + 1)
        result[name] = {"bounds": bounds, "counts": counts.astype(int).tolist()}
    return result
