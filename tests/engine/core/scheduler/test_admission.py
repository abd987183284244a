"""What is foreseen and promised: step times, answer lengths, waits, and the prompt rows that
streams can bear.
"""

from __future__ import annotations

import gc
import math
import random
import sys
from collections import deque
from dataclasses import replace
from itertools import count
from types import FrameType

import msgspec
import pytest
from fakes import FakeClock, device_of, ends_of, make_core, make_request, picture, watch

from jitney.engine.common.errors import ConfigError, RequestError
from jitney.engine.common.lengths import FIRST_GUESS, LengthEstimate, RequestClasses
from jitney.engine.config.schema import EngineSection
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.scheduler.admission.predicted_wait import _Endings
from jitney.engine.core.scheduler.buckets import Bucket, Buckets
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.plan import StepResult
from jitney.engine.core.scheduler.policies import _ORDERS
from jitney.engine.core.scheduler.prefill_budget import _PATIENCE, PrefillBudget
from jitney.engine.core.scheduler.step_times import _KEPT, StepTimeEstimate

BUCKETS = Buckets.of(max_seats=16, token_budget=256)  # mixed: 32, 64, 128, 256 rows


def step_times_of(**seconds: float) -> StepTimeEstimate:
    """An estimate that has seen three steps of each of these mixed buckets: m64=0.1."""
    step_times = StepTimeEstimate(BUCKETS)
    for name, value in seconds.items():
        for _ in range(3):
            step_times.observe(Bucket(int(name[1:]), 16), value)
    return step_times


def test_a_disturbed_step_does_not_change_the_pace():
    step_times = step_times_of(m64=0.1)
    for _ in range(4):
        step_times.observe(Bucket(64, 16), 0.11)
    step_times.observe(Bucket(64, 16), 9.0)
    assert step_times.mixed(Bucket(64, 16)) == pytest.approx(0.11)
    for _ in range(_KEPT):
        step_times.observe(Bucket(64, 16), 0.2)
    assert step_times.mixed(Bucket(64, 16)) == 0.2, "what is long ago is forgotten"


def test_a_disturbed_first_step_of_a_bucket_does_not_change_the_pace():
    step_times = step_times_of(m64=0.1)
    step_times.observe(Bucket(128, 16), 9.0)
    assert step_times.mixed(Bucket(128, 16)) == pytest.approx(0.2)
    assert step_times.mixed_at_least(Bucket(128, 16), 128) == pytest.approx(0.1)
    for _ in range(2):
        step_times.observe(Bucket(128, 16), 0.15)
    assert step_times.mixed(Bucket(128, 16)) == pytest.approx(0.15)
    assert step_times.mixed_at_least(Bucket(128, 16), 128) == pytest.approx(0.15)
    assert step_times.mixed_at_least(Bucket(256, 16), 256) == pytest.approx(0.15)


def test_a_pause_of_the_machine_does_not_stretch_the_next_steps():
    """Three seconds in a row of steps of 15 ms."""
    step_times = StepTimeEstimate(BUCKETS)
    for number in range(200):
        step_times.observe(Bucket(1, 1), 3.0 if number == 190 else 0.015)
    assert step_times.stretch < 1.12
    assert step_times.mixed_at_least(Bucket(256, 16), 256) == pytest.approx(0.015)


def test_a_bucket_that_was_not_seen_is_judged_by_its_neighbours():
    """By the rows of the next larger one, but no shorter than a smaller one."""
    step_times = step_times_of(m64=0.1, m256=0.6)
    assert step_times.mixed(Bucket(32, 16)) == pytest.approx(0.05)
    assert step_times.mixed(Bucket(128, 16)) == pytest.approx(0.3)
    assert step_times_of(m64=0.1, m256=0.15).mixed(Bucket(128, 16)) == pytest.approx(0.1)
    assert step_times_of(m64=0.1).mixed(Bucket(128, 16)) == pytest.approx(0.2)
    assert StepTimeEstimate(BUCKETS).mixed(Bucket(64, 16)) is None


