"""The three ways to batch on the same requests: the traffic that they are compared on, what each of
them could serve of it, who wins, by how much, and whether the answers are the same.

One load cannot show three policies. Where continuous batching is full, the queues of the other two
grow without bound, and a percentile of their waits says how long the run was; where static is not
full, all three make the tokens that were asked for, and their waits can be compared. So there is a
heavy case and a light one, and a curve of waits over loads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.common.trace import Arrival
from jitney.engine.lab.bench.offline import OfflineRun, PolicyRuns
from jitney.engine.lab.simulation.engine_shape import EngineShape
from jitney.engine.lab.simulation.simulator import simulate
from jitney.engine.lab.simulation.step_table import StepTimes

#: What others report for in-flight batching over each of these, as (least, most) times the
#: throughput; over dynamic batching at high concurrency.
PUBLISHED = {"static": (1.6, 3.4), "dynamic": (3.0, 5.0)}
#: Loads of the curve, as shares of what continuous batching can serve.
_CURVE_LOADS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.15)
#: Rounds of all seats, or batches, that a policy's capacity is simulated with.
_CAPACITY_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class TrafficCase:
    """One kind of traffic."""

    #: Output lengths as the flag writes them; None: the preset's.
    output: str | None
    #: Times what `of` can serve.
    load: float
    #: A policy.
    of: str
    #: How many come by default: all cases together take some 17 minutes on two CPU cores.
    requests: int
    #: In words.
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


@dataclass(frozen=True, slots=True)
class OfferedTraffic:
    """Requests that engines are offered at several rates."""

    #: Drawn at one request a second, but for `capacity`, which takes any.
    arrivals: Sequence[Arrival]

    def capacity(self, shape: EngineShape, table: StepTimes) -> float:
        """Requests a second that the engine serves where there is always a next one, by simulation.

        Those count who board after the first round of seats, from the first boarding to the last:
        then seats run empty.
        """
        limits = shape.limits
        a_round = limits.max_seats if limits.policy == "continuous" else limits.batch
        run = simulate(_at_once(self.arrivals, _CAPACITY_ROUNDS * a_round), shape, table)
        boarded = sorted(request.boarded for request in run.requests if request.boarded is not None)
        return (len(boarded) - a_round) / (boarded[-1] - boarded[0])

    def at_rate(self, rate: float) -> list[Arrival]:
        """Those that were drawn at one request a second, for `rate` requests a second."""
        return [msgspec.structs.replace(arrival, at=arrival.at / rate) for arrival in self.arrivals]

    def load_curve(
        self,
        shape: EngineShape,
        table: StepTimes,
        policies: Sequence[str],
        loads: Sequence[float] = _CURVE_LOADS,
    ) -> list[JsonDict]:
        """First-token waits of each policy over the load, by simulation: one point a load.

        A point says for each policy which share of its own capacity the load is: from 1 on its
        queue grows without bound, and its waits are those of a run of this length.
        """
        shapes = {policy: shape.under(policy, 0.0) for policy in {*policies, "continuous"}}
        able = {policy: self.capacity(shapes[policy], table) for policy in shapes}
        points = []
        for load in loads:
            rate = load * able["continuous"]
            coming = self.at_rate(rate)
            waits = {}
            for policy in policies:
                run = simulate(coming, shapes[policy], table)
                waits[policy] = waits_of(run.figures(), rate / able[policy])
            points.append({"load": load, "rate": rate, "policies": waits})
        return points


def _at_once(arrivals: Sequence[Arrival], count: int) -> list[Arrival]:
    """So many of them, from the first again after the last, all at time 0."""
    again = itertools.islice(itertools.cycle(arrivals), count)
    return [msgspec.structs.replace(arrival, at=0.0) for arrival in again]


def waits_of(figures: JsonObject, share_of_capacity: float | None) -> JsonDict:
    """What the curve shows of a run. share_of_capacity: None where it is not known."""
    waits = figures["ttft_s"] or {}
    return {
        "ttft_p50_s": waits.get("p50"),
        "ttft_p99_s": waits.get("p99"),
        "output_tok_s": figures["output_tok_s"],
        "share_of_capacity": share_of_capacity,
    }


class _Difference(NamedTuple):
    """A request that did not get the same tokens under two policies."""

    request: int
    #: The one compared with, and the other.
    policies: tuple[str, str]
    #: Output position at which they part.
    at: int


def differences(runs: PolicyRuns) -> list[_Difference]:
    """Requests that did not get the same tokens under every policy; the first policy is the one
    compared with.
    """
    (first, reference), *others = runs.items()
    differences = []
    for policy, run in others:
        for number, at in _partings(reference, run):
            differences.append(_Difference(number, (first, policy), at))
    return differences


def _partings(reference: OfflineRun, run: OfflineRun) -> Iterator[tuple[int, int]]:
    """(request, output position at which it parts) of those with other tokens in the two runs."""
    for number, (ours, theirs) in enumerate(zip(reference.tokens, run.tokens, strict=True)):
        if ours != theirs:
            yield number, _parting(ours, theirs)


def _parting(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The first position at which two different outputs differ, or at which the shorter one
    ends.
    """
    for position, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return position
    return min(len(ours), len(theirs))


def ratios(figures: Mapping[str, JsonObject], best: str = "continuous") -> dict[str, JsonDict]:
    """What `best` gains over each other policy: times its throughput, and how many times shorter
    its waits are.
    """
    if best not in figures:
        return {}
    others = {name: theirs for name, theirs in figures.items() if name != best}
    return {name: _gains_over(name, figures[best], theirs) for name, theirs in others.items()}


def _gains_over(name: str, ours: JsonObject, theirs: JsonObject) -> JsonDict:
    gains = _gains(ours, theirs)
    return gains | {"published_output_tok_s": PUBLISHED.get(name)}


def _gains(ours: JsonObject, theirs: JsonObject) -> JsonDict:
    gains: JsonDict = {}
    for rate in ("output_tok_s", "req_s"):
        gains[rate] = _ratio(ours[rate], theirs[rate])
    for wait, quantile in itertools.product(("ttft_s", "e2e_s"), ("p50", "p99")):
        shorter = _percentile(ours, wait, quantile)
        longer = _percentile(theirs, wait, quantile)
        gains[f"{wait}_{quantile}"] = _ratio(longer, shorter)
    return gains


def _percentile(figures: JsonObject, name: str, quantile: str) -> float | None:
    """One percentile of a distribution among the figures; None if it is not known."""
    distribution = figures.get(name) or {}
    return distribution.get(quantile)


def _ratio(above: float | None, below: float | None) -> float | None:
    if above is None or not below:
        return None
    return above / below
