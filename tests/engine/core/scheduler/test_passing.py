"""Short prompts pass longer ones that came first, and these keep their share of the rows."""

from __future__ import annotations

import math
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
from jitney.engine.core.measuring.engine_shape import EngineShape
from jitney.engine.core.measuring.virtual import StepTimes, VirtualDevice, _FlyingStep
from jitney.engine.core.scheduler.buckets import Bucket, Buckets
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.passing import _LONGER_SHARE, _PRICE, _SHARE, Passing
from jitney.engine.core.scheduler.plan import Plan
from jitney.engine.core.scheduler.prefill_budget import PrefillBudget
from jitney.engine.core.scheduler.step_times import StepTimeEstimate
from jitney.engine.lab.simulation.devices import DEVICES
from jitney.engine.lab.simulation.drive import Offer, drive
from jitney.engine.lab.simulation.roofline import SHAPES, ModelCost, Roofline
from jitney.engine.lab.simulation.simulator import simulate
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
    assert [chunk.seq.request.id for chunk in plans[1].prompt_chunks] == ["short"]
    assert plans[2].work.prompt == BUDGET - plans[2].n_decode
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
    sequences = core.scheduler.sequences
    for seq in sequences.seats.taken:
        sequences.preempt(seq, 0.0)
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
    share = _SHARE + _LONGER_SHARE
    assert taken <= 2 * BUDGET + share * (2 * 240 + taken), "what is left of the last step, too"
    # In rows, with those that a step costs whatever its own: as many as in 1.3 times full steps.
    cost = taken + 2 * 240 + done * _PRICE * BUDGET
    assert cost <= (1.3 * 2 * 240 / BUDGET + 2) * (1 + _PRICE) * BUDGET
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
    passed: list[int] = [0]
    pay = core.scheduler._planner._passing.pay

    def paying(rows: int) -> None:
        passed.append(rows)
        pay(rows)

    core.scheduler._planner._passing.pay = paying
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
    assert sum(passed) <= BUDGET + max(passed) + (_SHARE + _LONGER_SHARE) * computed


@given(
    steps=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 64)), max_size=60),
    start=st.integers(0, 59),
)
def test_over_any_steps_longer_prompts_keep_their_share(steps: list[tuple[int, int]], start: int):
    """Short ones of any length pass when they may, and get steps of their own: over any stretch
    that is both shares of all rows, one step's and the longest prompt's.
    """
    passing = Passing(64)
    taken: list[float] = []
    for want, rows in steps:
        passes = want <= passing.longest(10_000)
        if passes:
            passing.pay(want)
        left = passing.left_to_others(rows) if passes else rows
        assert left in (0, rows)
        passing.save(rows)
        taken.append(want * passes + (0 if left else _PRICE * 64))
    rows = sum(rows for _, rows in steps[start:])
    longest = max((want for want, _ in steps), default=0)
    assert sum(taken[start:]) <= 64 + longest + (_SHARE + _LONGER_SHARE) * rows + 1


def test_steps_are_brief_while_short_prompts_are_expected(monkeypatch: pytest.MonkeyPatch):
    """10 ms and 10 ms a row; they are expected for ten seconds."""
    clock = FakeClock()
    core = core_for(clock=clock)
    buckets = core.scheduler.buckets
    free = replace(buckets, padding_is_free=True)
    core.scheduler._planner._buckets = core.scheduler.step_times.buckets = free
    times = core.scheduler.step_times
    times.observe(buckets.decode[0], 0.01)
    times.observe(buckets.mixed[-1], 0.17)
    monkeypatch.setattr(core.scheduler, "observe", lambda *_: None)
    brief = core.scheduler._planner._prefill_budget.brief(0)
    assert 16 / 0.17 > brief / (0.01 + 0.01 * brief) >= 0.92 * 16 / 0.17 and brief < 16
    plans = watch(core)
    core.add(make_request("long0", [1] * 200, max_tokens=1))
    core.step()
    assert plans[-1].work.prompt == BUDGET, "no short prompt has come"
    core.add(make_request("short", [9] * 2, max_tokens=1))
    core.step()
    core.step()
    assert plans[-1].work.prompt == brief
    clock.now += 11.0
    core.step()
    assert plans[-1].work.prompt == BUDGET - plans[-1].n_decode
    core.check()


