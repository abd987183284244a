"""The metrics of a fleet with one lost engine and one candidate."""

from __future__ import annotations

from jitney.engine.fleet.metrics import FleetMetrics
from jitney.engine.fleet.replicas import Replica
from jitney.engine.fleet.rollout.rollout import PromotionRule, Rollout


def fleet_metrics() -> FleetMetrics:
    replica = Replica("m-0")
    replica.became("gone")
    rollout = Rollout("m", "c", PromotionRule())
    return FleetMetrics(lambda: {"m": [replica]}, lambda: [rollout])