def test_the_least_time_of_a_prompt_is_never_more_than_was_measured():
    step_times = step_times_of(m64=0.1, m256=0.4)
    assert [
        round(step_times.fastest_prefill(rows), 3) for rows in (0, 20, 40, 128, 200, 256, 300, 600)
    ] == [0, 0, 0.1, 0.1, 0.4, 0.4, 0.5, 0.9]
    assert StepTimeEstimate(BUCKETS).fastest_prefill(500) == 0.0


def test_where_padding_is_free_a_step_takes_as_long_as_it_has_rows():
    """10 ms and 1 ms a row; what is asked is told for the rows that are asked about."""
    step_times = StepTimeEstimate(replace(BUCKETS, padding_is_free=True))
    small, bucket = Bucket(1, 1), Bucket(128, 16)
    step_times.observe(small, 0.010)
    assert step_times.mixed(bucket) is None
    for rows in (65, 100, 128):
        step_times.observe(bucket, 0.010 + 0.001 * rows, pairs=50 * rows, rows=rows)
    assert step_times.mixed(bucket) == pytest.approx(0.138)
    assert step_times.mixed(bucket, 96) == pytest.approx(0.106)
    assert step_times.newest(bucket, 128) == pytest.approx([0.138] * 3)
    assert step_times.newest(bucket, 96) == pytest.approx([0.106] * 3)
    assert step_times.fastest_prefill(96) == pytest.approx(0.106)
    assert step_times.per_pair == 0, "rows that are more are no rows that attend to more"
    # Of a step that is nearly empty little is its rows'.
    step_times.observe(Bucket(256, 16), 0.014, rows=2)
    assert step_times.mixed(Bucket(256, 16)) == pytest.approx(0.018)
    padded = StepTimeEstimate(BUCKETS)
    for rows in (65, 100, 128):
        padded.observe(bucket, 0.138, rows=rows)
    assert padded.newest(bucket, 65) == pytest.approx([padded.mixed(bucket)] * 3)
    assert padded.mixed(bucket) == pytest.approx(0.138)


@pytest.mark.parametrize("rows", [9, 10, 12, 16])
def test_a_decode_size_that_is_little_filled_is_not_taken_for_a_fast_one(rows: int):
    """Decode steps of 10 ms and 1 ms a row, in sizes of 8 and 16."""
    step_times = StepTimeEstimate(replace(BUCKETS, padding_is_free=True))
    for seats, seen in ((8, 8), (16, rows)):
        step_times.observe(Bucket(seats, seats), 0.010 + 0.001 * seen, rows=seen)
    assert step_times.decode(16) == pytest.approx(0.026)
    assert step_times.decode(9) == pytest.approx(0.019)
    assert step_times.stretch == 1


@pytest.mark.parametrize(
    ("share", "decoding", "rows"),
    [
        (1.0, 0, 256),
        (1.0, 16, 240),
        (0.25, 0, 256),
        (0.25, 4, 60),
        (0.25, 16, 48),
        (0.125, 4, 28),
        (0.01, 4, 2),
        (0.2, 16, 48),
        (0.13, 16, 33),
    ],
)
def test_the_share_of_prompts_beside_running_streams(share: int, decoding: int, rows: int):
    """As many as fill a bucket, if that is at least half of what the share allows: 64 rows of 256
    beside 4 are 60.
    """
    assert PrefillBudget(StepTimeEstimate(BUCKETS), share, 0.0).most(decoding) == rows


def test_the_chunk_follows_the_target():
    step_times = step_times_of(m32=0.04, m64=0.05, m128=0.08, m256=0.16)
    assert [
        PrefillBudget(step_times, 1.0, target).most(8) for target in (0.04, 0.07, 0.1, 1.0)
    ] == [
        24,
        56,
        120,
        248,
    ]
    assert PrefillBudget(step_times, 0.25, 1.0).most(8) == 56, "the share still holds"
    assert PrefillBudget(step_times, 1.0, 0.07).most(0) == 256, "nobody decodes"