def test_brief_steps_are_those_of_a_bucket_where_padding_costs():
    """Half the rows take 0.52 of the time, a quarter 0.4: that loses too much."""
    buckets = Buckets((Bucket(4, 4),), (Bucket(64, 4), Bucket(128, 4), Bucket(256, 4)))
    times = StepTimeEstimate(buckets)
    budget = PrefillBudget(times, 1.0, 0.0)
    assert budget.brief(2) == 254, "nothing was measured"
    for tokens, seconds in 3 * ((256, 0.100), (128, 0.052), (64, 0.040)):
        times.observe(Bucket(tokens, 4), seconds)
    assert budget.brief(2) == 126


def test_a_brief_step_is_found_between_the_shortest_and_the_fullest():
    """Steps of an H100: 64 rows take nearly as long as 256, and 256 are computed as fast as 2,048.
    Only the outermost were seen, as where prompts of 20 tokens come beside long ones.
    """
    sizes = {64: 0.0059, 256: 0.0063, 512: 0.0128, 1024: 0.0248, 2048: 0.0497}
    buckets = Buckets((Bucket(4, 4),), tuple(Bucket(tokens, 4) for tokens in sizes))
    times = StepTimeEstimate(buckets)
    budget = PrefillBudget(times, 1.0, 0.0)
    for tokens in (64, 2048):
        times.observe(Bucket(tokens, 4), sizes[tokens])
    rows = 2048
    for _ in range(4):
        rows = budget.brief(0)
        times.observe(Bucket(rows, 4), sizes[rows])
    assert rows == 256


def test_brief_steps_far_into_a_prompt_take_about_as_long_as_at_its_start():
    """8 ms and 0.3 for each row; where 8,000 positions are attended to, 0.16 ms a row more."""
    buckets = Buckets((Bucket(4, 4),), (Bucket(512, 4),), padding_is_free=True)
    times = StepTimeEstimate(buckets)
    budget = PrefillBudget(times, 1.0, 0.0)
    times.observe(Bucket(4, 4), 0.008)
    for start in (0, 4000, 8000) * 5:
        pairs = 512 * (start + 256)
        times.observe(Bucket(512, 4), 0.008 + 512 * 3e-4 + 2e-8 * pairs, pairs)

    def seconds(start: int) -> float:
        rows = budget.brief(0, start)
        return 0.008 + rows * (3e-4 + 2e-8 * (start + rows / 2))

    assert budget.brief(0, 8000) < 0.9 * budget.brief(0)
    assert seconds(8000) == pytest.approx(seconds(0), rel=0.2)


#: A CPU's steps: 8.5 ms, and 0.245 for each prompt row, 0.25 for each that decodes.
CPU_TABLE = StepTable(
    [Curve(rows, rows, ms / 1000) for rows, ms in ((1, 8.5), (4, 9), (8, 10), (16, 12.5), (32, 17))]
    + [
        Curve(rows, 32, 0.0085, per_prompt=2.45e-4, per_pair=2.5e-8, per_decode=2.5e-4)
        for rows in (64, 128, 256, 512)
    ]
)


def shape(*, late: bool = False) -> EngineShape:
    limits = SchedulerLimits(32, 8192, 10**6, 10**9, prefill_share="auto")
    buckets = replace(Buckets.of(max_seats=32, token_budget=512), padding_is_free=True)
    return EngineShape(limits, buckets, 4097, plans_late=late)


def h100_shape() -> EngineShape:
    limits = SchedulerLimits(256, 32768, 10**6, 10**9, prefill_share="auto")
    return EngineShape(
        limits, Buckets.of(max_seats=256, token_budget=2048, on_device=True), 6062, 64
    )


@pytest.mark.parametrize(
    ("engine", "table", "long", "median", "late"),
    [
        (shape(late=True), CPU_TABLE, 2300, 4.6, 7.0),
        (
            h100_shape(),
            Roofline(ModelCost(SHAPES["llama-3.1-8b"]), DEVICES["h100"]),
            16000,
            3.2,
            4.5,
        ),
    ],
    ids=["cpu", "h100"],
)
def test_short_prompts_come_at_random_beside_forty_long_ones(
    engine: EngineShape, table: StepTimes, long: int, median: float, late: float
):
    """Two come in a second, but for the first: the median and the 95th percentile of their first
    tokens, by what it is alone. No long one loses more than a tenth.
    """
    longs = [Arrival(20.0, long, 16)] * 40
    before = [Arrival(1.0 * number, 20 + 300 * number, 16) for number in range(8)]
    at = 20.0 + np.cumsum(np.random.default_rng(1).exponential(0.5, 60))
    shorts = [Arrival(float(one), 20, 16) for one in at if one < 36.0]
    without = simulate([*before, *longs], engine, table).requests
    run = simulate(sorted([*before, *longs, *shorts], key=lambda one: one.at), engine, table)
    waits = [one.ttft_s or 0.0 for one in run.requests if one.n_prompt == 20][2:]
    alone = without[0].ttft_s or 0.0
    assert len(waits) > 25 and alone > 0
    assert np.median(waits) < median * alone and np.percentile(waits, 95) < late * alone
    ends = [max(one.end for one in of) - 20.0 for of in (run.requests, without)]
    assert ends[0] < 1.1 * ends[1]


