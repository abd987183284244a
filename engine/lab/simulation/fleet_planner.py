"""Sizes a fleet: the kind and number of replicas and their price, for a traffic and its targets.

Steps for each kind of replica: choose the seats that keep the speed of streams; find by bisection
the most requests a second at which a few simulated replicas keep all targets; compute the replicas
of each hour, with spare ones for failures; simulate the busiest time with failures, with more
replicas until the targets are kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import JsonDict
from jitney.engine.config import EngineSection
from jitney.engine.core import EngineShape
from jitney.engine.fleet import RouterName
from jitney.engine.lab.simulation.fleet import Failures, FleetPlan, FleetRun
from jitney.engine.lab.simulation.fleet_traffic import Day, LengthMeans, Recorded
from jitney.engine.lab.simulation.planner import Load, OperatingPoint, Sizing
from jitney.engine.lab.simulation.roofline import Roofline

#: Replicas that are simulated to find the load of one; steps of the bisection.
_CELL, _HALVINGS = 4, 6
#: Requests of a simulation of a load: per seat, and at least.
_SEATFULS, _FEWEST = 4, 2000
#: Most replicas in the simulation of the busiest time; for a larger fleet, this part of it gets its
#: share of the traffic.
_PART = 32
#: Range of the load, as shares of the seats' capacity; above it a queue may grow too slowly to be
#: noticed.
_LOADS = 0.05, 0.95
#: Most tries with more replicas; share of replicas that is added each time.
_MORE_TRIES, _MORE_SHARE = 8, 0.04
#: Probability that more replicas are down at the same time than there are spare ones.
_SHORT = 1e-3
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Targets:
    """Service level targets."""

    #: Most seconds to the first token, for 99 of 100 requests.
    ttft_s: float
    #: Least tokens a second of a stream after its first token, for 99 of 100; 0: any.
    stream_tok_s: float = 0.0
    #: Most refused requests, as a share.
    refused: float = 0.001

    def __post_init__(self) -> None:
        if not 0 < self.ttft_s < math.inf or self.stream_tok_s < 0 or not 0 <= self.refused < 1:
            raise ConfigError(
                "targets: the first token in more than 0 s, tokens a second 0 or more, a refused "
                "share from 0 to less than 1"
            )

    def kept_by(self, run: FleetRun) -> bool:
        figures = run.figures()
        first, rates = figures["ttft_s"], figures["stream_tok_s"]
        return (
            first is not None
            and first["p99"] <= self.ttft_s
            and (rates is None or rates["p1"] >= self.stream_tok_s)
            and run.refused_share <= self.refused
        )


@dataclass(frozen=True, slots=True)
class FleetAssumptions:
    """Assumptions about a fleet's operation."""

    #: Router that chooses a replica for a request.
    router: RouterName = "least-wait"
    #: Failures and recovery times; mean times between losses of machines are for one chip.
    failures: Failures = field(default_factory=Failures)
    #: Seconds from the decision to start a replica until it is ready.
    start_s: float = 180.0
    #: Most rows of a step; most seats of a replica.
    token_budget: int = 2048
    most_seats: int = 256
    #: Most requests of one simulation.
    most_requests: int = 10_000
    #: Random seed for arrivals, lengths and failures.
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaKind:
    """A kind of replica to compare."""

    name: str
    roofline: Roofline
    #: Price of one chip per hour; None: unknown.
    chip_hour: float | None = None

    @property
    def replica_hour(self) -> float | None:
        """Price of a replica per hour; None: unknown."""
        return None if self.chip_hour is None else self.chip_hour * self.roofline.count

    def engine_for(
        self, lengths: LengthMeans, targets: Targets, how: FleetAssumptions
    ) -> tuple[OperatingPoint, EngineShape]:
        """The most seats that keep the speed of streams, and their engine. Raises ConfigError."""
        slowest = 1 / targets.stream_tok_s if targets.stream_tok_s else None
        load = Load(
            prompt=max(1, round(lengths.prompt)),
            output=max(1, round(lengths.output)),
            itl_s=slowest,
            token_budget=how.token_budget,
        )
        sizing = Sizing.of(self.roofline, load)
        allowed = [point for point in sizing.curve if point.seats <= how.most_seats]
        if slowest is not None:
            allowed = [point for point in allowed if point.step_s <= slowest]
        if not allowed:
            raise ConfigError(
                f"streams are slower than {targets.stream_tok_s:g} tokens a second even alone"
            )
        point = allowed[-1]
        settings = EngineSection(max_seats=point.seats, token_budget=how.token_budget)
        shape = EngineShape.of(
            settings,
            context_length=max(2, lengths.longest),
            pages=sizing.memory.pages + 1,
            on_device=True,
        )
        return point, shape