def test_before_any_mixed_step_the_target_takes_the_smallest():
    assert PrefillBudget(StepTimeEstimate(BUCKETS), 1.0, 0.05).most(8) == 24


def test_a_target_that_cannot_be_kept_does_not_starve_prompts():
    rows = PrefillBudget(step_times_of(m32=0.2), 1.0, 0.05)
    assert [rows.most(8) for _ in range(2 * _PATIENCE)] == ([0] * (_PATIENCE - 1) + [24]) * 2


def learnt(per_pair: float, noise: float = 0.0, rounds: int = 40) -> StepTimeEstimate:
    """What is learnt from steps of 128 and 64 rows: 52 and 38 ms and so much per pair, and up to
    `noise` of it at random.
    """
    rng, step_times = random.Random(3), StepTimeEstimate(BUCKETS)
    for number in range(rounds):
        for bucket, base in ((Bucket(128, 16), 0.052), (Bucket(64, 16), 0.038)):
            pairs = bucket.tokens * 100 * number
            step_times.observe(
                bucket, (base + per_pair * pairs) * (1 + rng.uniform(0, noise)), pairs
            )
    return step_times


def test_what_a_pair_costs_is_learnt_from_prompts_of_different_lengths():
    assert learnt(3e-7).per_pair == pytest.approx(3e-7, rel=0.02) and learnt(3e-7).mixed(
        Bucket(128, 16)
    ) == (pytest.approx(0.052, rel=0.05))
    assert learnt(3e-7, noise=0.5).per_pair == pytest.approx(3.75e-7, rel=0.25)
    assert learnt(0.0, noise=0.5).per_pair < 3e-8
    step_times, rng = StepTimeEstimate(BUCKETS), random.Random(1)
    for _ in range(
        100
    ):  # short prompts alone, and steps of random times: nothing is concluded from these
        step_times.observe(Bucket(64, 16), rng.uniform(0.03, 0.09), rng.randint(500, 2500))
    assert step_times.per_pair < 2e-7


def test_rows_deep_in_a_long_prompt_are_fewer():
    """48 rows of the 64-row bucket at its start; far into it only as many as keep 1.15 times its 38
    ms.
    """
    rows = PrefillBudget(learnt(3e-7), 0.25, 0.0)
    at = [rows.most(16, start) for start in (0, 200, 1000, 40_000)]
    assert at[0] == 48 and at == sorted(at, reverse=True)
    assert at[2] == pytest.approx(0.15 * 0.038 / 3e-7 / 1000, abs=2)
    assert at[3] == 32 // 8, "but never fewer than these"
    assert PrefillBudget(learnt(3e-7), 1.0, 0.0).most(16, 4000) == 240, "share 1 is no limit"
    timely = PrefillBudget(learnt(3e-7), 1.0, 0.08).most(16, 1000)
    assert 0.078 < 0.052 + 3e-7 * timely * (1000 + timely / 2) < 0.081


def worst_gap(target_itl_ms: float) -> float:
    """Longest time between two tokens of three streams while prompts of 100 tokens come; a row
    takes 1 ms.

    Steps before anything was learnt are left out.
    """
    clock = FakeClock()
    core = make_core(
        seats=4, pages=200, budget=64, context=128, eos=(), target_itl_ms=target_itl_ms, clock=clock
    )
    launch, fetch, running, last, worst = core.runner.launch, core.runner.fetch, deque(), 0.0, 0.0

    def launched(batch):
        running.append(batch[2].bucket.tokens / 1000)
        return launch(batch)

    def fetched(launched):
        clock.now += running.popleft()
        return fetch(launched)

    core.runner.launch, core.runner.fetch = launched, fetched
    for i in range(3):
        core.add(make_request(f"s{i}", [1], max_tokens=120))
    for step in range(100):
        if step in (10, 50, 80):
            core.add(make_request(f"long{step}", [1 + step % 37] * 100, max_tokens=1))
        if any(out.request_id == "s0" for out in core.step().outputs):
            worst = max(worst, clock.now - last) if step > 40 else 0.0
            last = clock.now
    assert len(core.scheduler.sequences.seats.prefilling) == 0 and core.scheduler.n_waiting == 0
    return worst


