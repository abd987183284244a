"""How many replicas of what, at which price, for a traffic and its targets.

For each kind of replica: seats that keep the speed of streams; then, by halving, the most requests
a second at which a few simulated replicas keep every target; from that the replicas of each hour
and some to spare for those that have failed; and at last the busiest time simulated with failures,
with more replicas until the targets are kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import JsonDict
from jitney.engine.core import Buckets, SchedulerLimits
from jitney.engine.lab.simulation.engine_shape import EngineShape
from jitney.engine.lab.simulation.fleet import Failures, FleetPlan, FleetRun
from jitney.engine.lab.simulation.fleet_traffic import Load, Traffic
from jitney.engine.lab.simulation.planner import Demand, Operating, Sizing
from jitney.engine.lab.simulation.roofline import Roofline

#: Replicas that the load of one is tried on, and halvings of the range that it is in.
_CELL, _HALVINGS = 4, 6
#: Times that an answer takes for which a load is tried, and the fewest requests.
_ANSWERS, _FEWEST = 40, 2000
#: Replicas of which the busiest time is simulated, at most: of a larger fleet a part, with its
#: share of the traffic.
_PART = 32
#: Shares of what the seats can serve between which the load is looked for; beyond the higher one a
#: queue may grow too slowly to be seen.
_LOADS = 0.05, 0.95
#: How often more replicas are tried, and how many more each time.
_MORE_TRIES, _MORE_SHARE = 8, 0.04
#: Chance that more replicas are down together than there are to spare.
_SHORT = 1e-3
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Targets:
    """What clients are to get."""

    #: Seconds to the first token, for 99 of 100 requests.
    ttft_s: float
    #: Tokens a second of a stream after its first, for 99 of 100; 0: any.
    stream_tok_s: float = 0.0
    #: Share of the requests that may be refused.
    refused: float = 0.001

    def __post_init__(self) -> None:
        if not 0 < self.ttft_s < math.inf or self.stream_tok_s < 0 or not 0 <= self.refused < 1:
            raise ConfigError(
                "targets: the first token in more than 0 s, tokens a second 0 or more, a refused "
                "share from 0 to less than 1"
            )

    def kept_by(self, run: FleetRun) -> bool:
        """True if a simulated run reached all of them."""
        kept = _Kept.of(run)
        return (
            kept.ttft_s <= self.ttft_s
            and kept.stream_tok_s >= self.stream_tok_s
            and kept.refused <= self.refused
        )


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a run reached, in the terms of the targets."""

    ttft_s: float
    stream_tok_s: float
    refused: float

    @classmethod
    def of(cls, run: FleetRun) -> _Kept:
        figures = run.figures()
        first, rates = figures["ttft_s"], figures["stream_tok_s"]
        ttft_s = stream_tok_s = math.inf
        if first:
            ttft_s = first["p99"]
        if rates:
            stream_tok_s = rates["p1"]
        return cls(ttft_s, stream_tok_s, run.refused_share)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """How a fleet is run, whatever it is made of. The mean time between losses of machines is that
    of one chip."""

    #: How a replica is chosen for a request.
    router: str = "least-wait"
    #: How often cores and machines are lost, and how long that takes to be mended.
    failures: Failures = field(default_factory=Failures)
    #: From the decision to start a replica until it is ready.
    start_s: float = 180.0
    #: Each replica's settings of these names; seats are chosen, up to so many.
    token_budget: int = 2048
    page_size: int = 16
    most_seats: int = 256
    #: Requests that are simulated at most: half as many while a load is looked for, all of them of
    #: the busiest time at the end.
    most_requests: int = 60_000
    #: Of all that is drawn: arrivals, lengths and losses.
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaKind:
    """A kind of replica to compare."""

    name: str
    roofline: Roofline
    #: Of one chip, None: not said.
    chip_hour: float | None = None

    @property
    def replica_hour(self) -> float | None:
        """Price of a replica."""
        return None if self.chip_hour is None else self.chip_hour * self.roofline.count

    def engine_for(
        self, lengths: Traffic, targets: Targets, how: Circumstances
    ) -> tuple[Operating, EngineShape]:
        """Seats that keep the speed of streams when all are busy, and the engine with them. Raises
        ConfigError if nothing fits.
        """
        slowest = 1 / targets.stream_tok_s if targets.stream_tok_s else None
        demand = Demand(
            prompt=max(1, round(lengths.mean_prompt)),
            output=max(1, round(lengths.mean_output)),
            itl_s=slowest,
            token_budget=how.token_budget,
            page_size=how.page_size,
        )
        sizing = Sizing.of(self.roofline, demand)
        allowed = [point for point in sizing.curve if point.seats <= how.most_seats]
        if slowest is not None:
            allowed = [point for point in allowed if point.step_s <= slowest]
        if not allowed:
            raise ConfigError(
                f"streams are slower than {targets.stream_tok_s:g} tokens a second even alone"
            )
        point = allowed[-1]
        limits = SchedulerLimits(
            max_seats=point.seats,
            context_length=max(2, lengths.longest),
            prefill_share="auto",
            max_predicted_wait_s=60.0,
        )
        buckets = Buckets.of(max_seats=point.seats, token_budget=how.token_budget, on_device=True)
        return point, EngineShape(limits, buckets, sizing.memory.pages + 1, how.page_size)


