"""Simulates a fleet on a virtual clock: replicas with the engine's own scheduler, the router of the
real ingress, failures, and replicas that start and stop.

The router counts the requests that it sent. It learns of their ends every `_LOOK_S`, and of
predicted waits every second, like a real ingress that polls. All random numbers come from the seed,
so the same fleet and traffic always give the same figures.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from statistics import fmean

import numpy as np

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.request_record import RequestRecord
from jitney.engine.common.requests import EngineRequest, JsonDict
from jitney.engine.common.summary import QUANTILES
from jitney.engine.common.trace import Arrival
from jitney.engine.core import EngineShape, StepTimes
from jitney.engine.fleet import ReplicaSet, RouterName
from jitney.engine.lab.simulation.fleet_replica import (
    SimulatedReplica,
    SimulatedState,
    fleet_request,
)
from jitney.engine.lab.simulation.fleet_scaling import Scaler, ScalingRule, SeatDemand
from jitney.engine.lab.simulation.simulator import no_collection

#: Seconds between two polls of the replicas; polls between two reports of their load.
_LOOK_S, _REPORT_EVERY = 0.25, 4
#: Replicas that are tried for a request before it is refused; seconds for which a replica that
#: refuses counts as full.
_TRIES, _FULL_S = 8, 1.0
#: Least tokens of a stream whose speed is counted: one step with a prompt would dominate others.
_LEAST_STREAM = 8
#: Share of the traffic's time at its start without latency figures, since the fleet is empty then.
_WARM_UP = 0.1


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures of replicas. Mean times between failures are for one replica, in seconds, with an
    exponential distribution; infinity: never.
    """

    #: Mean time between failures of a core, whose requests continue in the next core; seconds until
    #: that is ready.
    core_mtbf_s: float = math.inf
    core_recovery_s: float = 10.0
    #: Mean time between losses of a machine; seconds until the ingress sends its requests elsewhere
    #: and another machine starts.
    machine_mtbf_s: float = math.inf
    notice_s: float = 30.0
    #: Time at which machines are lost together, seconds; their share of all machines.
    outage_at: float = math.inf
    outage_share: float = 0.0

    def __post_init__(self) -> None:
        if min(self.core_mtbf_s, self.machine_mtbf_s) <= 0 or not 0 <= self.outage_share <= 1:
            raise ConfigError("mean times between failures must be above 0, shares 0 to 1")
        times = self.core_recovery_s, self.notice_s
        if not 0 <= min(times) <= max(times) < math.inf:
            raise ConfigError("times to recover and to notice must be 0 or more")

    def of_replica(self, chips: int) -> Failures:
        """The failures of a replica of `chips` machines, which fails if any of them is lost."""
        return replace(self, machine_mtbf_s=self.machine_mtbf_s / chips)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    engine: EngineShape
    table: StepTimes
    #: Replicas at the start, all ready.
    replicas: int
    router: RouterName = "least-wait"
    prefix_cache: bool = False
    failures: Failures = field(default_factory=Failures)
    #: None: the number of replicas stays constant.
    scaling: ScalingRule | None = None
    #: Seconds from the decision to start a replica until it is ready: machine, weights, compiling.
    start_s: float = 180.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.start_s < 0:
            raise ConfigError("a fleet needs at least 1 replica, and a start takes 0 s or more")

    def simulate(self, arrivals: Sequence[Arrival]) -> FleetRun:
        """Run the arrivals (by time) through the fleet. Refused requests are not sent again."""
        if not arrivals:
            raise ConfigError("there is no request to simulate")
        with no_collection():
            return _Simulation(arrivals, self).run()


@dataclass(frozen=True, slots=True)
class _Moment:
    at: float
    ready: int
    starting: int
    open: int
    waiting: int


