"""How many engines a model should have, by what they say of their waits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from jitney.engine.fleet.launchers.autoscaling import (
    _LOAD,
    _SEATS,
    _WAIT,
    EngineLoad,
    WaitPolicy,
    _wanted_engines,
)

#: Engines of 8 seats each; wait, load.
_CASES = {
    "nobody waits, the seats are needed": ([(0, 6), (0, 6)], 2),
    "nobody waits, one less would do": ([(0, 2), (0, 3)], 1),
    "one is beyond the target, the other is not": ([(9, 12), (1, 8)], 2),
    "all are beyond the target": ([(9, 12), (3, 8)], 3),
    "somebody waits, so none is let go": ([(0.5, 1), (0, 0)], 2),
    "none": ([], 0),
}


@pytest.mark.parametrize("case", _CASES)
def test_the_number_of_engines_follows_the_predicted_wait(case: str):
    told, wanted = _CASES[case]
    loads = [EngineLoad(wait, load, 8) for wait, load in told]
    assert _wanted_engines(loads, target_wait_s=2) == wanted


@dataclass(frozen=True)
class _Context:
    aggregated_metrics: dict[str, dict[object, float]]
    current_num_replicas: int
    target_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int


def _context(waits: list[float], running: int, most: int = 4) -> _Context:
    engines: list[object] = list(range(len(waits)))
    return _Context(
        aggregated_metrics={
            _WAIT: dict(zip(engines, waits, strict=True)),
            _LOAD: dict.fromkeys(engines, 8.0),
            _SEATS: dict.fromkeys(engines, 8.0),
        },
        current_num_replicas=running,
        target_num_replicas=running,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=most,
    )


def test_the_policy_keeps_to_the_bounds_and_waits_for_engines_that_just_came():
    policy = WaitPolicy(target_wait_s=2)
    assert policy(_context([5.0, 5.0], running=2)) == (3, {})
    assert policy(_context([5.0, 5.0], running=3)) == (3, {})  # one has said nothing yet
    assert policy(_context([5.0, 5.0], running=2, most=2)) == (2, {})