def test_running_streams_keep_their_target():
    assert worst_gap(0.0) == pytest.approx(0.064) and worst_gap(20.0) <= 0.020 + 1e-9


def test_a_long_prompt_passes_in_pieces_while_others_decode():
    """Share 0.25 of 32 rows, one stream: 7 prompt rows fill the bucket of 8 that is there, and
    alone it gets all.
    """
    core = make_core(seats=2, budget=32, pages=65, context=128, eos=(), prefill_share=0.25)
    plans = watch(core)
    core.add(make_request("stream", [1], max_tokens=4))
    core.step()
    core.add(make_request("long", [2] * 60, max_tokens=1))
    core.run_until_idle()
    assert [picture(plan) for plan in plans[1:5]] == [
        [("stream", 1, 2, "decode"), ("long", 0, 7, "prefill")],
        [("stream", 2, 3, "decode"), ("long", 7, 14, "prefill")],
        [("stream", 3, 4, "decode"), ("long", 14, 21, "prefill")],
        [("long", 21, 53, "prefill")],
    ]


def run_at(core: EngineCore, clock: FakeClock, seconds: float, steps: int) -> None:
    """Steps that each take so long on the device."""
    fetch = core.runner.fetch

    def slow(launched):
        clock.now += seconds
        return fetch(launched)

    core.runner.fetch = slow
    for _ in range(steps):
        core.step()
    core.runner.fetch = fetch


def test_steps_are_measured_by_the_core_and_compiled_ones_are_not():
    clock = FakeClock()
    core = make_core(clock=clock, eos=())
    assert core.scheduler.step_times.step is None
    core.add(make_request("a", [1], max_tokens=8))
    launch = core.runner.launch

    def compiling(batch):
        device_of(core).compiles += 1
        return launch(batch)

    core.runner.launch = compiling
    run_at(core, clock, 5.0, 2)
    core.runner.launch = launch
    run_at(core, clock, 0.5, 4)
    assert core.scheduler.step_times.step == 0.5


def test_answers_are_expected_as_long_as_those_before_them():
    lengths = LengthEstimate()

    def expected(n_prompt: int, most: int = 10**6) -> int:
        return lengths.expect(RequestClasses.of("a", n_prompt, None), most)

    def saw(n_prompt: int, n_output: int) -> None:
        lengths.observe(RequestClasses.of("a", n_prompt, None), 0, n_output, by_itself=True)

    assert expected(10) == pytest.approx(FIRST_GUESS, rel=0.01) and expected(10, 40) == 40
    for _ in range(300):
        saw(10, 20)
        saw(1000, 400)
    assert expected(8) == pytest.approx(20, abs=10)
    assert expected(600) == pytest.approx(400, rel=0.1), (
        "a length is known as exactly as its bucket is wide"
    )
    assert 150 < expected(100) < 270, "a class that was never seen is like all together"
    for _ in range(600):
        saw(10, 90)
    assert expected(10) == pytest.approx(90, abs=10), "old answers fade"


def busy_core(clock: FakeClock, **limits) -> EngineCore:
    """Two seats taken for 20 more tokens each, one step a second, and what was measured of it."""
    core = make_core(seats=2, pages=65, context=64, eos=(), clock=clock, **limits)
    for name in ("a", "b"):
        core.add(make_request(name, [1], max_tokens=22))
    run_at(core, clock, 1.0, 3)
    assert core.scheduler.step_times.step == 1.0
    return core


