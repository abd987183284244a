"""Prometheus metrics of a fleet: counts of its ingress, and states of its replicas.

Engines have their own metrics. Labels have few values: names of models and replicas, outcomes.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from operator import attrgetter
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from jitney.engine.fleet.replicas import Replica, ReplicaState
from jitney.engine.fleet.rollout.comparison import ARMS, FIGURES
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


def _gauge(name: str, text: str, labels: Sequence[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"jitney_fleet_rollout_{name}", text, labels=("model", *labels))


class _RolloutCollector(Collector):
    """Collects the metrics of rollouts. rollouts: returns the current ones of the fleet."""

    def __init__(self, rollouts: Callable[[], Iterable[Rollout]]):
        self._rollouts = rollouts

    def collect(self) -> Iterator[Metric]:
        rollouts = list(self._rollouts())
        yield _shares(rollouts)
        yield _states(rollouts)
        yield _requests(rollouts)
        yield _levels(rollouts)
        yield from _intervals(rollouts)


def _shares(rollouts: list[Rollout]) -> Metric:
    family = _gauge("share", "share of the keys that the candidate gets now", ["candidate"])
    for rollout in rollouts:
        family.add_metric([rollout.model, rollout.name], rollout.share)
    return family


def _states(rollouts: list[Rollout]) -> Metric:
    family = _gauge("state", "1 for the state that the rollout is in", ["candidate", "state"])
    for rollout in rollouts:
        for state in get_args(RolloutState.__value__):
            family.add_metric([rollout.model, rollout.name, state], rollout.state == state)
    return family


def _requests(rollouts: list[Rollout]) -> Metric:
    family = _gauge("requests", "requests that are compared, since the comparison began", ["arm"])
    for rollout in rollouts:
        for arm in ARMS:
            family.add_metric([rollout.model, arm], rollout.comparison.requests(arm))
    return family


def _levels(rollouts: list[Rollout]) -> Metric:
    family = _gauge("level", "each arm's own value of a figure that is compared", ["arm", "figure"])
    for rollout in rollouts:
        for arm in ARMS:
            for figure in FIGURES:
                level = rollout.comparison.level(arm, figure)
                if level is not None:
                    family.add_metric([rollout.model, arm, figure], level)
    return family


def _intervals(rollouts: list[Rollout]) -> Iterator[Metric]:
    """Intervals and verdicts of the figures; figures without an interval are absent."""
    intervals = _gauge(
        "interval",
        "candidate to stable, a ratio (of errors the difference): the estimate and both ends",
        ["figure", "bound"],
    )
    verdicts = _gauge(
        "worse", "1 if all of the interval says that the candidate is worse", ["figure"]
    )
    for rollout in rollouts:
        for figure, interval in rollout.intervals().items():
            for bound, value in asdict(interval).items():
                intervals.add_metric([rollout.model, figure, bound], value)
            is_worse = interval.verdict(FIGURES[figure]) == "worse"
            verdicts.add_metric([rollout.model, figure], is_worse)
    yield intervals
    yield verdicts
