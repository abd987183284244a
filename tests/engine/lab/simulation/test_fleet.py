"""Simulated fleets: nobody is lost, routers do what they are for, failures and scaling cost what
they should.
"""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.trace import Arrival
from jitney.engine.config.schema import EngineSection
from jitney.engine.core.measuring.engine_shape import EngineShape
from jitney.engine.lab.simulation.devices import DEVICES
from jitney.engine.lab.simulation.fleet import Failures, FleetPlan, FleetRun
from jitney.engine.lab.simulation.fleet_scaling import ScalingRule
from jitney.engine.lab.simulation.fleet_traffic import Day, LengthMeans, Recorded
from jitney.engine.lab.simulation.roofline import SHAPES, ModelCost, Roofline
from jitney.engine.lab.simulation.simulator import simulate
from jitney.engine.lab.simulation.workload import Conversations, Fixed, Poisson, Uniform

H100 = Roofline(ModelCost(SHAPES["llama-3.1-8b"]), DEVICES["h100"])
CHAT = Conversations(n_shared=128, turns=Uniform(4, 6), live=64)
DAY = Day((1.0,), Uniform(100, 900), Uniform(20, 300))


def engine(seats: int = 16, pages: int = 8000, **limits) -> EngineShape:
    settings = EngineSection(max_seats=seats, token_budget=1024)
    shape = EngineShape.of(settings, context_length=4096, pages=pages, on_device=True)
    return replace(shape, limits=replace(shape.limits, **limits))


def fleet(replicas: int = 4, **changes) -> FleetPlan:
    return FleetPlan(**({"engine": engine(), "table": H100, "replicas": replicas} | changes))


def check(run: FleetRun, requests: int) -> None:
    """Every request was served once, in order of time, or refused."""
    served = run.served
    assert len(served) + run.requests.count(None) == requests == len(run.arrivals)
    for request in served:
        assert request.arrival < (request.first_token or 0) <= request.end
        assert request.arrival == run.arrivals[request.number].at
    assert run.replica_s >= run.seconds


def took(run: FleetRun) -> list[float]:
    return [request.e2e_s or math.inf for request in run.served]


@pytest.mark.parametrize("router", ["round-robin", "least-wait", "prefix"])
def test_everybody_is_served_and_the_same_each_time(router: str):
    traffic = DAY.sample(40.0, 100, 1)
    run = fleet(router=router).simulate(traffic)
    check(run, 100)
    assert run.refused_share == 0 and run.figures()["output_tok_s"] > 0
    assert fleet(router=router).simulate(traffic).figures() == run.figures()


def test_one_replica_is_the_scheduler_itself():
    arrivals = DAY.sample(10.0, 150, 2)
    run = fleet(replicas=1).simulate(arrivals)
    alone = simulate(arrivals, engine(), H100)
    assert [request.end for request in run.served] == [request.end for request in alone.requests]


def test_the_least_wait_goes_round_who_is_slow():
    """Requests of very different lengths: taking turns gives some replica two long ones."""
    traffic = Day((1.0,), Fixed(200), Uniform(4, 1200)).sample(6.5, 300, 3)
    first = {}
    for router in ("round-robin", "least-wait"):
        run = fleet(router=router, engine=engine(seats=8)).simulate(traffic)
        first[router] = run.figures()["ttft_s"]["p99"]
    assert first["least-wait"] < 0.95 * first["round-robin"]


def test_least_wait_is_no_burst_to_one_replica():
    """Reports are up to a second old: without the requests sent since, all of them would go to the
    replica of the shortest reported wait.
    """
    traffic = Day((1.0,), Uniform(400, 1600), Fixed(30)).sample(120.0, 1200, 3)
    first = {}
    for router in ("least-wait", "prefix"):
        run = fleet(router=router, engine=engine(seats=64)).simulate(traffic)
        first[router] = run.figures()["ttft_s"]["p99"]
    assert first["least-wait"] < 1.6 * first["prefix"]