@pytest.mark.parametrize("budgets", [0.9, 1.2, 2, 4])
@pytest.mark.parametrize(
    ("engine", "table", "long"),
    [
        (shape(late=True), CPU_TABLE, 6000),
        (h100_shape(), Roofline(ModelCost(SHAPES["llama-3.1-8b"]), DEVICES["h100"]), 24000),
    ],
    ids=["cpu", "h100"],
)
def test_a_short_prompt_may_have_more_rows_than_a_step(
    engine: EngineShape, table: StepTimes, long: int, budgets: float
):
    """Behind twelve longer ones its first token comes within three times its time alone."""
    rows = int(budgets * engine.buckets.token_budget)
    before = [Arrival(float(second), 100, 8) for second in range(8)]
    longs = [Arrival(20.0, long, 16)] * 12
    alone = simulate([*before, Arrival(20.5, rows, 8)], engine, table).requests
    beside = simulate([*before, *longs, Arrival(20.5, rows, 8)], engine, table).requests
    first, expected = (
        next(one.ttft_s or 0.0 for one in of if one.n_prompt == rows) for of in (beside, alone)
    )
    assert 0 < first < 3 * expected


def test_a_step_is_planned_late_for_a_short_prompt_behind_more_than_there_are_seats():
    """Ten prompts wait for six free seats, but a short one would pass them."""
    core = core_for()
    core.add(make_request("short", [9] * 2, max_tokens=1))
    core.run_until_idle()
    for number in range(12):
        core.add(make_request(f"long{number}", [number + 1] * 150, max_tokens=4))
    core.step()
    sequences = core.scheduler.sequences
    assert len(sequences.live.queue.waiting) > len(sequences.seats.free)
    assert core.scheduler.has_place


class PausingDevice(VirtualDevice):
    """A device on which the first step after `pause_at` seconds takes three more."""

    pause_at = math.inf

    def launch(self, batch: Plan) -> _FlyingStep:
        step = super().launch(batch)
        if step.ready > self.pause_at:
            self.pause_at = math.inf
            self._free_at += 3.0
            step.ready += 3.0
        return step


def waits(arrivals: list[Arrival], pause_at: float = math.inf) -> tuple[np.ndarray, np.ndarray]:
    """(predicted, real) seconds before boarding, of each request."""
    device = PausingDevice(TABLE)
    device.pause_at = pause_at
    core = device.new_core(shape())
    scheduler = core.scheduler
    told: list[float] = []

    def request_at(number: int, at: float) -> EngineRequest:
        request = arrivals[number].request(str(number), [0] * arrivals[number].n_prompt, at)
        leader = scheduler.factory.leader(request, scheduler._arrivals + 1)
        told.append(scheduler._admission.predicted_wait.wait(leader))
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
    newcomer = core.scheduler.factory.leader(make_request("newcomer", prompt), 10**6)
    return core.scheduler._admission.predicted_wait.wait(newcomer)


def test_prompts_ahead_are_waited_for_though_seats_are_free():
    core = busy_core(FakeClock())
    assert core.scheduler.predicted_wait_s == pytest.approx(400 / BUDGET, abs=4)
    assert told(core, [9] * 200) == core.scheduler.predicted_wait_s
    assert told(core, [9] * 3) == 0.0, "a short one passes them"


def test_long_prompts_are_not_refused_for_the_time_of_a_few_short_ones():
    """Twelve come after two of 20 tokens; a step's fixed time is most of what those took."""
    before = [Arrival(float(second), 20, 8) for second in range(2)]
    told, real = waits([*before, *[Arrival(4.0, 2300, 8)] * 12])
    assert told[-1] < 1.3 * real[-1]


def test_long_prompts_are_not_refused_after_a_pause_of_the_machine():
    """A second before them, among short steps, it did nothing for three seconds."""
    before = [Arrival(0.4 * number, 20, 8) for number in range(24)]
    told, real = waits([*before, *[Arrival(10.0, 2300, 8)] * 12], pause_at=9.0)
    assert told[-1] < 1.3 * real[-1]


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
