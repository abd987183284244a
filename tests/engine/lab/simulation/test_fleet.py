"""Simulated fleets: nobody is lost, routers do what they are for, failures and scaling cost what
they should.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from jitney.engine.common.errors import ConfigError
from jitney.engine.config.schema import EngineSection
from jitney.engine.lab.simulation.devices import DEVICES
from jitney.engine.lab.simulation.engine_shape import EngineShape
from jitney.engine.lab.simulation.fleet import Failures, FleetPlan, FleetRun
from jitney.engine.lab.simulation.fleet_replica import FleetRequest, ReplicaModel
from jitney.engine.lab.simulation.fleet_routing import SimulatedIngress
from jitney.engine.lab.simulation.fleet_scaling import ScalingRule
from jitney.engine.lab.simulation.fleet_steps import StepCosts
from jitney.engine.lab.simulation.fleet_traffic import Day, Recorded, Traffic
from jitney.engine.lab.simulation.roofline import SHAPES, ModelCost, Roofline
from jitney.engine.lab.simulation.workload import WORKLOADS, Conversations, Fixed, Poisson, Uniform

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
    """Everybody was served once, in order of time, or refused."""
    assert run.served + run.refused == requests == len(run.traffic)
    served = ~np.isnan(run.end)
    assert (run.first[served] > run.traffic.at[served]).all()
    assert (run.end[served] >= run.first[served]).all()
    assert run.replica_s >= run.seconds


@pytest.mark.parametrize("router", SimulatedIngress.ROUTERS)
def test_everybody_is_served_and_the_same_each_time(router: str):
    traffic = DAY.sample(40.0, 1500, 1)
    run = fleet(router=router).simulate(traffic)
    check(run, 1500)
    assert run.refused == 0 and run.figures()["output_tok_s"] > 0
    assert fleet(router=router).simulate(traffic).figures() == run.figures()


def test_one_replica_is_the_model_of_a_replica():
    traffic = DAY.sample(10.0, 300, 2)
    run = fleet(replicas=1).simulate(traffic)
    shape = engine()
    alone = ReplicaModel(shape, StepCosts(shape.limits, shape.buckets, H100, traffic.mean_context))
    for request in traffic.requests():
        alone.advance(request.at)
        alone.offer(request, request.at)
    alone.finish()
    ends = {request.number: request.end for request in alone.take_finished()}
    assert run.end.tolist() == pytest.approx([ends[number] for number in range(300)], rel=1e-6)


def test_the_least_wait_goes_round_who_is_slow():
    """Requests of very different lengths: taking turns gives some replica two long ones."""
    traffic = Day((1.0,), Fixed(200), Uniform(4, 1200)).sample(6.5, 2000, 3)
    first = {}
    for router in ("round-robin", "least-wait"):
        run = fleet(router=router, engine=engine(seats=8)).simulate(traffic)
        first[router] = run.figures()["ttft_s"]["p99"]
    assert first["least-wait"] < 0.8 * first["round-robin"]


#: Replicas, pages of each, and conversations that are open at once. The first: 7 replicas, whose
#: memories hold all; by turns a conversation comes back to its replica one time in seven. The
#: second: two, which hold all conversations together, but not each of them all by itself.
_MEMORIES = {"seven, all fits": (7, 8000, 64), "two, half of it fits": (2, 300, 15)}


@pytest.mark.parametrize("case", _MEMORIES)
def test_prefixes_find_their_pages_again(case: str):
    """An odd number of conversations or of replicas: else the same ones would meet by turns too."""
    replicas, pages, live = _MEMORIES[case]
    talks = replace(CHAT, live=live)
    arrivals = talks.requests(2000, Uniform(8, 80), Uniform(16, 160), Poisson(8.0 * replicas), 4)
    traffic = Traffic.of(arrivals)
    found = {}
    for router in ("round-robin", "prefix"):
        plan = fleet(replicas, engine=engine(pages=pages), router=router, prefix_cache=True)
        run = plan.simulate(traffic)
        check(run, 2000)
        found[router] = run.hit_rate
    assert found["prefix"] > 1.7 * found["round-robin"] > 0


def test_who_finds_every_replica_full_is_refused():
    """Two replicas, four times what they can do, and queues of 4."""
    traffic = DAY.sample(150.0, 1500, 5)
    full = fleet(2, engine=engine(max_waiting_requests=4))
    run = full.simulate(traffic)
    check(run, 1500)
    assert run.refused_share > 0.3
    waits = run.first_tokens()
    assert waits.max() < 10.0  # those that were let in did not wait long


def test_a_core_that_dies_loses_nobody_and_everybody_waits_for_the_next():
    traffic = DAY.sample(20.0, 1200, 6)
    calm = fleet().simulate(traffic)
    dying = Failures(core_mtbf_s=60.0, core_recovery_s=8.0)
    run = fleet(failures=dying).simulate(traffic)
    check(run, 1200)
    assert run.refused == 0 and run.core_failures > 1 and run.continued > 0
    took, before = run.end - traffic.at, calm.end - traffic.at
    assert (took - before).max() > 7.5
    assert run.output_tokens == calm.output_tokens


def test_a_lost_machine_is_replaced_and_its_requests_begin_again():
    traffic = DAY.sample(20.0, 1200, 7)
    outage = Failures(outage_at=20.0, outage_share=0.5, notice_s=3.0)
    run = fleet(failures=outage, start_s=10.0).simulate(traffic)
    check(run, 1200)
    assert (run.machine_failures, run.started) == (2, 2)
    assert run.repeated > 0 and run.refused == 0
    took = run.end - traffic.at
    assert took.max() > 3.0


def test_a_prompt_that_is_computed_again_is_found_once():
    """Its machine is lost, and another one finds the shared beginning: no prompt has more tokens
    than it has.
    """
    talks = Conversations(n_shared=64, turns=Uniform(4, 8), live=40)
    arrivals = talks.requests(3000, Fixed(40), Fixed(40), Poisson(60.0), 1)
    traffic = Traffic.of(arrivals)
    outage = Failures(outage_at=20.0, outage_share=0.5, notice_s=1.0)
    run = fleet(failures=outage, prefix_cache=True, router="prefix").simulate(traffic)
    assert run.repeated > 5
    assert (run.cached < traffic.prompt).all()


def test_replicas_are_started_when_newcomers_would_wait_and_let_go_after_a_calm():
    busy, calm = DAY.sample(80.0, 4800, 8), DAY.sample(4.0, 500, 9)
    at = np.concatenate((busy.at, busy.at[-1] + calm.at))
    prompt = np.concatenate((busy.prompt, calm.prompt))
    output = np.concatenate((busy.output, calm.output))
    nobody = np.zeros(len(at), np.int64)
    traffic = Traffic(at, prompt, output, nobody, nobody)
    rule = ScalingRule(target_wait_s=0.5, every_s=2.0, calm_s=20.0)
    run = fleet(1, scaling=rule, start_s=5.0).simulate(traffic)
    check(run, 5300)
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


def test_a_lull_does_not_cost_a_start():
    scaler = ScalingRule(fill=0.5, every_s=10.0, calm_s=30.0).scaler()
    fills = [0.5, 0.1, 0.1, 0.1, 0.1, 0.1]
    moves = [scaler.change(10.0 * n, 10, 0, [0.0] * 10, fill) for n, fill in enumerate(fills)]
    assert moves == [0, 0, 0, 0, -8, -8]
    assert scaler.change(60.0, 10, 3, [5.0] * 10, 0.9) == 5  # three are on their way


def test_an_ingress_sends_who_is_full_to_the_next():
    ingress = SimulatedIngress("least-wait", 8)
    ingress.set_replicas(["a", "b"])
    request = FleetRequest(0, 0.0, 1, 1)
    assert list(ingress.order(request)) == ["a", "b"]
    ingress.given("a", request)
    assert list(ingress.order(request)) == ["b", "a"]
    ingress.refused("b")
    assert list(ingress.order(request)) == ["a", "b"]
    ingress.looked_at("b", 0.0, 0.0)
    assert next(iter(ingress.order(request))) == "b" and ingress.total == 1


def test_shapes_of_a_day():
    day = Day((2.0, 0.0, 10.0), Fixed(10), Fixed(5), hour_s=100.0)
    traffic = day.whole(1)
    counts = np.histogram(traffic.at, [0, 100, 200, 300])[0]
    assert counts[1] == 0 and counts[0] == pytest.approx(200, rel=0.3)
    assert counts[2] == pytest.approx(1000, rel=0.15) and (np.diff(traffic.at) >= 0).all()
    assert (traffic.mean_prompt, traffic.mean_context, traffic.longest) == (10, 12.5, 15)
    assert len(traffic.between(200, 300)) == counts[2]
    busiest = day.busiest(0.5, 10_000, 1)
    assert len(busiest) == 500 and busiest.seconds == pytest.approx(100, rel=0.2)
    assert len(day.busiest(1.0, 10, 1)) == 10


def test_a_record_is_taken_as_it_was():
    """Two quiet minutes around a busy one."""
    at = np.concatenate((np.arange(0, 60, 6.0), np.arange(60, 120, 0.5), np.arange(120, 181, 6.0)))
    lengths = np.arange(1, len(at) + 1)
    nobody = np.zeros(len(at), np.int64)
    record = Recorded(Traffic(at, lengths, lengths * 2, nobody, nobody))
    assert record.rates == pytest.approx((10 / 60, 2.0, 10 / 60, 1 / 60))
    assert record.busiest(1.0, 10_000, 1).at.tolist() == at.tolist()
    window = record.busiest(1.0, 50, 1)
    assert len(window) == 50 and window.at[0] >= 60 and window.at[-1] < 120
    assert 40 < len(record.busiest(0.5, 10_000, 1)) < 100
    sample = record.sample(4.0, 200, 1)
    assert (sample.output == 2 * sample.prompt).all()  # lengths stay together
    assert sample.seconds == pytest.approx(50, rel=0.3)


def test_a_share_of_the_traffic_has_whole_conversations():
    traffic = Traffic.of(WORKLOADS["chat"].arrivals(1000, Poisson(1.0), 1))
    part = traffic.thinned(0.3, 1)
    for conversation in set(part.conversation.tolist()):
        turns = np.count_nonzero(traffic.conversation == conversation)
        assert np.count_nonzero(part.conversation == conversation) == turns
    assert len(part) == pytest.approx(300, rel=0.3)


def test_nonsense_is_refused_in_one_line():
    wrong = [
        lambda: fleet(replicas=0),
        lambda: Failures(core_mtbf_s=0),
        lambda: Failures(outage_share=2),
        lambda: Failures(core_recovery_s=math.inf),
        lambda: ScalingRule(fill=0),
        lambda: ScalingRule(every_s=0),
        lambda: SimulatedIngress("best", 1),
        lambda: Day((0.0,), Fixed(1), Fixed(1)),
        lambda: Day((1.0, -1.0), Fixed(1), Fixed(1)),
        lambda: Traffic.of([]),
    ]
    for make in wrong:
        with pytest.raises(ConfigError):
            make()