#: Replicas, pages of each, and conversations that are open at once. The first: 7 replicas, whose
#: memories hold all; by turns a conversation comes back to its replica one time in seven. The
#: second: two, which hold all conversations together, but not each of them all by itself.
_MEMORIES = {"seven, all fits": (7, 8000, 64), "two, half of it fits": (2, 300, 15)}


@pytest.mark.parametrize("case", _MEMORIES)
def test_prefixes_find_their_pages_again(case: str):
    """An odd number of conversations or of replicas: else the same ones would meet by turns too."""
    replicas, pages, live = _MEMORIES[case]
    talks = replace(CHAT, live=live)
    arrivals = talks.requests(300, Uniform(8, 80), Uniform(16, 160), Poisson(8.0 * replicas), 4)
    found = {}
    for router in ("round-robin", "prefix"):
        plan = fleet(replicas, engine=engine(pages=pages), router=router, prefix_cache=True)
        run = plan.simulate(arrivals)
        check(run, 300)
        found[router] = run.hit_rate
    assert found["prefix"] > 1.7 * found["round-robin"] > 0


def test_who_finds_every_replica_full_is_refused():
    """Two replicas, four times what they can do, and queues of 4."""
    traffic = DAY.sample(150.0, 600, 5)
    full = fleet(2, engine=engine(max_waiting_requests=4))
    run = full.simulate(traffic)
    check(run, 600)
    assert run.refused_share > 0.3
    waits = run.first_tokens()
    assert max(waits) < 10.0  # those that were let in did not wait long


def test_a_core_that_dies_loses_nobody_and_everybody_waits_for_the_next():
    traffic = DAY.sample(20.0, 600, 6)
    calm = fleet().simulate(traffic)
    dying = Failures(core_mtbf_s=40.0, core_recovery_s=8.0)
    run = fleet(failures=dying).simulate(traffic)
    check(run, 600)
    assert run.refused_share == 0 and run.core_failures > 1 and run.continued > 0
    assert max(np.subtract(took(run), took(calm))) > 7.5
    assert run.output_tokens == calm.output_tokens


def test_a_lost_machine_is_replaced_and_its_requests_begin_again():
    traffic = DAY.sample(20.0, 600, 7)
    outage = Failures(outage_at=20.0, outage_share=0.5, notice_s=3.0)
    run = fleet(failures=outage, start_s=10.0).simulate(traffic)
    check(run, 600)
    assert (run.machine_failures, run.started) == (2, 2)
    assert run.repeated > 0 and run.refused_share == 0
    assert max(took(run)) > 3.0


def test_a_prompt_that_is_computed_again_is_found_once():
    """Its machine is lost, and another one finds the shared beginning: no prompt has more tokens
    than it has.
    """
    talks = Conversations(n_shared=64, turns=Uniform(4, 8), live=40)
    arrivals = talks.requests(1500, Fixed(40), Fixed(40), Poisson(60.0), 1)
    outage = Failures(outage_at=20.0, outage_share=0.5, notice_s=1.0)
    run = fleet(failures=outage, prefix_cache=True, router="prefix").simulate(arrivals)
    assert run.repeated > 5
    assert all(request.cached_tokens < request.n_prompt for request in run.served)


def test_replicas_are_started_when_newcomers_would_wait_and_let_go_after_a_calm():
    busy, calm = DAY.sample(80.0, 1600, 8), DAY.sample(4.0, 200, 9)
    later = [msgspec.structs.replace(each, at=busy[-1].at + each.at) for each in calm]
    rule = ScalingRule(target_wait_s=0.5, every_s=2.0, calm_s=20.0)
    run = fleet(1, scaling=rule, start_s=5.0).simulate([*busy, *later])
    check(run, 1800)
    ready = [moment.ready for moment in run.moments]
    assert ready[0] == 1 and max(ready) >= 3 and ready[-1] < max(ready)
    assert run.replica_s < max(ready) * run.seconds


