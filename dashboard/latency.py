"""Percentiles and histograms of the waits of sequences: for a seat, for the first token, and
between tokens.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from jitney.engine.common.history import History
from jitney.engine.common.requests import JsonDict

#: Upper bounds in seconds of the histograms.
_LONG_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
_ITL_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_BOUNDS = {"wait": _LONG_BOUNDS, "ttft": _LONG_BOUNDS, "itl": _ITL_BOUNDS}
_PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

#: Bins, and samples of one bin, that are computed between two pauses.
_TOLD = 32

#: Samples sorted by time: their times, seconds, and weights (arrays of equal length).
type _Samples = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of requests and steps at start < t <= end."""

    history: History
    #: Of the steps of that time, from `RecordRing.between`.
    records: np.ndarray
    ready: np.ndarray
    start: float
    end: float

    @classmethod
    def between(cls, history: History, start: float, end: float) -> Latencies:
        records, ready = history.records.between(start, end)
        return cls(history, records, ready, start, end)

    def samples(self) -> dict[str, _Samples]:
        """wait, ttft and itl.

        Every sequence that decodes has one token from each step, so the time between two tokens is
        the time between two steps' results, as often as the later one had decode rows.
        """
        return {
            "wait": _within(self.history.waits, self.start, self.end),
            "ttft": _within(self.history.first_tokens, self.start, self.end),
            "itl": _gaps(self.records["decode"], self.ready),
        }

    def summary(self) -> JsonDict:
        """Percentiles of wait, ttft and itl, seconds or None."""
        return {name: _percentiles(*column[1:]) for name, column in self.samples().items()}

    def histograms(self) -> JsonDict:
        """Counts per upper bound, and one more for longer times."""
        columns = self.samples()
        return {name: _histogram(_BOUNDS[name], column) for name, column in columns.items()}

    def percentiles(self, bins: int) -> Generator[None, None, dict[str, list[float | None]]]:
        """Columns of `bins` values, seconds or None: wait_p50, wait_p95, ..., itl_p99. Work for
        `TimeSlices`.
        """
        edges = np.linspace(self.start, self.end, bins + 1)
        result: dict[str, list[float | None]] = {}
        for name, (t, values, weights) in self.samples().items():
            columns = {point: [] for point in _PERCENTILES}
            cuts = np.searchsorted(t, edges, "right").tolist()
            for place, (low, high) in enumerate(pairwise(cuts)):
                points = _percentiles(values[low:high], weights[low:high]) or {}
                for point, column in columns.items():
                    column.append(points.get(point))
                if place % _TOLD == 0 or high - low > _TOLD:
                    yield
            result |= {f"{name}_{point}": column for point, column in columns.items()}
        return result


def _gaps(decode_rows: np.ndarray, ready: np.ndarray) -> _Samples:
    return ready[1:], np.diff(ready), decode_rows[1:].astype(np.int64)


def _within(values: Iterable[tuple[float, float]], start: float, end: float) -> _Samples:
    t, seconds = np.fromiter(chain.from_iterable(values), np.float64).reshape(-1, 2).T
    within = (t > start) & (t <= end)
    return t[within], seconds[within], np.ones(within.sum(), np.int64)


def _percentiles(values: np.ndarray, weights: np.ndarray) -> dict[str, float] | None:
    """The least value that at least p of all do not exceed; None if there are none."""
    if not weights.any():
        return None
    shares = list(_PERCENTILES.values())
    points = np.quantile(values, shares, weights=weights, method="inverted_cdf")
    return dict(zip(_PERCENTILES, points.round(6).tolist(), strict=True))


def _histogram(bounds: Sequence[float], column: _Samples) -> JsonDict:
    _, values, weights = column
    places = np.searchsorted(bounds, values)
    counts = np.bincount(places, weights, minlength=len(bounds) + 1)
    return {"bounds": bounds, "counts": counts.astype(int).tolist()}
