"""A prediction beside what was measured: the same figures of both, and how far they lie apart.

A step table that was fitted to a run predicts that run well: that only checks the scheduler. The
simulator is there for the run of another policy, whose steps it has not seen.
"""

from __future__ import annotations

from collections.abc import Mapping

from jitney.engine.common.requests import JsonObject
from jitney.engine.lab.figures import figure_of

#: Figures worth comparing.
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
    """Relative error, predicted / measured - 1, of each figure that both have."""
    found = {}
    for name in COMPARED:
        ours, theirs = figure_of(predicted, name), figure_of(measured, name)
        if ours is not None and theirs:
            found[name] = ours / theirs - 1
    return found


def verdict_of(predicted: Mapping[str, JsonObject], off: Mapping[str, Mapping[str, float]]) -> str:
    """Which policy makes most tokens by prediction, how many times those of the slowest, and how
    far off predictions are here.

    predicted: figures by policy; off: `errors` of the policies that were measured.
    """
    speeds = {name: figures["output_tok_s"] for name, figures in predicted.items()}
    if len(speeds) < 2:
        return ""
    best, worst = max(speeds, key=speeds.__getitem__), min(speeds, key=speeds.__getitem__)
    if speeds[worst] <= 0:
        return f"By simulation {worst} makes no token here."
    gain = f"By simulation {best} makes {speeds[best] / speeds[worst]:.2f}x the tokens of {worst}"
    known = {name: _speed_error(each) for name, each in off.items()}
    measured = {name: error for name, error in known.items() if error is not None}
    if not measured:
        return f"{gain}; the error is unknown, because no policy was measured."
    error = max(1, round(100 * max(measured.values())))
    return f"{gain}; predictions of {' and '.join(measured)} were off by up to {error} %."


def _speed_error(off: Mapping[str, float]) -> float | None:
    """The larger error of throughput and time between tokens: where an engine is not full, its
    throughput is that of the traffic, and predicting it says nothing.
    """
    known = [abs(off[name]) for name in ("output_tok_s", "itl_p50_s") if name in off]
    return max(known, default=None)