def foreseen(core: EngineCore, **request) -> float:
    """The wait predicted for a request that came now."""
    newcomer = core.scheduler.factory.leader(make_request("newcomer", [1], **request), 10**6)
    return core.scheduler._admission.predicted_wait.wait(newcomer)


def test_the_wait_is_foreseen_from_rests_and_expectations():
    """Both seats are free in 20 steps of 1 s, or a little sooner because an answer may end by
    itself; with 4 of 10 tokens ahead, (2 x 20 + 4 x 10 - 5) / 2.
    """
    core = busy_core(FakeClock())
    assert foreseen(core) == pytest.approx(19.5, abs=0.5)
    for i in range(4):
        core.add(make_request(f"w{i}", [1], max_tokens=10))
    assert foreseen(core) == pytest.approx((2 * 20 + 10 * (4 - 0.5)) / 2, rel=0.05)


def test_the_wait_of_a_new_request_is_reported_twice_a_second():
    clock = FakeClock()
    core = busy_core(clock)
    for i in range(4):
        core.add(make_request(f"w{i}", [1], max_tokens=10))
    assert core.scheduler.predicted_wait_s == foreseen(core)
    clock.now += 1.0
    assert core.step().predicted_wait == core.scheduler.predicted_wait_s > 0.0
    clock.now += 0.1
    assert core.step().predicted_wait is None, "it costs time for every seat"
    clock.now += 0.4
    assert core.step().predicted_wait == core.scheduler.predicted_wait_s


def test_a_foreseen_wait_is_right_about_a_real_queue():
    """Eight seats, sixty ahead: the prediction is within 15 % of when the newcomer boards."""
    clock = FakeClock()
    core = make_core(seats=8, pages=200, budget=64, context=64, eos=(), clock=clock)
    for i in range(68):
        core.add(make_request(f"r{i}", [1, 2], max_tokens=10 + i % 21))
    run_at(core, clock, 0.1, 12)
    predicted, started = foreseen(core), clock.now
    core.add(make_request("newcomer", [1], arrival=clock.now, max_tokens=1))
    newcomer = core.scheduler.sequences.requests.open_of("newcomer")[0]
    while newcomer.boarded_at is None:
        run_at(core, clock, 0.1, 1)
    assert newcomer.boarded_at - started == pytest.approx(predicted, rel=0.15)


def run_seats(seats: int, max_tokens: int, steps: int) -> tuple[EngineCore, FakeClock]:
    """All seats taken by answers that have got so far together, a step taking a tenth of a
    second.
    """
    clock = FakeClock()
    core = make_core(seats=seats, pages=4000, budget=64, context=512, eos=(), clock=clock)
    for i in range(seats):
        core.add(make_request(f"r{i}", [1], max_tokens=max_tokens))
    run_at(core, clock, 0.1, steps)
    return core, clock


def test_answers_past_what_was_expected_are_not_about_to_end():
    """Answers of 10 tokens were seen; now eight have 100 of 300 each. Their tokens count: about 40
    to each end, so that one of the eight ends after about five steps.
    """
    core, clock = run_seats(8, 300, 1)
    seq = core.scheduler.sequences.requests.open_of("r0")[0]
    for _ in range(20):
        core.scheduler.sequences.lengths.observe(seq.kind, 0, 10, by_itself=True)
    run_at(core, clock, 0.1, 99)
    assert foreseen(core) == pytest.approx(0.5, rel=0.2)
    for i in range(4):
        core.add(make_request(f"w{i}", [1], max_tokens=10))
    assert core.scheduler.predicted_wait_s > 2.0


def test_one_of_many_ends_long_before_their_mean_rest():
    """Sixteen answers that end at random, a 256th of them with each token: one seat comes free in
    about 16 steps, half of them in about 177.
    """
    core, _ = run_seats(16, 500, 2)
    running = _Endings(core.scheduler.sequences.seats.taken, LengthEstimate())
    assert running.steps_until(1) == pytest.approx(FIRST_GUESS / 16, rel=0.1)
    assert running.steps_until(8) == pytest.approx(FIRST_GUESS * math.log(2), rel=0.1)
    assert running.steps_until(16) == pytest.approx(498, abs=1), "an answer ends by length, too"


