"""Prometheus metrics of a fleet: counts of its ingress, and states of its replicas.

Engines have their own metrics. Labels have few values: names of models and replicas, outcomes.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import version
from operator import attrgetter
from typing import NamedTuple, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from jitney.engine.fleet.replicas import Replica, ReplicaState
from jitney.engine.fleet.rollout.comparison import ARMS, FIGURES, Interval
from jitney.engine.fleet.rollout.rollout import Rollout, RolloutState

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
#: Metrics that are only exported for ready replicas.
_OF_READY = frozenset({"replica_predicted_wait_seconds"})
#: Name of a gauge -> (help text, function that reads it).
_GAUGES: Mapping[str, tuple[str, Callable[[Replica], float]]] = {
    "replica_ready": ("1 if the replica takes requests", lambda replica: replica.state == "ready"),
    "replica_open": (
        "live requests of this ingress, open at the replica",
        attrgetter("open"),
    ),
    "replica_background": (
        "background requests of this ingress, open at the replica",
        attrgetter("lines"),
    ),
    "replica_load": (
        "live requests at the replica, of all its clients",
        attrgetter("load"),
    ),
    "replica_predicted_wait_seconds": (
        "seconds that one more request would wait for a seat of the replica; absent while it takes "
        "none",
        attrgetter("predicted_wait"),
    ),
}

#: Returns the current replicas of each model.
type _ReplicasByModel = Callable[[], Mapping[str, list[Replica]]]


class FleetMetrics:
    """All metrics of one ingress, in a registry of their own."""

    def __init__(
        self, replicas: _ReplicasByModel, rollouts: Callable[[], Iterable[Rollout]] = tuple
    ):
        self.registry = CollectorRegistry(auto_describe=False)
        self.requests = self._counter("requests", "HTTP requests answered", "route", "class")
        self.attempts = self._counter(
            "attempts",
            "requests given to a replica, by what came of it",
            "model",
            "replica",
            "outcome",
        )
        self.choices = self._counter(
            "choices",
            "requests by router = prefix, by how the replica that took them was found: known "
            "(it was given the beginning of the prompt before), moved (that one had too much to "
            "do, was full or gone); of prefixes that no replica had: hashed (it belongs to it), "
            "spread (the one that it belongs to had no free seat, was full or gone)",
            "model",
            "choice",
        )
        self.stages = self._counter(
            "stages",
            "answers of models made of models, by the part that gave them",
            "model",
            "stage",
        )
        self.disconnects = self._counter("disconnects", "requests whose client left early")
        self.first_byte = Histogram(
            "jitney_fleet_first_byte_seconds",
            "arrival of a request to the first byte of its answer",
            ["model"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.registry.register(_ReplicaCollector(replicas))
        self.registry.register(_RolloutCollector(rollouts))

    def chosen(self) -> dict[str, int]:
        """Requests by `choices`, of all models."""
        counts = Tally[str]()
        for family in self.choices.collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    counts[sample.labels["choice"]] += int(sample.value)
        return dict(counts)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"jitney_fleet_{name}", text, labels, registry=self.registry)


class _ReplicaCollector(Collector):
    def __init__(self, replicas: _ReplicasByModel):
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily(
            "jitney_fleet_build", "what is running", {"version": version("jitney")}
        )
        yield self._states()
        for name, (text, read) in _GAUGES.items():
            family = GaugeMetricFamily(f"jitney_fleet_{name}", text, labels=["model", "replica"])
            for model, replicas in self._replicas().items():
                for replica in replicas:
                    if replica.state == "ready" or name not in _OF_READY:
                        family.add_metric([model, replica.name], read(replica))
            yield family

    def _states(self) -> Metric:
        """Replicas of every model in every state, also 0, so that alerts see a count fall."""
        family = GaugeMetricFamily(
            "jitney_fleet_replicas", "replicas by their state", labels=["model", "state"]
        )
        for model, replicas in self._replicas().items():
            counts = Tally(replica.state for replica in replicas)
            for state in get_args(ReplicaState.__value__):
                family.add_metric([model, state], counts[state])
        return family


class _RolloutGauge(NamedTuple):
    """A metric of every rollout."""

    text: str
    #: Beside the model.
    labels: tuple[str, ...]
    #: Rollout and its intervals -> values of the labels, and the value; None: not exported.
    read: Callable[
        [Rollout, Mapping[str, Interval]], Iterable[tuple[*tuple[str, ...], float | None]]
    ]


#: By name. Figures without an interval are absent.
_ROLLOUT_GAUGES = {
    "share": _RolloutGauge(
        "share of the keys that the candidate gets now",
        ("candidate",),
        lambda rollout, _: [(rollout.name, rollout.share)],
    ),
    "state": _RolloutGauge(
        "1 for the state that the rollout is in",
        ("candidate", "state"),
        lambda rollout, _: [
            (rollout.name, state, rollout.state == state)
            for state in get_args(RolloutState.__value__)
        ],
    ),
    "requests": _RolloutGauge(
        "requests that are compared, since the comparison began",
        ("arm",),
        lambda rollout, _: [(arm, rollout.comparison.requests(arm)) for arm in ARMS],
    ),
    "level": _RolloutGauge(
        "each arm's own value of a figure that is compared",
        ("arm", "figure"),
        lambda rollout, _: [
            (arm, figure, rollout.comparison.level(arm, figure))
            for arm in ARMS
            for figure in FIGURES
        ],
    ),
    "interval": _RolloutGauge(
        "candidate to stable, a ratio (of errors the difference): the estimate and both ends",
        ("figure", "bound"),
        lambda _, intervals: [
            (figure, bound, value)
            for figure, interval in intervals.items()
            for bound, value in asdict(interval).items()
        ],
    ),
    "worse": _RolloutGauge(
        "1 if all of the interval says that the candidate is worse",
        ("figure",),
        lambda _, intervals: [
            (figure, interval.verdict(FIGURES[figure]) == "worse")
            for figure, interval in intervals.items()
        ],
    ),
}


class _RolloutCollector(Collector):
    """Collects the metrics of rollouts. rollouts: returns the current ones of the fleet."""

    def __init__(self, rollouts: Callable[[], Iterable[Rollout]]):
        self._rollouts = rollouts

    def collect(self) -> Iterator[Metric]:
        rollouts = [(rollout, rollout.intervals()) for rollout in self._rollouts()]
        for name, gauge in _ROLLOUT_GAUGES.items():
            labels = ("model", *gauge.labels)
            family = GaugeMetricFamily(f"jitney_fleet_rollout_{name}", gauge.text, labels=labels)
            for rollout, intervals in rollouts:
                for *values, figure in gauge.read(rollout, intervals):
                    if figure is not None:
                        family.add_metric([rollout.model, *values], figure)
            yield family
