"""Compares the three batching policies on the same requests: their traffic, the load that each can
serve, the gains, and whether the answers are the same.

One load is not enough to compare three policies. If continuous batching is full, the queues of the
other two grow without bound, and percentiles of their waits only depend on the length of the run.
If static batching is not full, all three have the same throughput, and their waits can be compared.
So there are a heavy and a light case, and a curve of waits over loads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.common.trace import Arrival
from jitney.engine.core import EngineShape, StepTimes
from jitney.engine.lab.bench.offline import PolicyRuns, outputs_of
from jitney.engine.lab.figures import figure_of
from jitney.engine.lab.simulation.accuracy import errors
from jitney.engine.lab.simulation.simulator import predict, simulate
from jitney.engine.lab.simulation.step_table import StepTable

#: Loads of the curve, as shares of what continuous batching can serve.
_CURVE_LOADS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.15)
#: Figures of a point of the curve.
_CURVE_FIGURES = ("ttft_p50_s", "ttft_p99_s", "ttft_p999_s", "output_tok_s")
#: Rounds of all seats, or batches, in the simulation of a policy's capacity.
_CAPACITY_ROUNDS = 16
#: The policy that others are compared with.
_BEST = "continuous"


@dataclass(frozen=True, slots=True)
class TrafficCase:
    """One kind of traffic."""

    #: Output lengths in the flag's form; None: the preset's.
    output: str | None
    #: Load as a multiple of the capacity of the policy `of`.
    load: float
    #: Name of a policy.
    of: str
    #: Default number of requests: all cases together take about 17 minutes on two CPU cores.
    requests: int
    #: Description of the case.
    what: str


CASES = {
    "heavy": TrafficCase(
        output=None,
        load=1.15,
        of="continuous",
        requests=224,
        what="more than continuous batching can serve, most outputs short",
    ),
    "uniform": TrafficCase(
        output="50..800",
        load=1.15,
        of="continuous",
        requests=96,
        what="likewise, outputs of every length from 50 to 800 alike",
    ),
    "light": TrafficCase(
        output=None,
        load=0.7,
        of="static",
        requests=128,
        what="what static batching can serve, most outputs short",
    ),
}


def capacity(arrivals: Sequence[Arrival], shape: EngineShape, table: StepTimes) -> float:
    """Requests a second that the engine serves with a queue that is never empty, by simulation.

    Counted are requests that board after the first round of seats, up to the last boarding, after
    which seats become empty.
    """
    limits = shape.limits
    a_round = limits.max_seats if limits.policy == _BEST else limits.batch
    again = itertools.islice(itertools.cycle(arrivals), _CAPACITY_ROUNDS * a_round)
    at_once = [msgspec.structs.replace(arrival, at=0.0) for arrival in again]
    run = simulate(at_once, shape, table)
    boarded = sorted(request.boarded for request in run.requests if request.boarded is not None)
    return (len(boarded) - a_round) / (boarded[-1] - boarded[0])


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """Arrivals drawn at one request a second, scaled to `rate` requests a second."""
    return [msgspec.structs.replace(arrival, at=arrival.at / rate) for arrival in arrivals]


def load_curve(
    arrivals: Sequence[Arrival],
    shape: EngineShape,
    table: StepTimes,
    policies: Sequence[str],
) -> list[JsonDict]:
    """First-token waits of each policy over the load, by simulation, one point per load.

    arrivals: drawn at one request a second. A point has for each policy the load as a share of the
    policy's own capacity: from 1 on, its queue grows without bound, and its waits depend on the
    length of the run.
    """
    shapes = {policy: shape.under(policy, 0.0) for policy in {*policies, _BEST}}
    able = {policy: capacity(arrivals, each, table) for policy, each in shapes.items()}
    points = []
    for load in _CURVE_LOADS:
        rate = load * able[_BEST]
        waits = {}
        for policy in policies:
            run = simulate(at_rate(arrivals, rate), shapes[policy], table)
            waits[policy] = waits_of(run.figures(), rate / able[policy])
        points.append({"load": load, "rate": rate, "policies": waits})
    return points


def waits_of(figures: JsonObject, share_of_capacity: float | None) -> JsonDict:
    """Figures of a run for the curve. share_of_capacity: None if unknown."""
    return {
        **{name: figure_of(figures, name) for name in _CURVE_FIGURES},
        "share_of_capacity": share_of_capacity,
    }


def prediction_errors(runs: PolicyRuns) -> dict[str, dict[str, float]]:
    """`errors` of each run, simulated with step times fitted to the run of continuous batching (or
    to the first one).
    """
    source = runs.get(_BEST, next(iter(runs.values())))
    table = StepTable.from_records(source.records)
    return {
        name: errors(predict(run, table).figures(), run.figures()) for name, run in runs.items()
    }


class _Difference(NamedTuple):
    """A request with different tokens under two policies."""

    request: int
    #: The reference policy, and the other one.
    policies: tuple[str, str]
    #: First output position that differs.
    at: int


def differences(runs: PolicyRuns) -> list[_Difference]:
    """Requests whose tokens differ from those under the first policy."""
    (first, reference), *others = runs.items()
    differing = []
    for policy, run in others:
        pairs = zip(outputs_of(reference), outputs_of(run), strict=True)
        for number, (ours, theirs) in enumerate(pairs):
            if ours != theirs:
                differing.append(_Difference(number, (first, policy), _parting(ours, theirs)))
    return differing


def _parting(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The first position at which two outputs differ, or at which the shorter one ends."""
    for position, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return position
    return min(len(ours), len(theirs))


def ratios(figures: Mapping[str, JsonObject]) -> dict[str, JsonDict]:
    """Gains of continuous batching over each other policy: ratio of the throughputs, and factor by
    which its waits are shorter. Empty if it did not run.
    """
    if _BEST not in figures:
        return {}
    best = figures[_BEST]
    return {name: dict(_gains(best, theirs)) for name, theirs in figures.items() if name != _BEST}


def _gains(ours: JsonObject, theirs: JsonObject) -> Iterator[tuple[str, float | None]]:
    for rate in ("output_tok_s", "req_s"):
        yield rate, _ratio(ours[rate], theirs[rate])
    for wait, quantile in itertools.product(("ttft", "e2e"), ("p50", "p99", "p999")):
        name = f"{wait}_{quantile}_s"
        yield f"{wait}_s_{quantile}", _ratio(figure_of(theirs, name), figure_of(ours, name))


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
