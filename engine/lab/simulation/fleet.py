"""A fleet on a virtual clock: replicas that are advanced when somebody looks at them, an ingress
that routes as the real one does, failures, and replicas that are started and let go.

The ingress knows what it has sent; how much is open at each replica it sees every `_SIGHT_S`, and
the predicted waits every second, as a real one that polls. Whatever comes by chance is drawn from
the seed: the same fleet and traffic always give the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Literal

import numpy as np

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.summary import QUANTILES
from jitney.engine.lab.simulation.engine_shape import EngineShape
from jitney.engine.lab.simulation.fleet_replica import FleetRequest, ReplicaModel
from jitney.engine.lab.simulation.fleet_routing import SimulatedIngress
from jitney.engine.lab.simulation.fleet_scaling import ScalingRule
from jitney.engine.lab.simulation.fleet_steps import StepCosts
from jitney.engine.lab.simulation.fleet_traffic import Traffic
from jitney.engine.lab.simulation.step_table import StepTimes

#: Seconds between two looks at how much is open at each replica, and how many of these looks pass
#: between two at the predicted waits.
_SIGHT_S, _WAIT_EVERY = 0.25, 4
#: Replicas that a request is offered to before it is refused.
_TRIES = 8
#: Streams of fewer tokens are not asked how fast they were: one step with a prompt in it would
#: decide.
_LEAST_STREAM = 8
#: Share of the traffic's time at its beginning whose requests are left out of latencies: the fleet
#: starts empty.
_WARM_UP = 0.1

_State = Literal["starting", "ready", "recovering", "draining", "gone"]


@dataclass(frozen=True, slots=True)
class Failures:
    """How replicas fail. Mean times between failures are of one replica, in seconds, by chance
    without memory; infinity: never."""

    #: Its core dies; the requests wait in the server and go on in the next core.
    core_mtbf_s: float = math.inf
    core_recovery_s: float = 10.0
    #: Its machine is lost; the ingress notices after `notice_s` and repeats its requests elsewhere,
    #: and another machine is started.
    machine_mtbf_s: float = math.inf
    notice_s: float = 30.0
    #: At this time a share of all machines is lost together.
    outage_at: float = math.inf
    outage_share: float = 0.0

    def __post_init__(self) -> None:
        if min(self.core_mtbf_s, self.machine_mtbf_s) <= 0 or not 0 <= self.outage_share <= 1:
            raise ConfigError("mean times between failures must be above 0, shares 0 to 1")
        times = self.core_recovery_s, self.notice_s
        if not 0 <= min(times) <= max(times) < math.inf:
            raise ConfigError("times to recover and to notice must be 0 or more")

    def of_replica(self, chips: int) -> Failures:
        """Those of a replica, which is lost with any of its chips, where machines have one chip."""
        return replace(self, machine_mtbf_s=self.machine_mtbf_s / chips)


_NO_FAILURES = Failures()


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The fleet to simulate."""

    engine: EngineShape
    table: StepTimes
    #: At the beginning; all ready.
    replicas: int
    router: str = "least-wait"
    prefix_cache: bool = False
    failures: Failures = _NO_FAILURES
    #: None: as many replicas as at the beginning.
    scaling: ScalingRule | None = None
    #: From the decision to start a replica until it is ready: machine, weights, compiled programs.
    start_s: float = 180.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.start_s < 0:
            raise ConfigError("a fleet needs at least 1 replica, and a start takes 0 s or more")

    def simulate(self, traffic: Traffic) -> FleetRun:
        """Run the traffic through the fleet; a request that nobody takes is refused and does not
        come again.
        """
        return _Simulation(traffic, self).run()


@dataclass(slots=True, eq=False)
class _Replica:
    """One replica of the fleet."""

    name: str
    model: ReplicaModel
    state: _State


@dataclass(order=True, slots=True)
class _Event:
    """Something that happens by itself."""

    at: float
    number: int
    happen: Callable[[float], None] = field(compare=False)


@dataclass(slots=True)
class _Moment:
    """The fleet at a time."""

    at: float
    ready: int
    starting: int
    open: int
    waiting: int


