"""Prometheus metrics of candidates: how much each gets, how it stands, and what was decided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import get_args

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jitney.engine.fleet.comparison import ARMS, FIGURES, Interval
from jitney.engine.fleet.rollout import Rollout, RolloutState


def _gauge(name: str, text: str, labels: Sequence[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"jitney_fleet_rollout_{name}", text, labels=("model", *labels))


class RolloutCollector(Collector):
    """rollouts: all of the fleet, as they are when somebody asks."""

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
        for state in get_args(RolloutState):
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
    """What is not known yet is absent."""
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
            for bound, value in _ends(interval):
                intervals.add_metric([rollout.model, figure, bound], value)
            is_worse = interval.verdict(FIGURES[figure]) == "worse"
            verdicts.add_metric([rollout.model, figure], is_worse)
    yield intervals
    yield verdicts


def _ends(interval: Interval) -> tuple[tuple[str, float], ...]:
    return ("estimate", interval.estimate), ("low", interval.low), ("high", interval.high)
