"""Sizing fleets: what is found keeps its targets, and what is asked for costs what it should."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jitney.engine.common.errors import ConfigError
from jitney.engine.lab.simulation.devices import DEVICES
from jitney.engine.lab.simulation.fleet import Failures
from jitney.engine.lab.simulation.fleet_planner import (
    FleetAssumptions,
    FleetSizing,
    ReplicaKind,
    Targets,
    _spare_for,
)
from jitney.engine.lab.simulation.fleet_traffic import Day, Recorded
from jitney.engine.lab.simulation.roofline import SHAPES, ModelCost, Roofline
from jitney.engine.lab.simulation.workload import Fixed, Uniform

LLAMA = ModelCost(SHAPES["llama-3.1-8b"])
H100 = ReplicaKind("h100", Roofline(LLAMA, DEVICES["h100"]), chip_hour=3.0)
DAY = Day((600.0, 200.0), Uniform(100, 400), Uniform(20, 100))
TARGETS = Targets(ttft_s=0.5, stream_tok_s=50.0)
HOW = FleetAssumptions(most_requests=800, most_seats=32)


@pytest.fixture(scope="module")
def usual() -> FleetSizing:
    return FleetSizing.of(H100, DAY, TARGETS, HOW)


def test_a_fleet_keeps_its_targets_at_the_least_cost(usual: FleetSizing):
    found = usual
    assert not found.problem and found.seats == 32
    assert found.figures["ttft_s"]["p99"] <= 0.5
    assert found.figures["stream_tok_s"]["p1"] >= 50
    assert found.figures["refused_share"] <= 0.001
    assert found.replicas == max(found.by_hour) and found.by_hour[1] < found.by_hour[0]
    assert found.load_req_s * found.replicas >= 600.0 > found.load_req_s * (found.replicas - 2)
    tokens = 800.0 * 3600 * 60
    assert found.output_tokens == pytest.approx(tokens, rel=0.05)
    assert found.price_per_hour == 3.0 * found.replicas
    assert found.fixed_replica_hours == 2 * found.replicas
    assert found.scaled_replica_hours == sum(found.by_hour)  # nothing is started after the first
    cost = found.cost_per_million(found.fixed_replica_hours)
    assert cost == pytest.approx(6.0 * found.replicas / found.output_tokens * 1e6)


def test_more_is_asked_of_more_replicas(usual: FleetSizing):
    strict = FleetSizing.of(H100, DAY, replace(TARGETS, stream_tok_s=120.0), HOW)
    assert strict.replicas >= usual.replicas and strict.load_req_s <= usual.load_req_s
    double = FleetSizing.of(H100, replace(DAY, rates=(1200.0,)), TARGETS, HOW)
    assert double.replicas == pytest.approx(2 * usual.replicas, abs=1)


def test_a_record_is_sized_by_its_own_bursts():
    record = Recorded(replace(DAY, rates=(60.0,), hour_s=60.0).whole(3))
    found = FleetSizing.of(H100, record, TARGETS, HOW)
    assert not found.problem and found.replicas >= 1
    assert found.figures["requests"] == min(800, len(record.arrivals))
    assert found.fixed_replica_hours == pytest.approx(found.replicas * len(record.rates) / 60)


def test_what_cannot_be_says_why():
    how = replace(HOW, most_requests=100)
    small = ReplicaKind("v5e", Roofline(LLAMA, DEVICES["v5e"]))
    assert "leave no room" in FleetSizing.of(small, DAY, TARGETS, how).problem
    fast = FleetSizing.of(H100, DAY, replace(TARGETS, stream_tok_s=5000.0), how)
    assert "even alone" in fast.problem and not fast.replicas
    soon = FleetSizing.of(H100, DAY, replace(TARGETS, ttft_s=0.001), how)
    assert "does not come within 1 ms" in soon.problem
    odd = ReplicaKind("3xh100", replace(H100.roofline, count=3))
    assert FleetSizing.of(odd, DAY, TARGETS, how).problem


def test_to_spare_by_hand():
    """One of a thousand is down at a time: P(more than 1 + s of mean 1) < 1 in 1,000 from 5 on."""
    failing = replace(HOW, failures=Failures(core_mtbf_s=10_000.0, core_recovery_s=10.0))
    assert _spare_for(1000, failing) == 5
    assert _spare_for(1000, HOW) == 0
    often = replace(HOW, failures=Failures(core_mtbf_s=600.0, core_recovery_s=10.0))
    assert _spare_for(100_000, often) == 1794, "1,667 are down on average, give or take 41"
    lost = replace(HOW, failures=Failures(machine_mtbf_s=180_000.0), start_s=180.0)
    assert _spare_for(1000, lost) == 5


def test_a_machine_of_several_chips_is_lost_with_any_of_them():
    how = replace(HOW, failures=Failures(machine_mtbf_s=20_000.0), start_s=100.0)
    four = ReplicaKind("4xh100", replace(H100.roofline, count=4))
    day = Day((200.0,), Fixed(300), Fixed(60))
    one, of_four = (FleetSizing.of(kind, day, TARGETS, how) for kind in (H100, four))
    assert of_four.spare / of_four.replicas > one.spare / one.replicas


def test_targets_that_cannot_be_are_refused():
    for wrong in ({"ttft_s": 0}, {"stream_tok_s": -1}, {"refused": 1}):
        with pytest.raises(ConfigError, match="targets"):
            replace(TARGETS, **wrong)
