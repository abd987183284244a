"""Decides how many engines a model should have, from their reported waits, without side effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

#: Names of the metrics that engines report to Ray Serve.
_WAIT, _LOAD, _SEATS = "jitney_wait_s", "jitney_load", "jitney_seats"
#: One engine is removed if the others' seats would be taken to less than this share.
_FULL = 0.7


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of an engine. wait_s: predicted wait of one more request."""

    wait_s: float
    load: float
    seats: float

    def reported(self) -> dict[str, float]:
        """The load as metrics for Ray Serve."""
        return {_WAIT: self.wait_s, _LOAD: self.load, _SEATS: self.seats}


def _wanted_engines(loads: Sequence[EngineLoad], target_wait_s: float) -> int:
    """The number of engines: one more if even the shortest wait is above the target; one less if no
    request waits and the others would have free seats; otherwise unchanged.
    """
    count = len(loads)
    if not count:
        return 0
    if min(each.wait_s for each in loads) > target_wait_s:
        return count + 1
    seats = sum(each.seats for each in loads) * (count - 1) / count
    if all(each.wait_s == 0 for each in loads) and sum(each.load for each in loads) < _FULL * seats:
        return count - 1
    return count


class _ScalingContext(Protocol):
    """Ray Serve's argument of a policy: metrics and replica counts."""

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[object, float]] | None: ...
    @property
    def current_num_replicas(self) -> int: ...
    @property
    def target_num_replicas(self) -> int: ...
    @property
    def capacity_adjusted_min_replicas(self) -> int: ...
    @property
    def capacity_adjusted_max_replicas(self) -> int: ...


class WaitPolicy:
    """Ray Serve's policy for the number of engines of a model: `_wanted_engines` of the metrics in
    Serve's look-back window. target_wait_s: seconds.
    """

    def __init__(self, target_wait_s: float):
        self._target_wait_s = target_wait_s

    def __call__(self, context: _ScalingContext) -> tuple[int, dict[str, object]]:
        loads = _loads(context.aggregated_metrics or {})
        n_engines = context.target_num_replicas
        if len(loads) == context.current_num_replicas:  # new engines have not reported yet
            n_engines = _wanted_engines(loads, self._target_wait_s)
        low = context.capacity_adjusted_min_replicas
        return max(low, min(context.capacity_adjusted_max_replicas, n_engines)), {}


def _loads(told: Mapping[str, Mapping[object, float]]) -> list[EngineLoad]:
    """Loads of the engines that reported all metrics."""
    waits, loads, seats = (told.get(name, {}) for name in (_WAIT, _LOAD, _SEATS))
    return [
        EngineLoad(waits[engine], loads[engine], seats[engine])
        for engine in waits
        if engine in loads and engine in seats
    ]
