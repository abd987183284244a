"""Throughput and latency over concurrency, rate or load, and the point beyond which more load buys
little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

#: Figures of a point of the curve: where they stand among a run's figures.
POINT = {
    "output_tok_s": ("output_tok_s",),
    "req_s": ("req_s",),
    "ttft_p50_s": ("ttft_s", "p50"),
    "ttft_p99_s": ("ttft_s", "p99"),
    "itl_p50_s": ("itl_s", "p50"),
    "itl_p99_s": ("itl_s", "p99"),
    "e2e_p50_s": ("e2e_s", "p50"),
    "e2e_p99_s": ("e2e_s", "p99"),
    "goodput_req_s": ("goodput_req_s",),
    "seat_fill": ("seat_fill",),
}


def point_of(figures: Mapping[str, Any]) -> dict[str, float | None]:
    """The few figures of a run that the curve shows."""
    point = {}
    for name, path in POINT.items():
        value: Any = figures
        for key in path:
            value = None if value is None else value[key]
        point[name] = value
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
    xs, ys = (unit(np.asarray(values, np.float64)) for values in (x, np.maximum.accumulate(y)))
    distance = xs - ys if convex else ys - xs
    best = int(np.argmax(distance))
    return best if distance[best] > 1e-9 else None


def unit(values: np.ndarray) -> np.ndarray:
    """Values [n] f8 scaled to [0, 1]; all 0 if they are all alike."""
    span = values.max() - values.min()
    return (values - values.min()) / span if span > 0 else np.zeros_like(values)


def knee_of(axis: str, points: Sequence[Mapping[str, float | None]]) -> int | None:
    """The knee of a sweep: where throughput flattens over concurrency, where p99 end-to-end time
    steepens over rate or load."""
    name, convex = ("output_tok_s", False) if axis == "concurrency" else ("e2e_p99_s", True)
    values = [point[name] for point in points]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return knee([float(point[axis] or 0) for point in points], known, convex=convex)
