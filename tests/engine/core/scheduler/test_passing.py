"""Short prompts pass longer ones that came first, and these keep their share of the rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes import (
    FakeClock,
    boarding_order,
    make_core,
    make_request,
    solo,
    tokens_of,
    watch,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from jitney.engine.common.errors import RequestError
from jitney.engine.common.history import RequestRecords
from jitney.engine.common.requests import EngineRequest
from jitney.engine.common.trace import Arrival
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.passing import _SHARE, Passing
from jitney.engine.core.scheduler.plan import Plan, StepWork
from jitney.engine.lab.simulation.drive import Offer, drive
from jitney.engine.lab.simulation.engine_shape import EngineShape
from jitney.engine.lab.simulation.simulator import VirtualDevice, simulate
from jitney.engine.lab.simulation.step_table import Curve, StepTable

BUDGET = 16
#: Decode-only steps, and steps with prompts: 20 ms and a third of one for each row.
TABLE = StepTable(
    [Curve(rows, rows, ms / 1000) for rows, ms in ((1, 10), (4, 16), (16, 24), (32, 38))]
    + [Curve(rows, 32, 0.02, per_prompt=1 / 3000) for rows in (64, 128, 256, 512)]
)


def core_for(**options) -> EngineCore:
    """Room for everybody: eight seats, 16 rows a step, prompts of up to 200 tokens."""
    options = {"seats": 8, "pages": 2000, "budget": BUDGET, "context": 256, "eos": ()} | options
    return make_core(**options)


def steps_until(plans: list[Plan], name: str) -> int:
    """Number of the plan, from 1, that brings its first token."""
    return next(
        plan.number
        for plan in plans
        for chunk in plan.prompt_chunks
        if chunk.seq.request.id == name and chunk.sample
    )


@pytest.mark.parametrize("longs", [3, 12])
@pytest.mark.parametrize("order", ["fcfs", "priority", "fair", "shortest"])
def test_a_short_prompt_has_its_first_token_in_the_next_step(longs: int, order: str):
    core = core_for(order=order)
    plans = watch(core)
    for number in range(longs):
        core.add(make_request(f"long{number}", [number + 1] * 150, max_tokens=4, user="a"))
    core.step()
    core.add(make_request("short", [9] * 5, max_tokens=2, user="b"))
    outputs = core.run_until_idle(1000)
    assert steps_until(plans, "short") == 2
    for number in range(longs):
        request = make_request(f"long{number}", [number + 1] * 150, max_tokens=4, user="a")
        assert tokens_of(outputs, request.id) == solo(request, 0, 99, ())
    core.check()


def test_prompts_much_alike_go_in_the_order_in_which_they_came():
    core = core_for()
    plans = watch(core)
    for number, length in enumerate((40, 30, 25, 20)):
        core.add(make_request(f"r{number}", [number + 1] * length, max_tokens=2))
    core.run_until_idle()
    assert boarding_order(plans) == ["r0", "r1", "r2", "r3"]


def test_what_is_found_in_pages_makes_a_prompt_short():
    """120 tokens, all but a few of which an earlier turn has left in pages."""
    core = core_for()
    core.add(make_request("turn", [7] * 120, max_tokens=1))
    core.run_until_idle()
    plans = watch(core)
    core.add(make_request("long", [1] * 150, max_tokens=2))
    core.step()
    core.add(make_request("next", [7] * 120 + [8] * 3, max_tokens=2))
    core.run_until_idle()
    assert steps_until(plans, "next") < steps_until(plans, "long")


def test_no_prompt_passes_one_that_has_lost_its_seat():
    core = core_for(seats=2, budget=8)
    core.add(make_request("stream", [1] * 40, max_tokens=20))
    core.add(make_request("other", [2] * 40, max_tokens=20))
    for _ in range(12):
        core.step()
    state = core.scheduler.state
    for seq in list(state.seated):
        state.preempt(seq, 0.0)
    plans = watch(core)
    core.add(make_request("short", [9] * 2, max_tokens=1))
    core.run_until_idle()
    assert boarding_order(plans)[0] in ("stream", "other")
    core.check()


def test_no_prompt_passes_one_that_waits_for_pages():
    core = core_for(pages=41)
    plans = watch(core)
    core.add(make_request("stream", [1] * 60, max_tokens=60))
    core.add(make_request("big", [2] * 140, max_tokens=4))
    for number in range(20):
        core.step()
        core.add(make_request(f"s{number}", [number + 1] * 3, max_tokens=8))
    core.run_until_idle(1000)
    order = boarding_order(plans)
    assert order.index("big") < order.index("s19"), "short ones do not take its pages for ever"
    core.check()


def test_a_flood_of_short_prompts_leaves_a_long_one_its_rows():
    """Three of 3 rows come in every step, more than half of the budget."""
    core = core_for(seats=15)
    plans = watch(core)
    for number in range(2):
        core.add(make_request(f"long{number}", [number + 1] * 240, max_tokens=2))
    for number in range(60):
        core.step()
        for index in range(3):
            core.add(make_request(f"s{number}.{index}", [number + 3, 1, 2], max_tokens=1))
    core.run_until_idle(1000)
    done = steps_until(plans, "long1")
    taken = sum(plan.work.prompt for plan in plans[:done]) - 2 * 240
    assert taken <= 2 * BUDGET + _SHARE * (2 * 240 + taken), "what is left of the last step, too"
    assert done <= 1.2 * 2 * 240 / BUDGET + 2
    core.check()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 240), min_size=2, max_size=14),
    gaps=st.lists(st.integers(0, 3), min_size=14, max_size=14),
    seats=st.integers(1, 8),
    share=st.sampled_from([0.25, 1.0, "auto"]),
)
def test_no_prompt_starves(lengths: list[int], gaps: list[int], seats: int, share: float | str):
    """Whatever comes: all end with the tokens that they have alone; rows that pass are no more than
    the saved ones; and a prompt waits no longer than all rows before it and that share take.
    """
    core = core_for(seats=seats, prefill_share=share)
    plans = watch(core)
    passed: list[int] = []
    spend = core.scheduler._passing.spend

    def spending(rows: int, left: int) -> int:
        passed.append(rows)
        return spend(rows, left)

    core.scheduler._passing.spend = spending
    requests = [
        make_request(f"r{i}", [i + 1] * length, max_tokens=3) for i, length in enumerate(lengths)
    ]
    outputs = []
    for request, gap in zip(requests, gaps, strict=False):
        core.add(request)
        for _ in range(gap):
            outputs += core.step().outputs
            core.check()
    outputs += core.run_until_idle(2000)
    core.check()
    for request in requests:
        assert tokens_of(outputs, request.id) == solo(request, 0, 99, ())
    computed = sum(plan.work.prompt for plan in plans)
    assert computed == sum(lengths), "no row is computed twice"
    assert sum(passed) <= BUDGET + _SHARE * computed


@given(
    steps=st.lists(st.tuples(st.integers(0, 64), st.integers(1, 64)), max_size=60),
    start=st.integers(0, 59),
)
def test_over_any_steps_longer_prompts_keep_their_share(steps: list[tuple[int, int]], start: int):
    """Short ones take as much as they may in each step: over any stretch that is _SHARE of all rows
    and one step's.
    """
    passing = Passing(64)
    taken: list[int] = []
    for want, rows in steps:
        rows_passed = min(want, rows, passing.longest(10_000))
        left = passing.spend(rows_passed, rows - rows_passed)
        assert left >= min(rows_passed, rows - rows_passed)
        passing.save(rows)
        taken.append(rows_passed)
    rows = sum(rows for _, rows in steps[start:])
    assert sum(taken[start:]) <= 64 + _SHARE * rows + 1


def shape() -> EngineShape:
    limits = SchedulerLimits(32, 8192, 10**6, 10**9, prefill_share="auto")
    buckets = replace(Buckets.of(max_seats=32, token_budget=512), padding_is_free=True)
    return EngineShape(limits, buckets, 4097)


def test_on_a_clock_short_ones_come_soon_and_long_ones_lose_little():
    """Twelve prompts of 3,000 tokens, and four of 30 that come later: alone these take a step; they
    wait for the one that runs, the one that is planned and their own.
    """
    longs = [Arrival(0.0, 3000, 16)] * 12
    shorts = [Arrival(3.0 + 0.5 * number, 30, 16) for number in range(4)]
    alone = simulate(longs, shape(), TABLE).requests
    run = simulate([*longs, *shorts], shape(), TABLE).requests
    step = TABLE.seconds(shape().buckets.mixed[-1], StepWork(prompt=512))
    for record in run[12:]:
        assert record.first_token is not None
        assert record.first_token - record.arrival < 3 * step
    assert max(r.end for r in run[:12]) < 1.1 * max(r.end for r in alone)


def waits(arrivals: list[Arrival]) -> tuple[np.ndarray, np.ndarray]:
    """(predicted, real) seconds before boarding, of each request."""
    device = VirtualDevice(TABLE)
    core = device.new_core(shape())
    scheduler = core.scheduler
    told: list[float] = []

    def request_at(number: int, at: float) -> EngineRequest:
        request = arrivals[number].request(str(number), [0] * arrivals[number].n_prompt, at)
        leader = scheduler._admission.leader(request, scheduler._arrivals + 1)
        told.append(scheduler._entrance.predicted_wait.wait(leader))
        return request

    records = RequestRecords()
    drive(core, device.clock, Offer([a.at for a in arrivals], request_at), records, device.reported)
    return np.array(told), np.array([record.queue_s for record in records.oldest()])


LONG = [Arrival(9.0 + 0.5 * number, 3000, 64) for number in range(16)]
SHORTS = [Arrival(9.0 + 0.001 * number, 30, 48) for number in range(132)]
MIXED = [Arrival(a.at + 0.1 * i, 30, 48) for i, a in enumerate(LONG)]


@pytest.mark.parametrize(
    "load", [LONG, SHORTS, sorted(LONG + MIXED, key=lambda a: a.at)], ids=["long", "short", "mixed"]
)
def test_the_predicted_wait_is_within_a_third_of_the_real_one(load: list[Arrival]):
    warm = [Arrival(0.0, 3000, 48), *[Arrival(2.0, 30, 48)] * 32]
    predicted, real = waits([*warm, *load])
    waiting = real > 0.5
    assert waiting.sum() >= 10
    assert predicted[waiting].mean() == pytest.approx(real[waiting].mean(), rel=0.3)


def busy_core(clock: FakeClock, **limits) -> EngineCore:
    """Two of eight seats are taken by prompts of 200 tokens, 16 rows a step of 1 s."""
    core = core_for(clock=clock, **limits)
    fetch = core.runner.fetch

    def slow(launched: object):
        clock.now += 1.0
        return fetch(launched)

    core.runner.fetch = slow
    core.add(make_request("first", [5] * 30, max_tokens=1))
    core.run_until_idle()
    for number in range(2):
        core.add(make_request(f"long{number}", [number + 1] * 200, max_tokens=2))
    core.step()
    core.step()
    return core


def told(core: EngineCore, prompt: list[int]) -> float:
    newcomer = core.scheduler._admission.leader(make_request("newcomer", prompt), 10**6)
    return core.scheduler._entrance.predicted_wait.wait(newcomer)


def test_prompts_ahead_are_waited_for_though_seats_are_free():
    core = busy_core(FakeClock())
    assert core.scheduler.predicted_wait_s == pytest.approx(400 / BUDGET, abs=4)
    assert told(core, [9] * 200) == core.scheduler.predicted_wait_s
    assert told(core, [9] * 3) == 0.0, "a short one passes them"


def test_a_free_seat_is_no_way_around_the_longest_predicted_wait():
    core = busy_core(FakeClock(), max_predicted_wait_s=16.0)
    with pytest.raises(RequestError, match="s of waiting are ahead") as refused:
        core.scheduler.add(make_request("x", [9] * 200))
    assert refused.value.info.code == "queue_full"
    assert not core.scheduler.has_room(make_request("x", [9] * 200))
    core.scheduler.add(make_request("short", [9] * 3, max_tokens=1))
    core.run_until_idle(200)
    core.scheduler.add(make_request("idle", [9] * 200, max_tokens=1))


def test_a_deadline_before_the_prompts_ahead_are_computed_is_refused():
    core = busy_core(FakeClock())
    now = core.clock()
    late = make_request("late", [9] * 200, deadline=now + 8.0)
    with pytest.raises(RequestError) as refused:
        core.scheduler.add(late)
    assert refused.value.info.code == "deadline_unreachable"
    core.scheduler.add(make_request("short", [9] * 3, max_tokens=1, deadline=now + 8.0))
