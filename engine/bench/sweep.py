"""Throughput and latency over concurrency, rate or load, and the point beyond which more load buys
little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_RATES = ("output_tok_s", "req_s", "goodput_req_s", "seat_fill")
_LATENCIES = ("ttft", "itl", "e2e")


def point_of(figures: Mapping[str, Any]) -> dict[str, float | None]:
    """The few figures of a run that the curve shows: rates, and latencies as ttft_p50_s."""
    point = {name: figures[name] for name in _RATES}
    for name in _LATENCIES:
        spread = figures[f"{name}_s"] or {}
        for quantile in ("p50", "p99"):
            point[f"{name}_{quantile}_s"] = spread.get(quantile)
    return point


def knee(x: Sequence[float], y: Sequence[float], *, convex: bool = False) -> int | None:
    """Index of the knee of an ascending curve, None if it has none (a straight line, or fewer than
    three points).

    Kneedle without its smoothing (Satopää et al. 2011, "Finding a 'Kneedle' in a Haystack"): both
    axes scaled to [0, 1], the point farthest from the diagonal: above it for a curve that flattens
    (throughput over concurrency), below it for one that steepens (convex: latency over rate). A
    curve that falls again is taken as level there, so that its knee is not where it happens to dip.
    """
    if len(x) < 3:
        return None
    xs = _unit(np.asarray(x, np.float64))
    ys = _unit(np.maximum.accumulate(np.asarray(y, np.float64)))
    distance = xs - ys if convex else ys - xs
    best = int(np.argmax(distance))
    return best if distance[best] > 1e-9 else None


def _unit(values: np.ndarray) -> np.ndarray:
    """Values [n] f8 scaled to [0, 1]; all 0 if they are all alike."""
    span = values.max() - values.min()
    return (values - values.min()) / span if span > 0 else np.zeros_like(values)


def knee_of(axis: str, points: Sequence[Mapping[str, Any]]) -> int | None:
    """The knee of a sweep: where throughput flattens over concurrency, where p99 end-to-end time
    steepens over rate or load.
    """
    over_concurrency = axis == "concurrency"
    figure = "output_tok_s" if over_concurrency else "e2e_p99_s"
    values = [point[figure] for point in points]
    if None in values:
        return None
    return knee([point[axis] for point in points], values, convex=not over_concurrency)
