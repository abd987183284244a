"""The fast model of a replica against the simulator that runs the scheduler itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from step_tables import constant_table

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.trace import Arrival
from jitney.engine.config.schema import EngineSection
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.lab.simulation.devices import DEVICES
from jitney.engine.lab.simulation.engine_shape import EngineShape
from jitney.engine.lab.simulation.fleet_replica import FleetRequest, ReplicaModel
from jitney.engine.lab.simulation.fleet_steps import StepCosts
from jitney.engine.lab.simulation.planner import Demand, Operating
from jitney.engine.lab.simulation.roofline import SHAPES, ModelCost, Roofline
from jitney.engine.lab.simulation.simulator import simulate
from jitney.engine.lab.simulation.step_table import StepTimes
from jitney.engine.lab.simulation.workload import (
    WORKLOADS,
    Gamma,
    Poisson,
    parse_lengths,
    synthesise,
)

H100 = Roofline(ModelCost(SHAPES["llama-3.1-8b"]), DEVICES["h100"])
V5E = Roofline(ModelCost(SHAPES["llama-3.1-8b"]), DEVICES["v5e"], count=4)
SECOND = constant_table(1.0)


def shape(pages: int = 20_000, seats: int = 64, budget: int = 1024) -> EngineShape:
    settings = EngineSection(
        max_seats=seats,
        token_budget=budget,
        max_waiting_requests=100_000,
        max_waiting_tokens=10**9,
        max_predicted_wait_s=0,
    )
    return EngineShape.of(settings, context_length=16_384, pages=pages, on_device=True)


def small(seats: int = 2, budget: int = 16, pages: int = 65) -> EngineShape:
    limits = SchedulerLimits(seats, 128)
    return EngineShape(limits, Buckets.of(max_seats=seats, token_budget=budget), pages, 4)


def model(engine: EngineShape, table: StepTimes, context: float = 8.0, **options) -> ReplicaModel:
    costs = StepCosts(engine.limits, engine.buckets, table, context)
    return ReplicaModel(engine, costs, **options)


def serve(replica: ReplicaModel, arrivals: Sequence[Arrival]) -> list[FleetRequest]:
    """All requests, in the order in which they came, at their end."""
    for number, arrival in enumerate(arrivals):
        request = FleetRequest(
            number,
            arrival.at,
            arrival.n_prompt,
            arrival.n_output,
            arrival.conversation,
            arrival.n_shared,
        )
        replica.advance(arrival.at)
        replica.offer(request, arrival.at)
    replica.finish()
    assert not replica.n_open
    return sorted(replica.take_finished(), key=lambda request: request.number)


def times_of(requests: Sequence[FleetRequest]) -> list[tuple[float, float]]:
    return [(request.first, request.end) for request in requests]


PROMPTS = "lognormal:mean=1500,sigma=0.8,min=64,max=8000", "lognormal:mean=150,sigma=0.7,max=600"
BURSTS = "lognormal:mean=512,sigma=0.6,min=16,max=4000", "lognormal:mean=256,sigma=0.7,max=1500"
#: Prompts, outputs, when they come.
KINDS: dict[str, tuple[str, str, Callable[[float], Poisson | Gamma]]] = {
    "short": (WORKLOADS["short"].prompt, WORKLOADS["short"].output, Poisson),
    "mixed": (WORKLOADS["mixed"].prompt, WORKLOADS["mixed"].output, Poisson),
    "long prompts": (*PROMPTS, Poisson),
    "bursts": (*BURSTS, lambda rate: Gamma(rate, 0.25)),
}


def traffic(kind: str, table: Roofline, load: float, count: int = 400) -> tuple[list[Arrival], int]:
    """Requests at a share of what the seats can serve, and their mean context."""
    prompt, output, pattern = KINDS[kind]
    lengths = parse_lengths(prompt, "--prompt"), parse_lengths(output, "--output")
    drawn = synthesise(count, *lengths, Poisson(1.0), 7)
    n_prompt = round(np.mean([arrival.n_prompt for arrival in drawn]))
    n_output = round(np.mean([arrival.n_output for arrival in drawn]))
    point = Operating.of(table, Demand(n_prompt, n_output, token_budget=1024), 64)
    arrivals = synthesise(count, *lengths, pattern(load * point.req_s), 7)
    return arrivals, n_prompt + n_output // 2


@pytest.mark.parametrize("table", [H100, V5E], ids=["h100", "v5e"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("load", [0.7, 1.1])
def test_figures_are_those_of_the_scheduler_itself(kind: str, table: Roofline, load: float):
    """Throughput within 1 %, the first token within 7 % (p50) and 8 % (p99 of 400: the fourth).

    The scheduler learns its step times first, and the model has them.
    """
    arrivals, context = traffic(kind, table, load)
    figures = simulate(arrivals, shape(), table).figures()
    served = serve(model(shape(), table, context), arrivals)
    seconds = max(request.end for request in served) - arrivals[0].at
    tokens = sum(request.n_output for request in served)
    assert tokens / seconds == pytest.approx(figures["output_tok_s"], rel=0.01)
    waits = [request.first - request.at for request in served]
    for name, percent, within in (("p50", 50, 0.07), ("p99", 99, 0.08)):
        wait = np.percentile(waits, percent)
        assert wait == pytest.approx(figures["ttft_s"][name], rel=within)


def test_short_pages_cost_throughput_as_they_do_in_the_scheduler():
    """Pages for a third of the seats: throughput within 3 %."""
    arrivals, context = traffic("mixed", H100, 1.2)
    tight = shape(pages=600)
    figures = simulate(arrivals, tight, H100).figures()
    served = serve(model(tight, H100, context), arrivals)
    seconds = max(request.end for request in served) - arrivals[0].at
    tokens = sum(request.n_output for request in served)
    assert tokens / seconds == pytest.approx(figures["output_tok_s"], rel=0.03)
    free = simulate(arrivals, shape(), H100).figures()
    assert figures["output_tok_s"] < 0.9 * free["output_tok_s"]  # they were short indeed


def test_requests_by_hand():
    """As in the simulator's own tests: the third boards when the first one's seat is free."""
    arrivals = [Arrival(0.0, 3, 2), Arrival(0.0, 3, 4), Arrival(0.0, 3, 2)]
    assert times_of(serve(model(small(), SECOND), arrivals)) == [(1, 2), (1, 4), (3, 4)]
    late = [Arrival(0.0, 4, 8), Arrival(0.5, 3, 2)]
    assert times_of(serve(model(small(), SECOND), late)) == [(1, 8), (3, 4)]
    apart = [Arrival(3.0, 4, 1), Arrival(20.0, 4, 2)]
    assert times_of(serve(model(small(), SECOND), apart)) == [(4, 4), (21, 22)]


def test_looking_at_it_changes_nothing():
    """Leaps that are cut short by looks end where the whole ones do."""
    arrivals, context = traffic("mixed", H100, 0.9, 100)
    whole = serve(model(shape(), H100, context), arrivals)
    looked_at = model(shape(), H100, context)
    moments = np.arange(0.0, arrivals[-1].at, 0.003).tolist()
    at = 0
    for number, arrival in enumerate(arrivals):
        while at < len(moments) and moments[at] < arrival.at:
            looked_at.advance(moments[at])
            at += 1
        looked_at.advance(arrival.at)
        request = FleetRequest(number, arrival.at, arrival.n_prompt, arrival.n_output)
        looked_at.offer(request, arrival.at)
    looked_at.finish()
    ends = {request.number: request.end for request in looked_at.take_finished()}
    assert [ends[request.number] for request in whole] == pytest.approx(
        [request.end for request in whole], rel=1e-6
    )


def test_a_turn_finds_the_prompt_of_the_one_before_it():
    turns = [
        Arrival(0.0, 9, 2, conversation=1, n_shared=4),
        Arrival(50.0, 12, 2, conversation=1, n_shared=4),
        Arrival(100.0, 12, 2, conversation=2, n_shared=4),
        Arrival(150.0, 12, 2),
    ]
    found = [
        request.n_cached for request in serve(model(small(), SECOND, prefix_cache=True), turns)
    ]
    assert found == [0, 8, 4, 0]  # whole pages of four
    assert not any(r.n_cached for r in serve(model(small(), SECOND), turns))


def test_what_stays_behind_gives_way_to_who_rides():
    """Room for 16 tokens: the second conversation takes the place of the first one."""
    turns = [Arrival(20.0 * n, 10, 2, conversation=n % 2 + 1) for n in range(4)]
    tight = small(pages=5)
    assert [r.n_cached for r in serve(model(tight, SECOND, prefix_cache=True), turns)] == [0] * 4
    room = small(pages=9)
    assert [r.n_cached for r in serve(model(room, SECOND, prefix_cache=True), turns)] == [
        0,
        0,
        8,
        8,
    ]


def test_the_next_core_goes_on_where_the_one_before_it_died():
    replica = model(small(), SECOND)
    request = FleetRequest(0, 0.0, 2, 8)
    replica.offer(request, 0.0)
    replica.advance(3.5)
    left = replica.stop(3.5)
    assert left == [request] and 3 <= request.n_done <= 6 and not replica.n_open
    replica.resume(left, 20.0)
    replica.finish()
    assert replica.take_finished() == [request] and request.first == 1.0
    assert request.end == 20.0 + request.n_left  # one step for all that is known


def test_the_predicted_wait_is_the_wait():
    """Two seats for 10 more steps, and one in the queue: the next one waits for the second."""
    replica = model(small(), SECOND)
    assert replica.predicted_wait() == 0.0
    for number, n_output in enumerate((11, 15, 4)):
        replica.offer(FleetRequest(number, 0.0, 3, n_output), 0.0)
    replica.advance(0.5)
    foreseen = replica.predicted_wait()
    request = FleetRequest(9, 0.5, 3, 1)
    replica.offer(request, 0.5)
    replica.finish()
    assert foreseen == pytest.approx(request.first - 2.0, abs=2.0)


def test_a_full_queue_refuses():
    engine = small()
    engine = replace(engine, limits=replace(engine.limits, max_waiting_requests=1))
    replica = model(engine, SECOND)
    request = FleetRequest(9, 0.0, 3, 5)
    for number in range(3):
        assert not replica.refuses(request, 0.0)
        replica.offer(FleetRequest(number, 0.0, 3, 5), 0.0)
        replica.advance(0.1)
    assert replica.refuses(request, 0.0)
    patient = replace(engine.limits, max_waiting_requests=9, max_predicted_wait_s=2.0)
    replica.engine = replace(engine, limits=patient)
    assert replica.refuses(request, 3.0) and not replica.refuses(request, 1.0)


def test_a_thousand_requests_of_a_conversation_take_no_room_twice():
    arrivals = WORKLOADS["chat"].arrivals(1000, Poisson(20.0), 3)
    replica = model(shape(pages=1000), H100, 300.0, prefix_cache=True)
    served = serve(replica, arrivals)
    found = sum(request.n_cached for request in served)
    asked = sum(request.n_prompt for request in served)
    assert 0.2 < found / asked < 0.95
    assert not any(math.isnan(request.end) for request in served)


def test_what_the_rules_do_not_know_is_refused():
    for limits in ({"policy": "static"}, {"order": "fair"}, {"target_itl_ms": 10.0}):
        engine = small()
        engine = replace(engine, limits=replace(engine.limits, **limits))
        with pytest.raises(ConfigError, match="simulated"):
            model(engine, SECOND)