@dataclass(slots=True)
class FleetRun:
    """What a simulation brought. Columns are [requests], in seconds; NaN: it was refused."""

    #: What was asked, in the order of its arrival.
    traffic: Traffic
    #: When the first token came, and the last.
    first: np.ndarray
    end: np.ndarray
    #: Prompt tokens found in a cache, of each request.
    cached: np.ndarray
    #: Requests that no replica took, that were repeated elsewhere, and that went on in a new core.
    refused: int = 0
    repeated: int = 0
    continued: int = 0
    #: Cores that were lost and came back on their machine, and machines that were replaced.
    core_failures: int = 0
    machine_failures: int = 0
    #: Replicas that were started after the first ones, in place of lost ones or by the scaling.
    started: int = 0
    #: Of all that ran or started, until everybody had an answer.
    replica_s: float = 0.0
    #: How the fleet stood, in the order of time.
    moments: list[_Moment] = field(default_factory=list[_Moment])

    @property
    def seconds(self) -> float:
        """From the first arrival to the last end."""
        last = float(np.nanmax(self.end)) if self.served else float(self.traffic.at[-1])
        return last - float(self.traffic.at[0])

    @property
    def served(self) -> int:
        return int(np.count_nonzero(~np.isnan(self.end)))

    @property
    def refused_share(self) -> float:
        return self.refused / len(self.traffic)

    @property
    def output_tokens(self) -> int:
        """Of the answers that were given."""
        return int(self.traffic.output[~np.isnan(self.end)].sum())

    @property
    def hit_rate(self) -> float:
        """Prompt tokens found in caches over all that were asked for."""
        asked = int(self.traffic.prompt[~np.isnan(self.end)].sum())
        return float(self.cached.sum()) / asked if asked else 0.0

    def first_tokens(self) -> np.ndarray:
        """Seconds to the first token, of those that were served after the beginning."""
        return (self.first - self.traffic.at)[self._counted()]

    def stream_rates(self) -> np.ndarray:
        """Tokens a second of each stream, likewise, of those of at least a few tokens."""
        long = self._counted() & (self.traffic.output >= _LEAST_STREAM)
        took = (self.end - self.first)[long]
        return (self.traffic.output[long] - 1) / np.maximum(took, 1e-9)

    def _counted(self) -> np.ndarray:
        """Which requests latencies are taken from: [requests] bool."""
        begin = self.traffic.at[0] + _WARM_UP * self.traffic.seconds
        return (self.traffic.at >= begin) & ~np.isnan(self.end)

    def cost_per_million(self, price_per_hour: float) -> float | None:
        """Of output tokens. price_per_hour: of one replica."""
        if not self.output_tokens:
            return None
        return self.replica_s / 3600 * price_per_hour / self.output_tokens * 1e6

    def figures(self) -> JsonDict:
        """Everything in numbers, ready for JSON."""
        return {
            "requests": len(self.traffic),
            "served": self.served,
            "refused": self.refused,
            "refused_share": self.refused_share,
            "seconds": self.seconds,
            "req_s": self.served / self.seconds if self.seconds else 0.0,
            "output_tok_s": self.output_tokens / self.seconds if self.seconds else 0.0,
            "ttft_s": _spread(self.first_tokens(), list(QUANTILES.values())),
            "stream_tok_s": _spread(self.stream_rates(), [50.0, 10.0, 1.0, 0.1]),
            "hit_rate": self.hit_rate,
            "replica_hours": self.replica_s / 3600,
            "core_failures": self.core_failures,
            "machine_failures": self.machine_failures,
            "continued": self.continued,
            "repeated": self.repeated,
            "started": self.started,
            "most_ready": max((moment.ready for moment in self.moments), default=0),
        }


def _spread(values: np.ndarray, percents: Sequence[float]) -> JsonDict | None:
    """Percentiles by their names."""
    if not len(values):
        return None
    points = np.percentile(values, percents).tolist()
    return {f"p{percent:g}": value for percent, value in zip(percents, points, strict=True)}


