"""The core on a fake device: nothing is lost, and everybody gets the tokens of a solo run."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import numpy as np
import pytest
from core_runs import CONTEXT, assert_solo_tokens, cramped_core, random_events
from fakes import (
    VOCAB,
    FakeClock,
    StepFailed,
    code_of,
    device_of,
    ends_of,
    make_core,
    make_request,
    solo,
    tokens_of,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.records import STEP_DTYPE, RecordRing
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.scheduler.sequence_factory import _sibling_seed


@pytest.mark.usefixtures("rash")
@pytest.mark.parametrize(
    ("retain", "policy", "order", "seed"),
    [
        (True, "continuous", "fcfs", 1),
        (False, "continuous", "priority", 2),
        (True, "continuous", "shortest", 3),
        (True, "continuous", "fair", 4),
        (True, "static", "fcfs", 5),
        (False, "static", "fair", 6),
        (True, "dynamic", "priority", 7),
        (False, "dynamic", "shortest", 8),
    ],
)
def test_3000_random_events_lose_nothing(retain: bool, policy: str, order: str, seed: int):
    """Submit, abort, step, against a pool too small for all who sit, so that the scheduler also
    preempts.
    """
    rng, clock = random.Random(seed), FakeClock(tick=0.001)
    core = cramped_core(
        retain=retain,
        order=order,
        policy=policy,
        max_wait_ms=2000.0,
        static_timeout_ms=2000.0,
        prefill_share=0.5,
        target_itl_ms=2.0,
        clock=clock,
    )
    requests, outputs = random_events(core, clock, rng, 3_000)
    assert core.scheduler.pool.used == 0 and not any(
        seat.state != "free" for seat in core.seat_map().seats
    )
    assert_solo_tokens(requests, outputs)
    records = core.ledger.since(0)
    finishes = {end.finish for end in ends_of(outputs).values()}
    assert finishes == {"stop", "length", "abort", "deadline", "error"}
    assert (
        records["preempted"].sum() > 15
        and records["past_end"].sum() > 15
        and records["cancelled"].sum() > 2
    )
    assert records["recomputed"].sum() > 30 and (records["cached_tokens"].sum() > 30) == (
        retain or policy == "continuous"
    )  # siblings of one batch compute their prompt each
    assert core.ledger.closes() and records["bucket_tokens"].sum() == device_of(core).rows_run


def test_random_events_with_steps_of_few_sequences_lose_nothing():
    """Mixed buckets of 4 and 8 rows hold one and two of eight seats."""
    rng, clock = random.Random(9), FakeClock(tick=0.001)
    core = cramped_core(
        seats=8,
        budget=24,
        token_sizes=(4, 8, 24),
        clock=clock,
    )
    requests, outputs = random_events(core, clock, rng, 4_000)
    assert core.scheduler.pool.used == 0
    assert_solo_tokens(requests, outputs)
    records = core.ledger.since(0)
    prompts = records["bucket_tokens"][records["mixed"] == 1]
    assert min(np.bincount(prompts, minlength=25)[[4, 8, 24]]) > 20
    assert core.ledger.closes() and records["bucket_tokens"].sum() == device_of(core).rows_run


def long_or_short(rng: random.Random, number: int, now: float) -> EngineRequest:
    """A request with a prompt of several steps, or with a short one; many prompts start alike."""
    head = [rng.randrange(1, 4)] * rng.choice((0, 4, 8, 40))
    more = rng.choice((1, 2, 5, 60))
    return make_request(
        f"r{number}",
        head + [rng.randrange(VOCAB) for _ in range(more)],
        arrival=now,
        n=rng.choice((1, 1, 1, 2)),
        tenant=rng.choice(("", "key")),
        seed=rng.choice((0, 7)),
        max_tokens=rng.choice((1, 2, 5, 12)),
        deadline=now + rng.uniform(0, 60) if rng.random() < 0.05 else None,
        prompt_logprobs=rng.choice((None, None, None, 2)),
    )


@pytest.mark.parametrize(("retain", "order"), [(True, "fcfs"), (False, "fair"), (True, "fair")])
def test_steps_between_the_segments_of_others_lose_nothing(retain: bool, order: str):
    """A step between two segments of another neither reads what this one still writes, nor writes
    where it does.
    """
    rng, clock = random.Random(11), FakeClock(tick=0.001)
    core = make_core(
        seats=6,
        pages=70,
        budget=16,
        context=128,
        retain=retain,
        order=order,
        clock=clock,
        segments=4,
    )
    requests: list[EngineRequest] = []
    outputs: list[SequenceOutput] = []
    for event in range(2_500):
        clock.now += rng.random()
        kind = rng.random()
        if kind < 0.12 and core.scheduler.n_waiting < 8:
            requests.append(long_or_short(rng, len(requests), clock.now))
            core.add(requests[-1])
        elif kind < 0.15 and requests:
            core.abort(rng.choice(requests[-8:]).id)
        else:
            outputs += core.step().outputs
        if event % 5 == 0:
            core.scheduler.check()
    outputs += core.run_until_idle(20_000)
    core.check()
    assert_solo_tokens(requests, outputs)
    assert "internal_error" not in {code_of(end) for end in ends_of(outputs).values()}
    assert device_of(core).n_between > 20
    assert core.ledger.since(0)["bucket_tokens"].sum() == device_of(core).rows_run


def test_a_prompt_that_shares_pages_with_the_running_step_waits_for_its_end():
    core = make_core(seats=4, pages=70, budget=16, context=128, segments=4)
    for number in range(8):  # so that short prompts may pass
        core.add(make_request(f"first{number}", [10 + number] * 40, max_tokens=1))
    core.run_until_idle()
    core.add(make_request("long", [5] * 100, max_tokens=1))
    core.step()
    assert core._flight is not None
    running = core._flight.plan
    core.add(make_request("alike", [5] * 5, max_tokens=2))
    assert not core.scheduler.goes_between(running)
    core.abort("alike")
    core.add(make_request("other", [6] * 5, max_tokens=2))
    assert core.scheduler.goes_between(running)
    assert "other" in {output.request_id for output in core.step().outputs}
    assert device_of(core).n_between == 1 and core._flight.plan is running


def core_in_a_cut_step(*others: EngineRequest, **settings: Any) -> EngineCore:
    """A core that runs the first segment of a step with prompt rows of these requests and of a long
    one.
    """
    core = make_core(**{"seats": 4, "pages": 70, "context": 128, "segments": 4, **settings})
    for request in (*others, make_request("long", [5] * 100, max_tokens=1)):
        core.add(request)
    core.step()
    assert core._flight is not None and core._flight.is_cut
    return core


def test_a_sibling_waits_for_the_step_that_scores_its_prompt():
    leader = make_request("scored", [6] * 3, n=2, max_tokens=2, prompt_logprobs=1)
    core = core_in_a_cut_step(leader)
    outputs = core.run_until_idle()
    assert [end.finish for end in ends_of(outputs).values()] == ["length"] * 3
    assert_solo_tokens([leader], [out for out in outputs if out.request_id == "scored"])


def test_steps_are_recorded_in_the_order_of_their_results():
    """And each is done when its result was fetched: a step between two segments of another is
    before that one. Until both are done, the first of its kind is announced by its number.
    """
    clock = FakeClock()
    core = core_in_a_cut_step(clock=clock)
    device = device_of(core)
    fetch, records, announced = device.fetch, RecordRing(), list[int]()
    core.on_first_step = announced.append

    def slow_fetch(launched: Any) -> Any:
        clock.now += 0.25
        return fetch(launched)

    device.fetch = slow_fetch
    for number in range(20):
        clock.now += 2.0
        if number % 3 == 0:
            core.add(make_request(f"short{number}", [6 + number] * 2, max_tokens=1))
        newest = records.last_step
        record = core.step().record
        if record:
            records.add(record)
            assert len(records.since(newest)) == 1 and records.last_ready == clock.now
            if number == 0:
                assert announced == [1, 2], "the cut step is the second one now"
    assert device.n_between > 2
    np.testing.assert_array_equal(records.since(-1)["step"], np.arange(len(records)) + 1)


def test_a_step_that_fails_between_two_segments_has_seated_nobody():
    """And it is not known which of the two has failed."""
    core = core_in_a_cut_step()

    def fail(launched: Any) -> Any:
        raise StepFailed

    core.runner.fetch = fail
    core.add(make_request("short", [6] * 3, max_tokens=2))
    report = core.step()
    assert [(event.event, event.request_id) for event in report.events] == [
        ("preempted", "long"),
        ("preempted", "short"),
    ]
    del core.runner.fetch
    suspects = {seq.request_id for seq in core.scheduler._suspects._waiting}
    assert suspects == {"short", "long"}
    assert {end.finish for end in ends_of(core.run_until_idle()).values()} == {"length"}


@pytest.mark.parametrize(
    ("method", "segments"),
    [("batch", 1), ("launch", 1), ("fetch", 1), ("finish", 4), ("launch", 4), ("fetch", 4)],
)
def test_an_interrupted_step_loses_no_tokens(method: str, segments: int):
    """Also where it was planned, and its pages can be found, but not all of it was launched."""
    core = make_core(seats=4, pages=70, context=128, segments=segments)
    requests = [make_request("long", [5] * 100), make_request("short", [6] * 3)]
    core.add(requests[0])
    core.step()
    if method != "finish":  # else it goes between two segments
        core.add(requests[1])

    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    setattr(core.runner, method, interrupt)
    with pytest.raises(KeyboardInterrupt):
        core.step()
    delattr(core.runner, method)
    requests.append(make_request("alike", [5] * 100))
    for request in requests[1:] if method == "finish" else requests[2:]:
        core.add(request)
    outputs = core.run_until_idle()
    core.check()
    assert_solo_tokens(requests, outputs)
    assert {end.finish for end in ends_of(outputs).values()} <= {"length", "stop"}


def test_a_prompt_past_its_deadline_does_not_go_between_two_segments():
    clock = FakeClock()
    core = core_in_a_cut_step(clock=clock)
    core.add(make_request("late", [6] * 3, max_tokens=2, deadline=1.0))
    clock.now = 2.0
    (ended,) = core.step().outputs
    assert (ended.request_id, ended.finish, ended.tokens) == ("late", "deadline", [])
    assert device_of(core).n_between == 0


def test_a_short_prompt_that_takes_the_last_seat_goes_between_two_segments():
    core = core_in_a_cut_step(seats=2)
    device_of(core).has_paused = lambda launched: False
    core.add(make_request("short", [6] * 3, max_tokens=2))
    assert core.late_plan_slack_s > 0
    del device_of(core).has_paused
    assert core.late_plan_slack_s == 0
    assert [output.request_id for output in core.step().outputs] == ["short"]


def test_a_step_that_waits_for_the_compiler_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    core = make_core()
    runner = device_of(core)
    launch = runner.launch

    def compile_and_launch(batch: Any) -> Any:
        runner.compiles += 1
        return launch(batch)

    core.add(make_request("a", [1, 2, 3], max_tokens=3))
    core.step()
    assert not caplog.records
    monkeypatch.setattr(runner, "launch", compile_and_launch)
    while core.has_work:
        core.step()
    (record,) = caplog.records
    assert runner.compiles > 1
    assert "STEP 2 WAITED FOR THE COMPILER" in record.getMessage()
    assert "jitney_compiles_total" in record.getMessage()


class CoreMachine(RuleBasedStateMachine):
    """Any order of submit, abort and step; hypothesis shrinks what breaks."""

    limits: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.core = make_core(
            seats=3,
            pages=9,
            page_size=4,
            budget=8,
            context=24,
            retain=True,
            clock=FakeClock(tick=0.001),
            **self.limits,
        )
        self.requests: list[EngineRequest] = []
        self.outputs: list[SequenceOutput] = []

    @rule(
        head=st.integers(0, 8),
        tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
        n=st.integers(1, 3),
        max_tokens=st.integers(1, 9),
        scored=st.booleans(),
        priority=st.integers(-1, 1),
        user=st.sampled_from("abc"),
        background=st.booleans(),
    )
    def submit(
        self,
        head: int,
        tail: list[int],
        n: int,
        max_tokens: int,
        scored: bool,
        priority: int,
        user: str,
        background: bool,
    ) -> None:
        request = make_request(
            f"r{len(self.requests)}",
            [1] * head + tail,
            n=n,
            max_tokens=max_tokens,
            prompt_logprobs=1 if scored else None,
            priority=priority,
            user=user,
            background=background,
            arrival=self.core.clock(),
        )
        self.requests.append(request)
        self.core.add(request)

    @rule(back=st.integers(0, 5), index=st.sampled_from((None, 0, 1)))
    def abort(self, back: int, index: int | None) -> None:
        if back < len(self.requests):
            self.core.abort(self.requests[-1 - back].id, index)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.outputs += self.core.step().outputs

    @rule()
    def look(self) -> None:
        report = self.core.report_ended()
        self.outputs += [] if report is None else report.outputs

    @invariant()
    def nothing_is_lost(self) -> None:
        self.core.check()

    def teardown(self) -> None:
        self.outputs += self.core.run_until_idle(2000)
        self.core.check()
        ends = ends_of(self.outputs)
        assert len(ends) == sum(request.sampling.n for request in self.requests)
        for request in self.requests:
            for index in range(request.sampling.n):
                got = tokens_of(self.outputs, request.id, index)
                want = solo(request, _sibling_seed(0, index), 99)
                assert got == (
                    want
                    if ends[request.id, index].finish in ("stop", "length")
                    else want[: len(got)]
                )


class StaticMachine(CoreMachine):
    limits: ClassVar = {"policy": "static", "order": "fair", "static_timeout_ms": 20.0}


class DynamicMachine(CoreMachine):
    limits: ClassVar = {
        "policy": "dynamic",
        "order": "priority",
        "batch_size": 2,
        "max_wait_ms": 20.0,
    }


class FairMachine(CoreMachine):
    limits: ClassVar = {"order": "fair", "prefill_share": 0.3, "target_itl_ms": 1.0}


class ShortestMachine(CoreMachine):
    limits: ClassVar = {"order": "shortest", "prefill_share": 0.1}


for machine in (CoreMachine, StaticMachine, DynamicMachine, FairMachine, ShortestMachine):
    machine.TestCase.settings = settings(
        max_examples=25, stateful_step_count=30, deadline=None, derandomize=True
    )
TestCoreMachine = CoreMachine.TestCase
TestStaticMachine = StaticMachine.TestCase
TestDynamicMachine = DynamicMachine.TestCase
TestFairMachine = FairMachine.TestCase
TestShortestMachine = ShortestMachine.TestCase


@pytest.mark.parametrize("budget", [9, 13, 64])
@pytest.mark.parametrize("retain", [True, False])
def test_alone_and_in_a_crowd_alike(budget: int, retain: bool):
    rng = random.Random(budget)
    core = make_core(seats=8, pages=60, budget=budget, context=CONTEXT, retain=retain)
    prompts = [
        [3] * rng.choice((0, 8)) + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        for _ in range(32)
    ]
    requests = [
        make_request(f"r{i}", prompt, max_tokens=12, seed=i) for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        core.add(request)
    outputs = core.run_until_idle(2000)
    for i, request in enumerate(requests):
        assert tokens_of(outputs, request.id) == solo(request, i, 99)


def test_every_row_of_a_step_is_in_the_ledger():
    """One request of 6 prompt tokens and 3 outputs, drawn: rows are prefill, decode and padding,
    nothing else.
    """
    core = make_core(seats=4, budget=16, eos=())
    core.add(make_request("a", [1, 2, 3, 4, 5, 6], max_tokens=3))
    core.run_until_idle()
    rows = core.ledger.since(0)[["mixed", "bucket_tokens", "prefill", "decode", "padding"]].tolist()
    assert rows == [(1, 8, 6, 0, 2), (0, 1, 0, 1, 0), (0, 1, 0, 1, 0)]


def test_the_row_after_a_stop_is_past_the_end():
    core = make_core(eos=())
    first = solo(make_request("a", [5, 6]), 0, 1)[0]
    core.add(make_request("a", [5, 6], stop_token_ids=(first,)))
    outputs = core.run_until_idle()
    assert [out.stop_token for out in outputs] == [first] and tokens_of(outputs, "a") == [first]
    assert core.ledger.since(0)["past_end"].tolist() == [0, 1]


def test_rows_of_an_aborted_request_are_cancelled_and_its_pages_free_at_once():
    core = make_core(eos=())
    core.add(make_request("a", [1] * 10, max_tokens=50))
    for _ in range(3):
        core.step()
    core.abort("a")
    assert core.scheduler.pool.used == 0
    ends = ends_of(core.run_until_idle())
    assert ends["a", 0].finish == "abort"
    assert core.ledger.totals["cancelled"] == 1 and core.ledger.closes()


def test_ends_between_two_steps_are_told_before_the_next_one():
    core = make_core(eos=())
    core.add(make_request("a", [1] * 10, max_tokens=50))
    core.step()
    core.step()
    assert core.report_ended() is None
    core.abort("a")
    core.add(make_request("long", [1] * 500))
    report = core.report_ended()
    assert report is not None and not report.record and not report.events
    ends = ends_of(report.outputs)
    assert (ends["a", 0].finish, code_of(ends["long", 0])) == ("abort", "context_length_exceeded")
    assert core.report_ended() is None and not core.run_until_idle()
    assert core.ledger.closes()


def test_a_refusal_ends_every_index_once():
    core = make_core()
    core.add(make_request("long", [1] * 500, n=3))
    core.add(make_request("bad", [VOCAB]))
    outputs = core.run_until_idle()
    assert {key: (end.finish, code_of(end)) for key, end in ends_of(outputs).items()} == {
        ("long", 0): ("error", "context_length_exceeded"),
        ("long", 1): ("error", "context_length_exceeded"),
        ("long", 2): ("error", "context_length_exceeded"),
        ("bad", 0): ("error", "invalid_value"),
    }
    assert not core.has_work


def test_rows_that_are_not_finite_end_their_request_alone():
    core = make_core(eos=())
    device_of(core).poisoned.add("bad")
    shared = [2] * 9
    for name in ("good", "bad"):
        core.add(make_request(name, shared, max_tokens=6))
    outputs = core.run_until_idle()
    ends = ends_of(outputs)
    assert code_of(ends["bad", 0]) == "nan_logits"
    assert tokens_of(outputs, "good") == solo(
        make_request("good", shared, max_tokens=6), 0, 9, eos=()
    )


def test_pages_of_a_request_that_was_not_finite_are_not_shared():
    core = make_core(eos=())
    device_of(core).poisoned.add("bad")
    for name in ("bad", "good"):
        core.add(make_request(name, [2] * 12, max_tokens=2))
        outputs = core.run_until_idle()
    assert [out.cached_tokens for out in outputs] == [0, 0]


def is_not_shared(core: EngineCore, prompt: list[int]) -> bool:
    """Whether a later request finds no page of this prompt."""
    core.check()
    core.add(make_request("later", prompt, max_tokens=1))
    outputs = core.run_until_idle()
    assert tokens_of(outputs, "later") == solo(
        make_request("later", prompt, max_tokens=1), 0, 1, eos=()
    )
    return [out.cached_tokens for out in outputs if out.request_id == "later"] == [0]


def test_a_nan_with_the_last_token_leaves_no_page():
    """When its result comes the sequence has left its seat, and its pages, all published, are in
    the cache.
    """
    core = make_core(eos=(), page_size=4)
    prompt = [2] * 12
    core.add(make_request("bad", prompt, max_tokens=3))
    core.step()
    core.step()
    device_of(core).poisoned.add("bad")
    outputs = core.run_until_idle()
    assert code_of(ends_of(outputs)["bad", 0]) == "nan_logits"
    assert is_not_shared(core, prompt)


@pytest.mark.parametrize("way", ["abort", "deadline", "stop", "preempted", "length"])
@pytest.mark.parametrize("kind", ["poisoned", "spoiled"])
def test_a_nan_that_comes_after_the_end_leaves_no_page(way: str, kind: str):
    """The request ends, or loses its seat, while the step that was not finite is on the device."""
    clock = FakeClock()
    core = make_core(eos=(), clock=clock, budget=16, prefill_share=1.0)
    prompt = [2] * 12
    if kind == "poisoned":
        device_of(core).poisoned.add("bad")
    device_of(core).spoiled.add(("bad", 5))
    core.add(make_request("bad", prompt, max_tokens=1 if way == "length" else 8, deadline=1.0))
    core.step()  # launched, its pages published
    if way in ("abort", "stop"):
        core.abort("bad", None, "stop" if way == "stop" else "abort")
    elif way == "deadline":
        clock.now = 2.0
    elif way == "preempted":
        sequences = core.scheduler.sequences
        sequences.preempt(next(iter(sequences.seats.decoding)), clock.now)
    outputs = core.run_until_idle()
    ends = ends_of(outputs)["bad", 0]
    assert ends.finish == (way if way in ("abort", "deadline", "stop") else "error")
    assert is_not_shared(core, prompt)


@pytest.mark.parametrize("scores", [None, 2])
@pytest.mark.parametrize("position", [0, 7, 29])
def test_siblings_end_as_the_one_that_computes_their_prompt(
    position: int, scores: int | None, caplog: pytest.LogCaptureFixture
):
    """Some of them have boarded behind its prompt by then, others wait."""
    core = make_core(eos=(), seats=3, budget=64)
    device_of(core).spoiled.add(("bad", position))
    core.add(make_request("bad", [3] * 30, n=5, max_tokens=6, prompt_logprobs=scores))
    outputs = core.run_until_idle()
    ends = ends_of(outputs)
    assert {code_of(ends["bad", index]) for index in range(5)} == {"nan_logits"}
    assert not tokens_of(outputs, "bad") and not caplog.records
    assert is_not_shared(core, [3] * 30)


def test_a_prompt_row_that_is_not_finite_ends_its_request():
    """A row in the middle of a prompt, whose logits nobody takes; its neighbour goes on."""
    core = make_core(eos=(), budget=16)
    device_of(core).spoiled.add(("bad", 7))
    requests = [
        make_request("bad", [3] * 30, max_tokens=6),
        make_request("good", [2] * 9, max_tokens=6),
    ]
    for request in requests:
        core.add(request)
    outputs = core.run_until_idle()
    assert code_of(ends_of(outputs)["bad", 0]) == "nan_logits" and not tokens_of(outputs, "bad")
    assert tokens_of(outputs, "good") == solo(requests[1], 0, 9, eos=())
    assert is_not_shared(core, [3] * 30)


def test_scores_of_a_prompt_that_was_not_finite_are_not_kept():
    core = make_core(eos=(), budget=16)
    prompt = [3] * 30
    device_of(core).spoiled.add(("bad", 20))
    for name in ("bad", "good"):
        core.add(make_request(name, prompt, max_tokens=1, prompt_logprobs=1))
        outputs = core.run_until_idle()
    assert outputs[0].cached_tokens == 0 and len(outputs[0].prompt_logprobs or ()) == 30


def test_an_exception_over_one_sequence_ends_that_one(caplog: pytest.LogCaptureFixture):
    core = make_core(eos=())
    fetch = core.runner.fetch

    def without_logprobs(launched):
        result = fetch(launched)
        result.logprobs = None
        return result

    core.runner.fetch = without_logprobs
    core.add(make_request("asks", [1, 2], logprobs=1))
    core.add(make_request("plain", [1, 2]))
    outputs = core.run_until_idle()
    ends = ends_of(outputs)
    assert code_of(ends["asks", 0]) == "internal_error"
    assert ends["plain", 0].finish == "length" and "could not be taken in" in caplog.text
    core.check()


def test_a_failing_launch_is_fatal():
    core = make_core()

    def launch(batch):
        raise MemoryError

    core.runner.launch = launch
    core.add(make_request("a", [1]))
    with pytest.raises(MemoryError):
        core.step()


def test_times_of_a_step_come_from_the_clock():
    """Every reading of the clock is one second later, so each interval counts the readings inside
    it.
    """
    core = make_core(clock=FakeClock(tick=1.0), eos=())
    core.add(make_request("a", [1, 2], max_tokens=3))
    core.run_until_idle()
    records = core.ledger.since(0)
    assert records["step"].tolist() == [1, 2, 3]
    for name in ("plan_s", "batch_s", "launch_s", "fetch_s", "commit_s"):
        assert records[name].tolist() == [1.0, 1.0, 1.0]
    assert np.all(records["device_s"] > 0) and records["gap_s"].tolist() == [0.0, 0.0, 0.0]


def test_time_without_work_is_no_gap_but_a_pause_with_work_is():
    clock = FakeClock()
    core = make_core(clock=clock, eos=())
    core.add(make_request("a", [1], max_tokens=1))
    core.run_until_idle()
    clock.now += 100.0
    core.add(make_request("b", [1], max_tokens=1))
    core.step()
    fetch = core.runner.fetch

    def fetch_while_c_arrives(launched):
        core.runner.fetch = fetch
        core.add(make_request("c", [1], max_tokens=1))
        return fetch(launched)

    core.runner.fetch = fetch_while_c_arrives
    core.step()
    clock.now += 2.0
    core.run_until_idle()
    assert core.ledger.since(0)["gap_s"].tolist() == [0.0, 0.0, 2.0]


def test_the_report_carries_one_record_of_the_step_before():
    core = make_core(eos=())
    core.add(make_request("a", [1, 2, 3], max_tokens=2))
    reports = [core.step() for _ in range(3)]
    steps = [np.frombuffer(report.record, STEP_DTYPE)["step"].tolist() for report in reports]
    assert steps == [[], [1], [2]]


def test_slots_show_the_sequence_of_each_seat():
    core = make_core(seats=2, pages=9, page_size=4, budget=6, eos=())
    core.add(make_request("a", [1] * 10, max_tokens=4))
    core.step()
    answer = core.seat_map(7)
    assert answer.ticket == 7
    assert [
        (seat.seat, seat.state, seat.request_id, seat.n_computed, seat.pages)
        for seat in answer.seats
    ] == [(0, "prefill", "a", 6, 3), (1, "free", None, 0, 0)]
    assert list(answer.page_states) == [0, 1, 1, 1, 0, 0, 0, 0, 0]
    core.step()
    assert core.seat_map().seats[0].state == "decode"