@pytest.mark.parametrize("order", ["fcfs", "fair", "priority", "shortest"])
def test_the_last_in_line_waits_longest(order: str):
    core = busy_core(FakeClock(), order=order)
    for i in range(6):
        core.add(make_request(f"w{i}", [1], max_tokens=10, user=str(i % 2)))
    assert core.scheduler.predicted_wait_s >= foreseen(core, user="new") > 0


def test_a_request_waits_only_for_requests_before_it_in_the_order():
    """Ten wait; by priority five of them go before the newcomer, by tenant (one has all ten) one of
    them.
    """
    waits = {}
    for order in ("fcfs", "priority", "fair"):
        core = busy_core(FakeClock(), order=order)
        for i in range(10):
            core.add(make_request(f"w{i}", [1], max_tokens=10, priority=i // 5, user="a"))
        waits[order] = foreseen(
            core, priority=1 if order == "priority" else 0, user="b", arrival=-10.0 + 1e-6
        )
    assert waits["fcfs"] > waits["priority"] > waits["fair"] == pytest.approx(19.5, abs=0.5)


def test_a_batch_is_waited_for_as_a_whole():
    clock = FakeClock()
    core = busy_core(clock, policy="static")
    for i in range(3):
        core.add(make_request(f"w{i}", [1], max_tokens=10))
    assert foreseen(core) == pytest.approx(20 + 1 * 10, abs=0.5)


def test_too_long_a_wait_is_refused_with_the_seconds():
    core = busy_core(FakeClock(), max_predicted_wait_s=15.0)
    with pytest.raises(
        RequestError, match=r"about 19\.\d s of waiting are ahead, and at most 15"
    ) as refusal:
        core.scheduler.add(make_request("c", [1]))
    info = refusal.value.info
    # Until 7.5 are ahead, the half that may be filled in the first seconds, and a little at random.
    assert info.code == "queue_full" and info.retry_after == pytest.approx(12.4, abs=0.8)
    assert "sequences waiting: 0" in info.message
    core.check()
    assert not core.scheduler.sequences.requests.open_of("c")


def test_what_a_lost_engine_had_admitted_is_refused_for_what_waits_alone():
    core = busy_core(FakeClock(), max_predicted_wait_s=15.0, max_requests=3)
    with pytest.raises(RequestError, match="of waiting are ahead"):
        core.scheduler.add(make_request("new", [1]))
    lost = [
        msgspec.structs.replace(make_request(f"lost{number}", [1]), admitted=True)
        for number in range(4)
    ]
    for request in lost[:3]:
        core.scheduler.add(request)
    with pytest.raises(RequestError, match="too many sequences are waiting: 3, of at most 3"):
        core.scheduler.add(lost[3])


def test_nothing_is_refused_by_prediction_before_a_step_was_measured():
    core = make_core(seats=1, eos=(), max_predicted_wait_s=0.001)
    for i in range(20):
        core.add(make_request(f"r{i}", [1] * 9, deadline=0.001))
    assert core.scheduler.n_waiting == 20


@pytest.mark.parametrize(("deadline", "refused"), [(9.0, True), (11.0, False)])
def test_a_deadline_that_cannot_be_met_is_refused_before_any_prefill(
    deadline: float, refused: bool
):
    """20 s are ahead by prediction; only what is sooner than half of that is hopeless."""
    clock = FakeClock()
    core = busy_core(clock)
    request = make_request("c", [1], deadline=clock.now + deadline)
    core.add(request)
    end = ends_of(core.step().outputs).get(("c", 0))
    assert (
        end is not None and end.error is not None and end.error.code == "deadline_unreachable"
    ) == refused
    if refused and end and end.error:
        assert end.error.retry_after == pytest.approx(19.5, abs=0.5)


def test_a_prompt_too_long_for_its_deadline_is_refused_unless_it_is_here_already():
    """Free seats, but 30 rows take two steps of 1 s and 1.5 s are left; 28 of them in pages leave
    one step.
    """
    clock = FakeClock()
    core = make_core(seats=2, budget=16, pages=65, eos=(), clock=clock)
    prompt = list(range(1, 31))
    core.add(make_request("first", [7] * 30, max_tokens=1))
    run_at(core, clock, 1.0, 6)
    late = make_request("late", prompt, deadline=clock.now + 1.5, max_tokens=1)
    with pytest.raises(RequestError, match="deadline"):
        core.scheduler.add(late)
    core.add(make_request("teaches", prompt, max_tokens=1))
    core.run_until_idle()
    core.scheduler.add(make_request("in time", prompt, deadline=clock.now + 1.5, max_tokens=1))


def test_a_prompt_that_is_refused_by_its_length_is_not_judged_by_its_wait():
    core = busy_core(FakeClock(), max_predicted_wait_s=1.0)
    with pytest.raises(RequestError) as refusal:
        core.scheduler.add(make_request("c", [1] * 200))
    assert refusal.value.info.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": 5}, "batch_size"),
        ({"batch_size": -1}, "batch_size"),
        ({"prefill_share": 0.0}, "prefill_share"),
        ({"prefill_share": 1.5}, "prefill_share"),
        ({"max_wait_ms": float("nan")}, "max_wait_ms"),
        ({"target_itl_ms": -1.0}, "target_itl_ms"),
        ({"max_predicted_wait_s": float("inf")}, "max_predicted_wait_s"),
    ],
)
def test_limits_out_of_range(given: dict[str, float], message: str):
    with pytest.raises(ConfigError, match=message):
        SchedulerLimits(4, 64, **given)  # pyright: ignore[reportArgumentType]