@dataclass(frozen=True, slots=True)
class FleetSizing:
    """The answer for one kind of replica."""

    kind: ReplicaKind
    #: Why there is none; "": there is one.
    problem: str = ""
    seats: int = 0
    pages: int = 0
    #: Requests a second that one replica takes and keeps the targets.
    load_req_s: float = 0.0
    #: For the busiest hour, those to spare included, and how many these are.
    replicas: int = 0
    spare: int = 0
    #: By hour, those to spare included.
    by_hour: tuple[int, ...] = ()
    #: Of the traffic's time with as many as the busiest hour needs all the time, and with as many
    #: as each hour needs, started ahead of it.
    fixed_replica_hours: float = 0.0
    scaled_replica_hours: float = 0.0
    #: Of all hours.
    output_tokens: float = 0.0
    #: The busiest time: how many replicas were simulated, and what came of it.
    simulated: int = 0
    figures: JsonDict = field(default_factory=dict)

    @property
    def price_per_hour(self) -> float | None:
        """Of the fleet in its busiest hour."""
        hour = self.kind.replica_hour
        return None if hour is None else hour * self.replicas

    @classmethod
    def of(cls, kind: ReplicaKind, load: Load, targets: Targets, how: Circumstances) -> FleetSizing:
        """Size a fleet of one kind; what cannot be is said in `FleetSizing.problem`."""
        how = replace(how, failures=how.failures.of_replica(kind.roofline.count))
        lengths = load.sample(1.0, _FEWEST, how.seed)
        try:
            kind.roofline.check_split()
            point, engine = kind.engine_for(lengths, targets, how)
        except ConfigError as error:
            return cls(kind, problem=str(error))
        request_s = _most_load(kind, engine, point, load, targets, how)
        if not request_s:
            return cls(kind, problem=_out_of_reach(targets), seats=point.seats)
        sizing = _counted(kind, load, request_s, lengths, how)
        sizing = replace(sizing, seats=point.seats, pages=engine.pages)
        return _checked(sizing, engine, load, targets, how)

    def cost_per_million(self, replica_hours: float) -> float | None:
        """Of output tokens, over all hours."""
        hour = self.kind.replica_hour
        if hour is None or not self.output_tokens:
            return None
        return hour * replica_hours / self.output_tokens * 1e6


def _out_of_reach(targets: Targets) -> str:
    return (
        f"the first token does not come within {1e3 * targets.ttft_s:g} ms for 99 of 100 requests, "
        "even at a twentieth of what the seats can serve"
    )


def _most_load(
    kind: ReplicaKind,
    engine: EngineShape,
    point: Operating,
    load: Load,
    targets: Targets,
    how: Circumstances,
) -> float:
    """Requests a second of one replica at which a few of them keep the targets; 0: none."""
    answer_s = point.seats / point.req_s
    low, high = 0.0, _LOADS[1]
    share = high
    for _ in range(_HALVINGS):
        rate = share * point.req_s * _CELL
        count = round(max(_FEWEST, min(how.most_requests / 2, rate * answer_s * _ANSWERS)))
        traffic = load.sample(rate, count, how.seed)
        run = _plan_of(kind, engine, _CELL, how).simulate(traffic)
        if targets.kept_by(run):
            low = share
            if share == _LOADS[1]:
                break
        else:
            high = share
        share = (low + high) / 2
    return low * point.req_s if low >= _LOADS[0] else 0.0