def test_the_rule_by_hand():
    rule = ScalingRule(target_wait_s=1.0, fill=0.5, least=2, most=20)
    assert rule.wanted(10, [0.0] * 10, 0.5) == 10
    assert rule.wanted(10, [0.0] * 10, 0.8) == 16
    assert rule.wanted(10, [0.0] * 10, 0.05) == 2
    assert rule.wanted(10, [0.0] * 9 + [9.0], 0.5) == 10  # one of ten is not the tenth beyond it
    assert rule.wanted(10, [9.0] * 10, 0.4) == 11
    assert rule.wanted(10, [9.0] * 10, 5.0) == 20
    late = replace(rule, fill=1.0)
    assert (late.wanted(10, [0.0] * 10, 0.99), late.wanted(10, [9.0] * 10, 1.3)) == (10, 13)


def test_replicas_that_start_count_for_those_that_wait():
    """The traffic grows fourfold at once and starts take long: what waits meanwhile asks for no
    more replicas than the traffic does in the end.
    """
    lengths = Fixed(64), Fixed(256)
    calm = Day((1.0,), *lengths).sample(3.0, 30, 1)
    busy = Day((1.0,), *lengths).sample(12.0, 300, 2)
    later = [msgspec.structs.replace(one, at=10.0 + one.at) for one in busy]
    rule = ScalingRule(least=2, every_s=3.0, calm_s=1000.0)
    plan = fleet(2, engine=engine(seats=4), scaling=rule, start_s=20.0)
    run = plan.simulate([*calm, *later])
    check(run, 330)
    assert run.first_tokens() and max(run.first_tokens()) > 5, "they did wait"
    assert max(moment.ready + moment.starting for moment in run.moments) < 20


def test_a_day_has_the_rate_of_each_hour():
    day = Day((2.0, 0.0, 10.0), Fixed(10), Fixed(5), hour_s=100.0)
    at = [arrival.at for arrival in day.whole(1)]
    counts = np.histogram(at, [0, 100, 200, 300])[0]
    assert counts[1] == 0 and counts[0] == pytest.approx(200, rel=0.3)
    assert counts[2] == pytest.approx(1000, rel=0.15) and sorted(at) == at
    assert LengthMeans.of(day.whole(1)) == LengthMeans(10, 5, 15)
    busiest = day.busiest(0.5, 10_000, 1)
    assert len(busiest) == 500 and busiest[-1].at == pytest.approx(100, rel=0.2)
    assert len(day.busiest(1.0, 10, 1)) == 10


def test_a_record_is_taken_as_it_was():
    """Two quiet minutes around a busy one."""
    at = np.concatenate((np.arange(0, 60, 6.0), np.arange(60, 120, 0.5), np.arange(120, 181, 6.0)))
    arrivals = [Arrival(t, n, 2 * n) for n, t in enumerate(at.tolist(), 1)]
    record = Recorded(arrivals)
    assert record.rates == pytest.approx((10 / 60, 2.0, 10 / 60, 1 / 60))
    assert record.busiest(1.0, 10_000, 1) == arrivals
    window = record.busiest(1.0, 50, 1)
    assert len(window) == 50 and window[0].at >= 60 and window[-1].at < 120
    assert 40 < len(record.busiest(0.5, 10_000, 1)) < 100
    sample = record.sample(4.0, 200, 1)
    assert all(each.n_output == 2 * each.n_prompt for each in sample)  # lengths stay together
    assert sample[-1].at == pytest.approx(50, rel=0.3)


def test_nonsense_is_refused_in_one_line():
    wrong = [
        lambda: fleet(replicas=0),
        lambda: Failures(core_mtbf_s=0),
        lambda: Failures(outage_share=2),
        lambda: Failures(core_recovery_s=math.inf),
        lambda: ScalingRule(fill=0),
        lambda: ScalingRule(every_s=0),
        lambda: Day((0.0,), Fixed(1), Fixed(1)),
        lambda: Day((1.0, -1.0), Fixed(1), Fixed(1)),
        lambda: Recorded(()),
        lambda: fleet().simulate([]),
    ]
    for make in wrong:
        with pytest.raises(ConfigError):
            make()