@dataclass(frozen=True, slots=True)
class FleetSizing:
    """The sized fleet for one kind of replica."""

    kind: ReplicaKind
    #: Reason why no fleet keeps the targets; empty if one does.
    problem: str = ""
    seats: int = 0
    pages: int = 0
    #: Requests a second of one replica at which the targets are kept.
    load_req_s: float = 0.0
    #: Replicas of the busiest hour, including spare ones; the number of spare ones.
    replicas: int = 0
    spare: int = 0
    #: Replicas of each hour, including spare ones.
    by_hour: tuple[int, ...] = ()
    #: Replica-hours of the whole traffic: with a constant number for the busiest hour, and with
    #: the number that each hour needs, started in advance.
    fixed_replica_hours: float = 0.0
    scaled_replica_hours: float = 0.0
    #: Output tokens of all hours.
    output_tokens: float = 0.0
    #: Simulation of the busiest time: its replicas, and its figures.
    simulated: int = 0
    figures: JsonDict = field(default_factory=dict)

    @property
    def price_per_hour(self) -> float | None:
        """Price of the fleet in its busiest hour; None without a price."""
        hour = self.kind.replica_hour
        return None if hour is None else hour * self.replicas

    @classmethod
    def of(
        cls,
        kind: ReplicaKind,
        traffic: Day | Recorded,
        targets: Targets,
        how: FleetAssumptions,
    ) -> FleetSizing:
        """Size a fleet of one kind. If no size keeps the targets, `problem` has the reason."""
        how = replace(how, failures=how.failures.of_replica(kind.roofline.count))
        lengths = LengthMeans.of(traffic.sample(1.0, _FEWEST, how.seed))
        try:
            kind.roofline.check_split()
            point, engine = kind.engine_for(lengths, targets, how)
        except ConfigError as error:
            return cls(kind, problem=str(error))
        sizer = _Sizer(kind, engine, point, traffic, targets, how)
        request_s = sizer.most_load()
        if not request_s:
            return cls(kind, problem=_out_of_reach(targets), seats=point.seats)
        return sizer.checked(sizer.counted(request_s, lengths))

    def cost_per_million(self, replica_hours: float) -> float | None:
        """Cost of a million output tokens over all hours; None without a price or tokens."""
        hour = self.kind.replica_hour
        if hour is None or not self.output_tokens:
            return None
        return hour * replica_hours / self.output_tokens * 1e6


def _out_of_reach(targets: Targets) -> str:
    return (
        f"the first token does not come within {1e3 * targets.ttft_s:g} ms for 99 of 100 requests, "
        "even at a twentieth of what the seats can serve"
    )


