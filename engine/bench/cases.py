"""The traffic that policies are compared on: kinds of lengths and of load, and what each policy
could serve of them.

One load cannot show three policies. Where continuous batching is full, the queues of the other two
grow without bound, and a percentile of their waits says how long the run was; where static is not
full, all three make the tokens that were asked for, and their waits can be compared. So there is a
heavy case and a light one, and a curve of waits over loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from jitney.engine.simulation.simulator import EngineShape, simulate
from jitney.engine.simulation.step_table import StepTimes
from jitney.engine.simulation.workload import Arrival

UNIFORM = "50..800"
#: Loads of the curve, as shares of what continuous batching can serve.
CURVE_LOADS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.15)
#: Requests of each point of the curve: enough that 1 % of them are more than a few.
CURVE_REQUESTS = 1024
#: Rounds of all seats, or batches, that a policy's capacity is simulated with.
CAPACITY_ROUNDS = 16
NO_CAP = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of traffic. output: lengths as the flag writes them, None: the preset's.

    load: times what `of`, a policy, can serve. requests: how many by default, so that all cases
    together take some 17 minutes on two CPU cores.
    """

    output: str | None
    load: float
    of: str
    requests: int
    what: str


CASES = {
    "heavy": Case(
        None, 1.15, "continuous", 224, "more than continuous batching can serve, most outputs short"
    ),
    "uniform": Case(
        UNIFORM, 1.15, "continuous", 96, "likewise, outputs of every length from 50 to 800 alike"
    ),
    "light": Case(None, 0.7, "static", 128, "what static batching can serve, most outputs short"),
}


def lengths_of(values: Sequence[int]) -> dict[str, float]:
    """What lengths are, in tokens: their ends, median and mean, and which shares of them stand at
    the ends.
    """
    drawn = np.asarray(values)
    return {
        "least": int(drawn.min()),
        "median": float(np.median(drawn)),
        "mean": float(drawn.mean()),
        "most": int(drawn.max()),
        "share_at_least": float(np.mean(drawn == drawn.min())),
        "share_at_most": float(np.mean(drawn == drawn.max())),
    }


def lengths_line(what: str, told: Mapping[str, float]) -> str:
    """The same in a sentence."""
    return (
        f"{what} of {told['least']:g} to {told['most']:g} tokens, median {told['median']:g}, mean "
        f"{told['mean']:.0f}; {told['share_at_least']:.0%} are exactly {told['least']:g}, "
        f"{told['share_at_most']:.0%} exactly {told['most']:g}"
    )


def simulated_capacity(arrivals: Sequence[Arrival], shape: EngineShape, table: StepTimes) -> float:
    """Requests a second that the engine serves where there is always a next one, by simulation.

    Those count who board after the first round of seats, from the first boarding to the last: then
    seats run empty.
    """
    limits = shape.limits
    a_round = limits.max_seats if limits.policy == "continuous" else limits.batch
    count = CAPACITY_ROUNDS * a_round
    repeats = -(-count // len(arrivals))
    coming = [
        msgspec.structs.replace(arrival, at=0.0) for arrival in (list(arrivals) * repeats)[:count]
    ]
    run = simulate(coming, shape, table)
    boarded = sorted(times.boarded for times in run.times if times.boarded is not None)
    return (len(boarded) - a_round) / (boarded[-1] - boarded[0])


def open_to_all(shape: EngineShape) -> EngineShape:
    """The same engine, refusing nobody."""
    limits = replace(
        shape.limits,
        max_waiting_requests=NO_CAP,
        max_waiting_tokens=NO_CAP,
        max_predicted_wait_s=0.0,
    )
    return replace(shape, limits=limits)


def at_load(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """Arrivals drawn at one request a second, for `rate` requests a second."""
    return [msgspec.structs.replace(a, at=a.at / rate) for a in arrivals]


def load_curve(
    arrivals: Sequence[Arrival],
    shape: EngineShape,
    table: StepTimes,
    policies: Sequence[str],
    loads: Sequence[float] = CURVE_LOADS,
) -> list[dict[str, Any]]:
    """First-token waits of each policy over the load, by simulation; one point a load, loads as in
    CURVE_LOADS.

    arrivals: at one request a second. A point says for each policy which share of its own capacity
    the load is: from 1 on its queue grows without bound, and its waits are those of a run of this
    length.
    """
    capacities = {
        policy: simulated_capacity(arrivals, shape.under(policy, 0.0), table)
        for policy in {*policies, "continuous"}
    }
    points = []
    for load in loads:
        rate = load * capacities["continuous"]
        point: dict[str, Any] = {"load": load, "rate": rate, "policies": {}}
        for policy in policies:
            run = simulate(at_load(arrivals, rate), shape.under(policy, 0.0), table)
            point["policies"][policy] = point_of(run.figures(), rate / capacities[policy])
        points.append(point)
    return points


def point_of(figures: Mapping[str, Any], share: float | None) -> dict[str, float | None]:
    """What the curve shows of a run. share: of what its policy can serve, None if that is not
    known.
    """
    waits = figures["ttft_s"] or {}
    return {
        "ttft_p50_s": waits.get("p50"),
        "ttft_p99_s": waits.get("p99"),
        "output_tok_s": figures["output_tok_s"],
        "share_of_capacity": share,
    }


def growing(shares: Mapping[str, float]) -> list[str]:
    """Policies that were offered as much as they can serve, or more."""
    return [policy for policy, share in shares.items() if share >= 1]


def case_lines(found: Mapping[str, Any]) -> list[str]:
    """What came, what its lengths are, whose queue grew, and whether the answers agree."""
    unlike = found["differences"]
    same = (
        "all policies gave every request the same tokens"
        if not unlike
        else (
            f"got other tokens under another policy: {len({d['request'] for d in unlike})}; "
            + ", ".join(
                f"request {d['request']} from token {d['at']} on ({' / '.join(d['policies'])})"
                for d in unlike[:5]
            )
        )
    )
    lengths = found["lengths"]
    lines = [
        found["what"],
        lengths_line("prompts", lengths["prompts"]),
        lengths_line("outputs", lengths["outputs"]),
        same,
    ]
    for policy in growing(found["share_of_capacity"]):
        share = found["share_of_capacity"][policy]
        lines.append(
            f"{policy}: offered {share:.2f} times what it can serve, so its queue grows without "
            "bound: its "
            "waits are the length of the run"
        )
    return lines