class _Simulation:
    """One run, while it goes on."""

    def __init__(self, traffic: Traffic, plan: FleetPlan):
        self.plan = plan
        limits = plan.engine.limits
        self._costs = StepCosts(limits, plan.engine.buckets, plan.table, traffic.mean_context)
        self._ingress = SimulatedIngress(plan.router, limits.max_seats)
        self._scaler = plan.scaling.scaler() if plan.scaling else None
        self._rng = np.random.default_rng(plan.seed)
        count = len(traffic)
        self._run = FleetRun(
            traffic, np.full(count, np.nan), np.full(count, np.nan), np.zeros(count, np.int64)
        )
        self._replicas: dict[str, _Replica] = {}
        self._events: list[_Event] = []
        self._numbers = 0
        self._sights = 0
        # Nobody comes any more; requests that are to begin again.
        self._over = False
        self._to_repeat = 0
        self._now = self._next_sight = float(traffic.at[0])
        self._scale_at = self._now + plan.scaling.every_s if plan.scaling else math.inf
        self._outage_at = self._now + plan.failures.outage_at
        for _ in range(plan.replicas):
            self._new_replica("ready")
        self._tell_ingress()

    def run(self) -> FleetRun:
        """All requests, to their ends."""
        for request in self._run.traffic.requests():
            if self._next_sight <= request.at:
                self._pass_time(request.at)
            self._route(request, request.at)
        self._scale_at = self._outage_at = math.inf
        self._over = True
        while self._n_open or self._to_repeat:
            self._pass_time(self._next_sight)
        return self._run

    @property
    def _n_open(self) -> int:
        return sum(replica.model.n_open for replica in self._replicas.values())

    def _new_replica(self, state: _State) -> _Replica:
        self._numbers += 1
        model = ReplicaModel(self.plan.engine, self._costs, prefix_cache=self.plan.prefix_cache)
        replica = _Replica(f"replica-{self._numbers}", model, state)
        self._replicas[replica.name] = replica
        return replica

    def _later(self, at: float, happen: Callable[[float], None]) -> None:
        self._numbers += 1
        heappush(self._events, _Event(at, self._numbers, happen))

    def _in_state(self, *states: _State) -> list[_Replica]:
        return [replica for replica in self._replicas.values() if replica.state in states]

    def _tell_ingress(self) -> None:
        """Who can be had has changed."""
        self._ingress.set_replicas(replica.name for replica in self._in_state("ready"))

    def _route(self, request: FleetRequest, now: float) -> None:
        """Give a request to the first replica that takes it."""
        for tried, name in enumerate(self._ingress.order(request)):
            if tried == _TRIES:
                break
            model = self._replicas[name].model
            model.advance(now)
            wait_s = model.predicted_wait() if model.n_waiting else 0.0
            if not model.refuses(request, wait_s):
                model.offer(request, now)
                self._ingress.given(name, request)
                return
            self._ingress.refused(name)
        self._run.refused += 1

    def _pass_time(self, until: float) -> None:
        """Everything that happens by itself up to then."""
        while self._next_sight <= until:
            self._happen(self._next_sight)
            self._see(self._next_sight)
            self._next_sight += _SIGHT_S
        self._happen(until)

    def _happen(self, until: float) -> None:
        while self._events and self._events[0].at <= until:
            event = heappop(self._events)
            event.happen(event.at)

    def _see(self, now: float) -> None:
        """Look at every replica; fail some, and start or let go some where it is time."""
        self._sights += 1
        ask = self._sights % _WAIT_EVERY == 0
        self._count(now - self._now)
        self._now = now
        for replica in list(self._replicas.values()):
            self._look_at(replica, now, ask)
        self._fail(now)
        if now >= self._scale_at:
            self._scale(now)

    def _count(self, seconds: float) -> None:
        """Every machine is paid for, also while it starts."""
        self._run.replica_s += seconds * len(self._replicas)

    def _look_at(self, replica: _Replica, now: float, ask: bool) -> None:
        model = replica.model
        model.advance(now)
        self._collect(model)
        if replica.state == "ready":
            wait_s = model.predicted_wait() if ask else None
            self._ingress.looked_at(replica.name, model.n_open, wait_s)
        elif replica.state == "draining" and not model.n_open:
            self._remove(replica)

    def _collect(self, model: ReplicaModel) -> None:
        """Write down who has got the last token."""
        for request in model.take_finished():
            number = request.number
            self._run.first[number] = request.first
            self._run.end[number] = request.end
            self._ingress.ended(request.end - request.at)
            self._run.cached[number] = request.n_cached

    def _remove(self, replica: _Replica) -> None:
        replica.state = "gone"
        del self._replicas[replica.name]

    def _fail(self, now: float) -> None:
        """Whoever fails within a look's time, as long as somebody comes."""
        failures = self.plan.failures
        for replica in self._chosen(failures.core_mtbf_s):
            self._lose_core(replica, now)
        for replica in self._chosen(failures.machine_mtbf_s):
            self._lose_machine(replica, now)
        if now >= self._outage_at:
            self._outage_at = math.inf
            ready = self._in_state("ready")
            count = round(failures.outage_share * len(ready))
            for at in sorted(self._rng.choice(len(ready), count, replace=False).tolist()):
                self._lose_machine(ready[at], now)

    def _chosen(self, mtbf_s: float) -> list[_Replica]:
        """Those of the ready ones that fail now by chance."""
        if math.isinf(mtbf_s) or self._over:
            return []
        ready = self._in_state("ready")
        count = min(len(ready), int(self._rng.poisson(len(ready) * _SIGHT_S / mtbf_s)))
        return [ready[at] for at in self._rng.choice(len(ready), count, replace=False).tolist()]

    def _lose_core(self, replica: _Replica, now: float) -> None:
        """Its requests go on when the next core is there; nobody new comes meanwhile."""
        self._run.core_failures += 1
        requests = replica.model.stop(now)
        self._run.continued += len(requests)
        back_at = now + self.plan.failures.core_recovery_s
        replica.model.resume(requests, back_at)
        replica.state = "recovering"
        self._tell_ingress()
        self._later(back_at, lambda at: self._become_ready(replica))

    def _become_ready(self, replica: _Replica) -> None:
        replica.state = "ready"
        self._tell_ingress()

    def _lose_machine(self, replica: _Replica, now: float) -> None:
        """Its requests begin again elsewhere, and another machine is started."""
        self._run.machine_failures += 1
        requests = replica.model.stop(now)
        self._collect(replica.model)
        self._remove(replica)
        self._tell_ingress()
        for request in requests:
            request.n_done = 0
            request.repeats += 1
            self._to_repeat += 1
            self._later(now + self.plan.failures.notice_s, self._again(request))
        self._run.repeated += len(requests)
        self._start(now)

    def _again(self, request: FleetRequest) -> Callable[[float], None]:
        def again(at: float) -> None:
            self._to_repeat -= 1
            self._route(request, at)

        return again

    def _start(self, now: float) -> None:
        replica = self._new_replica("starting")
        self._run.started += 1
        self._later(now + self.plan.start_s, lambda at: self._become_ready(replica))

    def _scale(self, now: float) -> None:
        """Start replicas or let some go, by the rule."""
        assert self._scaler is not None
        rule = self._scaler.rule
        self._scale_at += rule.every_s
        ready = self._in_state("ready")
        starting = len(self._in_state("starting", "recovering"))
        n_open = sum(replica.model.n_open for replica in ready)
        waiting = sum(replica.model.n_waiting for replica in ready)
        self._run.moments.append(_Moment(now, len(ready), starting, n_open, waiting))
        seats = len(ready) * self.plan.engine.limits.max_seats
        waits = [self._ingress.waits[replica.name] for replica in ready]
        change = self._scaler.change(now, len(ready), starting, waits, n_open / max(1, seats))
        for _ in range(change):
            self._start(now)
        if change < 0:
            self._let_go(ready[change:])

    def _let_go(self, replicas: Sequence[_Replica]) -> None:
        """They get no more requests, and go when they have answered those that they have."""
        for replica in replicas:
            replica.state = "draining"
        self._tell_ingress()