@dataclass(frozen=True, slots=True)
class _Sizer:
    kind: ReplicaKind
    engine: EngineShape
    #: One replica's steady state with all seats busy.
    point: OperatingPoint
    traffic: Day | Recorded
    targets: Targets
    how: FleetAssumptions

    def most_load(self) -> float:
        """Most requests a second per replica at which a few replicas keep the targets; 0: none."""
        low, high = 0.0, _LOADS[1]
        share = high
        count = max(_FEWEST, _SEATFULS * _CELL * self.point.seats)
        for _ in range(_HALVINGS):
            rate = share * self.point.req_s * _CELL
            arrivals = self.traffic.sample(rate, min(count, self.how.most_requests), self.how.seed)
            if self.targets.kept_by(self._fleet(_CELL, Failures()).simulate(arrivals)):
                low = share
                if share == _LOADS[1]:
                    break
            else:
                high = share
            share = (low + high) / 2
        return low * self.point.req_s if low >= _LOADS[0] else 0.0

    def _fleet(self, replicas: int, failures: Failures) -> FleetPlan:
        return FleetPlan(
            self.engine,
            self.kind.roofline,
            replicas,
            self.how.router,
            failures=failures,
            start_s=self.how.start_s,
            seed=self.how.seed,
        )

    def counted(self, request_s: float, lengths: LengthMeans) -> FleetSizing:
        """The fleet for each hour. request_s: requests a second of one replica."""
        traffic = self.traffic
        needed = [max(1, math.ceil(rate / request_s)) for rate in traffic.rates]
        by_hour = tuple(count + _spare_for(count, self.how) for count in needed)
        sizing = FleetSizing(
            self.kind,
            seats=self.point.seats,
            pages=self.engine.pages,
            load_req_s=request_s,
            replicas=max(by_hour),
            spare=max(by_hour) - max(needed),
            by_hour=by_hour,
            output_tokens=sum(traffic.rates) * traffic.hour_s * lengths.output,
        )
        return self._billed(sizing)

    def _billed(self, sizing: FleetSizing) -> FleetSizing:
        """A copy with replica-hours. Replicas of the next hour also cost money while they start."""
        hours = self.traffic.hour_s / _SECONDS_PER_HOUR
        counts = sizing.by_hour
        ahead = sum(max(0, after - before) for before, after in itertools.pairwise(counts))
        return replace(
            sizing,
            fixed_replica_hours=sizing.replicas * len(counts) * hours,
            scaled_replica_hours=sum(counts) * hours + ahead * self.how.start_s / _SECONDS_PER_HOUR,
        )

    def checked(self, sizing: FleetSizing) -> FleetSizing:
        """Simulate the busiest time, with more replicas until the targets are kept."""
        how = self.how
        for replicas in _more(sizing.replicas):
            part = min(_PART, replicas)
            arrivals = self.traffic.busiest(part / replicas, how.most_requests, how.seed)
            run = self._fleet(part, how.failures).simulate(arrivals)
            sizing = replace(sizing, simulated=part, figures=run.figures())
            if self.targets.kept_by(run):
                return self._grown(sizing, replicas)
        return replace(sizing, problem="the busiest time does not keep the targets")

    def _grown(self, sizing: FleetSizing, replicas: int) -> FleetSizing:
        """A copy with `replicas` in the busiest hour, and the other hours in proportion."""
        growth = replicas / sizing.replicas
        by_hour = tuple(math.ceil(growth * count) for count in sizing.by_hour)
        load_req_s = sizing.load_req_s / growth
        return self._billed(
            replace(sizing, replicas=replicas, by_hour=by_hour, load_req_s=load_req_s)
        )


def _more(replicas: int) -> Iterator[int]:
    for _ in range(_MORE_TRIES):
        yield replicas
        replicas += max(1, math.ceil(_MORE_SHARE * replicas))


def _spare_for(replicas: int, how: FleetAssumptions) -> int:
    """Number of spare replicas, so that fewer than needed are up with a probability of at most
    `_SHORT`. The number of replicas that are down is Poisson distributed.
    """
    from scipy.stats import poisson

    failures = how.failures
    down = how.start_s / failures.machine_mtbf_s + failures.core_recovery_s / failures.core_mtbf_s
    return min(replicas, int(poisson.ppf(1 - _SHORT, replicas * down))) if down else 0