def test_limits_are_those_of_the_configuration():
    settings = EngineSection(
        max_seats=7,
        policy="dynamic",
        batch_size=3,
        max_wait_ms=5.0,
        order="fair",
        target_itl_ms=9.0,
        max_predicted_wait_s=8.0,
        prefill_share=0.5,
        max_waiting_requests=11,
    )
    limits = SchedulerLimits.of(settings, context_length=99)
    assert limits == SchedulerLimits(
        7,
        99,
        11,
        settings.max_waiting_tokens,
        "dynamic",
        3,
        5.0,
        "fair",
        0.5,
        9.0,
        8.0,
        static_timeout_ms=5000.0,
    )
    assert limits.batch == 3 and SchedulerLimits(7, 99).batch == 7


def calls(seats: int, order: str) -> float:
    """Function calls, Python's and C's, to plan and commit a step in which all seats decode and as
    many wait.
    """
    core = make_core(
        seats=seats,
        pages=8 * seats,
        page_size=16,
        budget=4 * seats,
        context=64,
        order=order,
        eos=(),
        max_requests=10**6,
    )
    numbers, counted, scheduler = count(), 0, core.scheduler

    def counting(frame: FrameType, event: str, argument: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    for step in range(30):
        while scheduler.n_waiting < seats:
            number = next(numbers)
            scheduler.add(
                make_request(
                    f"r{number}", [1 + number % 30] * 5, user=str(number % 5), max_tokens=50
                )
            )
        if step == 20:
            gc.collect()
            sys.setprofile(counting)
        plan = scheduler.plan(0.0)
        assert plan is not None and (step < 20 or plan.n_decode == seats)
        scheduler.commit(
            plan, StepResult([7] * sum(chunk.logit_rows for chunk in plan.chunks)), 0.0
        )
    sys.setprofile(None)
    return counted / 10


@pytest.mark.parametrize("order", _ORDERS)
def test_the_cost_of_a_step_grows_with_the_seats_and_no_faster(order: str):
    small, large = calls(32, order), calls(128, order)
    assert large < 4.4 * small and large < 128 * 30