@dataclass(slots=True)
class FleetRun:
    """The outcome of a simulation."""

    arrivals: Sequence[Arrival]
    #: Record of each arrival; None for a refused one.
    requests: list[RequestRecord | None]
    #: Requests that were repeated on another machine; requests that continued in a new core.
    repeated: int = 0
    continued: int = 0
    #: Lost cores that restarted on their machine; machines that were replaced.
    core_failures: int = 0
    machine_failures: int = 0
    #: Replicas started later, to replace lost ones or by scaling.
    started: int = 0
    #: Seconds of all running and starting replicas, until the last answer.
    replica_s: float = 0.0
    #: States of the fleet by time.
    moments: list[_Moment] = field(default_factory=list[_Moment])

    @property
    def served(self) -> list[RequestRecord]:
        return [request for request in self.requests if request is not None]

    @property
    def refused_share(self) -> float:
        return self.requests.count(None) / len(self.requests)

    @property
    def seconds(self) -> float:
        """Seconds from the first arrival to the last end."""
        last = max((request.end for request in self.served), default=self.arrivals[-1].at)
        return last - self.arrivals[0].at

    @property
    def output_tokens(self) -> int:
        return sum(request.n_output for request in self.served)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found in prefix caches."""
        prompt_tokens = sum(request.n_prompt for request in self.served)
        return sum(request.cached_tokens for request in self.served) / max(1, prompt_tokens)

    def cost_per_million(self, price_per_hour: float) -> float | None:
        """Cost of a million output tokens; None without any. price_per_hour: of one replica."""
        if not self.output_tokens:
            return None
        return self.replica_s / 3600 * price_per_hour / self.output_tokens * 1e6

    def first_tokens(self) -> list[float]:
        """Seconds to the first token of the served requests, without the warm-up."""
        return [request.ttft_s or 0.0 for request in self._counted()]

    def stream_rates(self) -> list[float]:
        """Tokens a second of each stream after its first token, without the warm-up."""
        long = (request for request in self._counted() if request.n_output >= _LEAST_STREAM)
        return [1 / max(request.tpot_s or 0.0, 1e-9) for request in long]

    def _counted(self) -> list[RequestRecord]:
        first, last = self.arrivals[0].at, self.arrivals[-1].at
        begin = first + _WARM_UP * (last - first)
        return [request for request in self.served if request.arrival >= begin]

    def figures(self) -> JsonDict:
        served, seconds = self.served, self.seconds
        return {
            "requests": len(self.requests),
            "served": len(served),
            "refused": self.requests.count(None),
            "refused_share": self.refused_share,
            "seconds": seconds,
            "req_s": len(served) / seconds if seconds else 0.0,
            "output_tok_s": self.output_tokens / seconds if seconds else 0.0,
            "ttft_s": _percentiles(self.first_tokens(), list(QUANTILES.values())),
            "stream_tok_s": _percentiles(self.stream_rates(), [50.0, 10.0, 1.0, 0.1]),
            "hit_rate": self.hit_rate,
            "replica_hours": self.replica_s / 3600,
            "core_failures": self.core_failures,
            "machine_failures": self.machine_failures,
            "continued": self.continued,
            "repeated": self.repeated,
            "started": self.started,
            "most_ready": max((moment.ready for moment in self.moments), default=0),
        }


def _percentiles(values: Sequence[float], percents: Sequence[float]) -> JsonDict | None:
    if not values:
        return None
    points = np.percentile(values, percents).tolist()
    return {f"p{percent:g}": value for percent, value in zip(percents, points, strict=True)}


class _Simulation:
    def __init__(self, arrivals: Sequence[Arrival], plan: FleetPlan):
        self.plan = plan
        self._seats = plan.engine.limits.max_seats
        self._now = arrivals[0].at
        self._known = ReplicaSet(router=plan.router)
        self._scaler = Scaler(plan.scaling) if plan.scaling else None
        self._demand = SeatDemand()
        # Requests that arrived and requests that ended since the last scaling decision.
        self._came = self._ended = 0
        self._rng = np.random.default_rng(plan.seed)
        self._run = FleetRun(arrivals, [None] * len(arrivals))
        #: Time of the first token of requests whose core or machine was lost, by id.
        self._first_tokens: dict[str, float] = {}
        self._replicas: dict[str, SimulatedReplica] = {}
        #: Heap of (time, number, function to call).
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count(1)
        self._looks = itertools.count(1)
        self._to_repeat = 0
        self._all_came = False
        self._next_look = arrivals[0].at
        self._scale_at = self._next_look + plan.scaling.every_s if plan.scaling else math.inf
        self._outage_at = self._next_look + plan.failures.outage_at
        for _ in range(plan.replicas):
            self._new_replica("ready")

    def run(self) -> FleetRun:
        for number, arrival in enumerate(self._run.arrivals):
            self._pass_time(arrival.at)
            self._route(fleet_request(number, arrival), arrival.at)
        self._scale_at = self._outage_at = math.inf
        self._all_came = True
        while self._to_repeat or any(replica.n_open for replica in self._replicas.values()):
            self._pass_time(self._next_look)
        return self._run

    def _new_replica(self, state: SimulatedState) -> SimulatedReplica:
        name = f"replica-{next(self._numbers)}"
        plan = self.plan
        replica = SimulatedReplica(
            name, state, self._clock, plan.engine, plan.table, plan.prefix_cache
        )
        self._replicas[name] = replica
        self._known.add(replica.known)
        return replica

    def _later(self, at: float, happen: Callable[[float], None]) -> None:
        heappush(self._events, (at, next(self._numbers), happen))

    def _in_state(self, *states: SimulatedState) -> list[SimulatedReplica]:
        return [replica for replica in self._replicas.values() if replica.state in states]

    def _clock(self) -> float:
        return self._now

    def _remove(self, replica: SimulatedReplica) -> None:
        del self._replicas[replica.name]
        self._known.remove(replica.known)

    def _route(self, request: EngineRequest, now: float) -> None:
        """Send a request to the first replica that accepts it."""
        self._came += 1
        arrival = self._run.arrivals[int(request.id)]
        # The conversation's prefix, or a unique one.
        prefixes = [f"{arrival.conversation or f'alone {arrival.at}'}".encode()]
        for known in itertools.islice(self._known.order(prefixes), _TRIES):
            replica = self._replicas[known.name]
            replica.advance(now)
            if replica.add(request):
                self._known.sent(prefixes, known.name)
                known.begin()
                return
            known.refused(_FULL_S)

    def _pass_time(self, until: float) -> None:
        """Run polls and events up to a time."""
        while self._next_look <= until:
            self._happen(self._next_look)
            self._now = self._next_look
            self._look(self._next_look)
            self._next_look += _LOOK_S
        self._happen(until)
        self._now = until

    def _happen(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self._now, _, happen = heappop(self._events)
            happen(self._now)

    def _look(self, now: float) -> None:
        """Poll every replica, let some fail, and scale if it is time."""
        reports = next(self._looks) % _REPORT_EVERY == 0
        # A machine costs money while it starts, too.
        self._run.replica_s += _LOOK_S * len(self._replicas)
        for replica in list(self._replicas.values()):
            replica.advance(now)
            self._collect(replica)
            if replica.state == "draining" and not replica.n_open:
                self._remove(replica)
            elif reports:
                replica.report()
        self._fail(now)
        if self._scaler is not None and now >= self._scale_at:
            self._scale(self._scaler, now)

    def _collect(self, replica: SimulatedReplica) -> None:
        for record in replica.take_ended():
            number = int(record.request_id)
            self._ended += 1
            record.number = number
            record.n_output = max(1, self._run.arrivals[number].n_output)
            record.first_token = self._first_tokens.pop(record.request_id, record.first_token)
            record.stays.clear()
            self._run.requests[number] = record

    def _fail(self, now: float) -> None:
        """Random failures until the last request has come, and the outage."""
        failures = self.plan.failures
        for replica in self._chosen(failures.core_mtbf_s):
            self._lose_core(replica, now)
        for replica in self._chosen(failures.machine_mtbf_s):
            self._lose_machine(replica, now)
        if now >= self._outage_at:
            self._outage_at = math.inf
            count = round(failures.outage_share * len(self._in_state("ready")))
            for replica in self._drawn(count):
                self._lose_machine(replica, now)

    def _chosen(self, mtbf_s: float) -> list[SimulatedReplica]:
        """Random ready replicas that fail now."""
        if math.isinf(mtbf_s) or self._all_came:
            return []
        ready = len(self._in_state("ready"))
        return self._drawn(min(ready, int(self._rng.poisson(ready * _LOOK_S / mtbf_s))))

    def _drawn(self, count: int) -> list[SimulatedReplica]:
        ready = self._in_state("ready")
        chosen = self._rng.choice(len(ready), count, replace=False) if count else []
        return [ready[at] for at in sorted(chosen)]

    def _lose_core(self, replica: SimulatedReplica, now: float) -> None:
        back_at = now + self.plan.failures.core_recovery_s
        self._note_first_tokens(replica.lose_core(back_at))
        self._run.core_failures += 1
        self._run.continued += replica.n_open
        replica.become("recovering")
        self._later(back_at, lambda at: replica.become("ready"))

    def _note_first_tokens(self, records: Sequence[RequestRecord]) -> None:
        """Record first tokens, which clients have received wherever their requests continue."""
        for record in records:
            if record.first_token is not None:
                self._first_tokens.setdefault(record.request_id, record.first_token)

    def _lose_machine(self, replica: SimulatedReplica, now: float) -> None:
        records, requests = replica.lose_machine()
        self._note_first_tokens(records)
        self._remove(replica)
        for request in requests:
            self._to_repeat += 1
            self._later(now + self.plan.failures.notice_s, self._repeat(request))
        self._run.machine_failures += 1
        self._run.repeated += len(requests)
        self._start(now)

    def _repeat(self, request: EngineRequest) -> Callable[[float], None]:
        def repeat(at: float) -> None:
            self._to_repeat -= 1
            self._route(request, at)

        return repeat

    def _start(self, now: float) -> None:
        replica = self._new_replica("starting")
        self._run.started += 1
        self._later(now + self.plan.start_s, lambda at: replica.become("ready"))

    def _scale(self, scaler: Scaler, now: float) -> None:
        self._scale_at += scaler.rule.every_s
        ready = self._in_state("ready")
        starting = len(self._in_state("starting", "recovering"))
        n_open = sum(replica.n_open for replica in ready)
        waiting = sum(max(0, replica.n_open - self._seats) for replica in ready)
        self._run.moments.append(_Moment(now, len(ready), starting, n_open, waiting))
        waits = [replica.known.predicted_wait for replica in ready]
        self._demand.observe(self._came, self._ended)
        self._came = self._ended = 0
        in_use = [min(1.0, replica.n_open / self._seats) for replica in ready]
        fill = self._demand.of(fmean(in_use)) if ready else 0.0
        change = scaler.change(now, len(ready), starting, waits, fill)
        for _ in range(change):
            self._start(now)
        if change < 0:
            # They finish their requests, then end.
            for replica in ready[change:]:
                replica.become("draining")
