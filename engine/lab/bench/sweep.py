"""Throughput and latency over concurrency, rate or load, and the point beyond which more load buys
little.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jitney.engine.common.requests import JsonObject

_RATES = ("output_tok_s", "req_s", "goodput_req_s", "seat_fill")
_LATENCIES = ("ttft", "itl", "e2e")


def point_of(figures: JsonObject) -> dict[str, float | None]:
    """The few figures of a run that the curve shows: rates, and latencies as ttft_p50_s."""
    point = {name: figures[name] for name in _RATES}
    for name in _LATENCIES:
        spread = figures[f"{name}_s"] or {}
        for quantile in ("p50", "p99"):
            point[f"{name}_{quantile}_s"] = spread.get(quantile)
    return point


def _knee(x: Sequence[float], y: Sequence[float], *, convex: bool = False) -> int | None:
    """Index of the knee of an ascending curve, None if it has none (a straight line, or fewer than
    three points).

    Kneedle without its smoothing (Satopää et al. 2011, "Finding a 'Kneedle' in a Haystack"): both
    axes scaled to [0, 1], the point farthest from the diagonal: above it for a curve that flattens
    (throughput over concurrency), below it for one that steepens (convex: latency over rate). A
    curve that falls again is taken as level there, so that its knee is not where it happens to dip.
    """
    if len(x) < 3:
        return None
    above = _unit(np.maximum.accumulate(np.asarray(y, np.float64)))
    above -= _unit(np.asarray(x, np.float64))
    if convex:
        above = -above
    best = int(np.argmax(above))
    if above[best] <= 1e-9:
        return None
    return best


def _unit(values: np.ndarray) -> np.ndarray:
    """Values [n] f8 scaled to [0, 1]; all 0 if they are all alike."""
    above = values - values.min()
    return above / (above.max() or 1.0)


def knee_of(axis: str, points: Sequence[JsonObject]) -> int | None:
    """The knee of a sweep: where throughput flattens over concurrency, where p99 end-to-end time
    steepens over rate or load.
    """
    convex = axis != "concurrency"
    figure = "e2e_p99_s" if convex else "output_tok_s"
    values = [point[figure] for point in points]
    if None in values:
        return None
    return _knee([point[axis] for point in points], values, convex=convex)