def _plan_of(
    kind: ReplicaKind,
    engine: EngineShape,
    replicas: int,
    how: Circumstances,
    failures: Failures | None = None,
) -> FleetPlan:
    return FleetPlan(
        engine,
        kind.roofline,
        replicas,
        how.router,
        failures=failures or Failures(),
        start_s=how.start_s,
        seed=how.seed,
    )


def _counted(
    kind: ReplicaKind, load: Load, request_s: float, lengths: Traffic, how: Circumstances
) -> FleetSizing:
    """Replicas of each hour, and what they come to."""
    needed = [max(1, math.ceil(rate / request_s)) for rate in load.rates]
    by_hour = tuple(count + _spare_for(count, how) for count in needed)
    sizing = FleetSizing(kind, load_req_s=request_s, by_hour=by_hour)
    most = max(needed)
    tokens = sum(load.rates) * load.hour_s * lengths.mean_output
    return _billed(
        replace(sizing, replicas=max(by_hour), spare=max(by_hour) - most, output_tokens=tokens),
        load.hour_s,
        how.start_s,
    )


def _billed(sizing: FleetSizing, hour_s: float, start_s: float) -> FleetSizing:
    """With its replica-hours. Replicas of the next hour are started in time, and paid for since."""
    hours = hour_s / _SECONDS_PER_HOUR
    counts = sizing.by_hour
    ahead = sum(max(0, after - before) for before, after in itertools.pairwise(counts))
    return replace(
        sizing,
        fixed_replica_hours=sizing.replicas * len(counts) * hours,
        scaled_replica_hours=sum(counts) * hours + ahead * start_s / _SECONDS_PER_HOUR,
    )


def _spare_for(replicas: int, how: Circumstances) -> int:
    """Replicas to spare so that as many as are needed are up, but for a chance of `_SHORT`: those
    that are down at a time are Poisson distributed about the mean."""
    failures = how.failures
    mean = replicas * (
        failures.core_recovery_s / failures.core_mtbf_s + how.start_s / failures.machine_mtbf_s
    )
    spare, reached = 0, math.exp(-mean)
    while reached < 1 - _SHORT and spare < replicas:
        spare += 1
        # By its logarithm: exp(-mean) is 0 where hundreds are down on average.
        reached += math.exp(spare * math.log(mean) - mean - math.lgamma(spare + 1))
    return spare


def _checked(
    sizing: FleetSizing, engine: EngineShape, load: Load, targets: Targets, how: Circumstances
) -> FleetSizing:
    """The busiest time simulated, with more replicas until the targets are kept."""
    for more in _more(sizing.replicas):
        part = min(_PART, more)
        traffic = load.busiest(part / more, how.most_requests, how.seed)
        run = _plan_of(sizing.kind, engine, part, how, how.failures).simulate(traffic)
        sizing = replace(sizing, simulated=part, figures=run.figures())
        if targets.kept_by(run):
            return _with_replicas(sizing, more, load, how)
    return replace(sizing, problem="the busiest time does not keep the targets")


def _more(replicas: int) -> Iterator[int]:
    """So many, and some more each time."""
    for _ in range(_MORE_TRIES):
        yield replicas
        replicas += max(1, math.ceil(_MORE_SHARE * replicas))


def _with_replicas(
    sizing: FleetSizing, replicas: int, load: Load, how: Circumstances
) -> FleetSizing:
    """All hours grow as the busiest one had to."""
    if replicas == sizing.replicas:
        return sizing
    growth = replicas / sizing.replicas
    by_hour = tuple(math.ceil(growth * count) for count in sizing.by_hour)
    grown = replace(
        sizing, replicas=replicas, by_hour=by_hour, load_req_s=sizing.load_req_s / growth
    )
    return _billed(grown, load.hour_s, how.start_s)
