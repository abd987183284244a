"""Compares a prediction with a measurement: the same figures of both, and their relative error.

A step table that is fitted to a run predicts the same run well, which only checks the scheduler.
The simulator's purpose is to predict runs under other policies, whose steps it has not seen.
"""

from __future__ import annotations

from collections.abc import Mapping

from jitney.engine.common.requests import JsonObject
from jitney.engine.lab.figures import figure_of

#: Names of the compared figures.
COMPARED = (
    "output_tok_s",
    "req_s",
    *(
        f"{name}_{quantile}_s"
        for name in ("ttft", "itl", "e2e", "queue")
        for quantile in ("p50", "p99")
    ),
    "padding_share",
    "seat_fill",
    "kv_use",
    "goodput_req_s",
    "cost_per_million_tokens",
)


def errors(predicted: JsonObject, measured: JsonObject) -> dict[str, float]:
    """Relative error, predicted / measured - 1, of each figure that is known for both."""
    by_name = {}
    for name in COMPARED:
        ours, theirs = figure_of(predicted, name), figure_of(measured, name)
        if ours is not None and theirs:
            by_name[name] = ours / theirs - 1
    return by_name


def verdict_of(predicted: Mapping[str, JsonObject], off: Mapping[str, Mapping[str, float]]) -> str:
    """A sentence with the policy of the highest predicted throughput, its ratio to the slowest
    one's, and the error of predictions.

    predicted: figures by policy; off: `errors` of the policies that were measured.
    """
    speeds = {name: figures["output_tok_s"] for name, figures in predicted.items()}
    if len(speeds) < 2:
        return ""
    best, worst = max(speeds, key=speeds.__getitem__), min(speeds, key=speeds.__getitem__)
    if speeds[worst] <= 0:
        return f"By simulation {worst} makes no token here."
    gain = f"By simulation {best} makes {speeds[best] / speeds[worst]:.2f}x the tokens of {worst}"
    speed_errors = {name: _speed_error(each) for name, each in off.items()}
    measured = {name: error for name, error in speed_errors.items() if error is not None}
    if not measured:
        return f"{gain}; the error is unknown, because no policy was measured."
    error = max(1, round(100 * max(measured.values())))
    return f"{gain}; predictions of {' and '.join(measured)} were off by up to {error} %."


def _speed_error(off: Mapping[str, float]) -> float | None:
    """The larger error of throughput and time between tokens. Throughput alone is not enough: an
    engine that is not full has the throughput of its traffic.
    """
    present = [abs(off[name]) for name in ("output_tok_s", "itl_p50_s") if name in off]
    return max(present, default=None)
