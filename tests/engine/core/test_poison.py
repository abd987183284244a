"""Steps that fail on a fake device: the guilty request ends, everybody else gets every token."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import history_fakes
import pytest
from core_runs import CONTEXT, LONGEST, PAGE_SIZE, PAGES, cramped_core, random_request
from engine_infos import changed
from fakes import (
    FakeClock,
    FakeRunner,
    Rows,
    StepFailed,
    code_of,
    ends_of,
    make_core,
    make_request,
    solo,
    tokens_of,
    watch,
)

from jitney.engine.common.history import History
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.scheduler.plan import Plan, StepResult
from jitney.engine.core.scheduler.sequence_factory import _sibling_seed

INFO = changed(history_fakes.INFO, context_length=CONTEXT, pages=PAGES, page_size=PAGE_SIZE)


class FaultyRunner(FakeRunner):
    """Fails over some requests. at: where, launch (before or after the device has got the step) or
    fetch. only: the kind of rows that it fails over, prompt or decode.
    """

    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        self.guilty: set[str] = set()
        self.at = "fetch"
        self.only = ""
        #: Rows of a step that there is memory for.
        self.memory = 10_000
        #: So many steps of several sequences fail for no reason.
        self.hiccups = 0
        self.restored = 0
        self.broken = False
        self._bad: list[StepResult] = []

    def launch(self, batch: tuple[list[Rows], dict[int, int], Plan]) -> StepResult:
        bad = self.is_bad(batch[2])
        if batch[2].bucket.tokens > self.memory:
            raise StepFailed("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7 bytes")
        if bad and self.at == "launch":
            raise StepFailed("asked to fail")
        launched = super().launch(batch)
        if bad and self.at == "after launch":
            raise StepFailed("asked to fail")
        if bad:
            self._bad.append(launched)
        return launched

    def is_bad(self, plan: Plan) -> bool:
        if self.hiccups and len(plan.chunks) > 1:
            self.hiccups -= 1
            return True
        hit = [chunk for chunk in plan.chunks if chunk.seq.request_id in self.guilty]
        if self.only:
            hit = [chunk for chunk in hit if chunk.decode == (self.only == "decode")]
        return bool(hit)

    def fetch(self, launched: StepResult) -> StepResult:
        if any(bad is launched for bad in self._bad):
            raise StepFailed("asked to fail")
        return super().fetch(launched)

    def restore(self, error: Exception) -> None:
        if self.broken:
            raise error
        super().restore(error)
        self.restored += 1
        self._bad.clear()


def faulty_core(
    make: Callable[..., EngineCore] = make_core, **settings: Any
) -> tuple[EngineCore, FaultyRunner]:
    core = make(device=FaultyRunner, **settings)
    assert isinstance(core.runner, FaultyRunner)
    return core, core.runner


def run_told(core: EngineCore, requests: list[EngineRequest]) -> list[SequenceOutput]:
    """Run until idle, telling a history, which must end with nobody in a seat."""
    history = History()
    history.core_ready(INFO)
    outputs: list[SequenceOutput] = []
    for request in requests:
        history.submit(request)
        core.add(request)
    for _ in range(5000):
        if not core.has_work:
            break
        report = core.step()
        history.take(report)
        outputs += report.outputs
        core.scheduler.check()
    assert not core.has_work and history.n_open == 0
    assert history.seats == [None] * len(history.seats)
    assert core.scheduler.pool.used == 0
    core.check()
    return outputs


def check_innocent(requests: list[EngineRequest], outputs: list[SequenceOutput]) -> None:
    """Each has all the tokens of a run alone."""
    for request in requests:
        for index in range(request.sampling.n):
            seed = _sibling_seed(request.sampling.seed or 0, index)
            want = solo(request, seed, LONGEST - len(request.prompt))
            assert tokens_of(outputs, request.id, index) == want, (request.id, index)


PLACES = ["launch", "after launch", "fetch"]


@pytest.mark.parametrize(
    ("guilty", "at", "policy"),
    [
        *(("0", "launch", "continuous"), ("2", "after launch", "continuous")),
        *(("4", "fetch", "continuous"), ("0", "fetch", "static"), ("4", "launch", "static")),
        ("2", "after launch", "static"),
    ],
)
def test_the_failing_request_ends_and_the_others_go_on(guilty: str, at: str, policy: str):
    core, device = faulty_core(
        policy=policy, batch_size=3, static_timeout_ms=50.0, clock=FakeClock(tick=0.001)
    )
    device.guilty, device.at = {guilty}, at
    requests = [
        make_request(str(i), [i + 1] * (3 + 5 * i), n=1 + i % 2, max_tokens=9, prompt_logprobs=1)
        for i in range(5)
    ]
    outputs = run_told(core, requests)
    ends = ends_of(outputs)
    bad = [request for request in requests if request.id == guilty]
    check_innocent([request for request in requests if request.id != guilty], outputs)
    for index in range(bad[0].sampling.n):
        end = ends[guilty, index]
        assert (end.finish, code_of(end)) == ("error", "request_failed")
        assert end.error is not None and "asked" not in end.error.message
    prompts = [o for o in outputs if o.prompt_logprobs is not None]
    assert all(len(o.prompt_logprobs or ()) == 3 + 5 * int(o.request_id) for o in prompts)
    assert device.restored == 2  # the step in company, and the trial


def test_the_last_to_board_is_tried_first():
    core, device = faulty_core()
    plans = watch(core)
    for number in range(3):
        core.add(make_request(str(number), [number + 1] * 3, ignore_eos=True))
    for _ in range(4):
        core.step()
    core.add(make_request("bad", [9] * 3))
    device.guilty = {"bad"}
    core.run_until_idle()
    fails = next(i for i, plan in enumerate(plans) if device.is_bad(plan))
    trial = next(plan for plan in plans[fails + 1 :] if len(plan.chunks) == 1)
    assert trial.chunks[0].seq.request_id == "bad"
    core.check()


def test_two_failing_requests_are_found_one_after_the_other():
    core, device = faulty_core()
    device.guilty = {"1", "3"}
    requests = [make_request(str(i), [i + 1] * 4) for i in range(4)]
    outputs = run_told(core, requests)
    check_innocent([requests[0], requests[2]], outputs)
    assert {end.request_id for end in ends_of(outputs).values() if end.error} == {"1", "3"}


@pytest.mark.parametrize("only", ["prompt", "decode"])
@pytest.mark.parametrize("at", PLACES)
def test_a_row_of_either_kind_can_be_the_poison(only: str, at: str):
    core, device = faulty_core()
    device.guilty, device.only, device.at = {"1"}, only, at
    requests = [make_request(str(i), [i + 1] * 4, ignore_eos=True) for i in range(4)]
    outputs = run_told(core, requests)
    check_innocent([requests[0], *requests[2:]], outputs)
    assert code_of(ends_of(outputs)["1", 0]) == "request_failed"


@pytest.mark.parametrize("at", PLACES)
def test_a_failure_that_does_not_come_again_ends_no_request(at: str):
    core, device = faulty_core()
    device.hiccups, device.at = 1, at
    requests = [make_request(str(i), [i + 1] * (3 + 7 * i), n=2) for i in range(4)]
    outputs = run_told(core, requests)
    check_innocent(requests, outputs)
    assert device.restored == 1


def test_too_little_memory_makes_steps_smaller():
    core, device = faulty_core(seats=4, budget=64, context=64, pages=65)
    device.memory = 16
    plans = watch(core)
    requests = [make_request(str(i), [i + 1] * 40, max_tokens=3) for i in range(6)]
    outputs = run_told(core, requests)
    for request in requests:
        assert tokens_of(outputs, request.id) == solo(request, 0, 3)
    too_large = [plan.bucket.tokens for plan in plans if plan.bucket.tokens > 16]
    assert too_large == [64, 32]


def test_steps_grow_again_when_memory_is_back():
    """Not at once, one size at a time, and more rarely where it was for nothing."""
    clock = FakeClock()
    core, device = faulty_core(seats=4, budget=64, context=64, pages=65, clock=clock)
    plans = watch(core)

    def largest(number: int) -> int:
        """Rows of the largest step of a long prompt that comes now."""
        del plans[:]
        request = make_request(str(number), [number] * 60, max_tokens=1)
        outputs = run_told(core, [request])
        assert tokens_of(outputs, request.id) == solo(request, 0, 1)
        return max(plan.bucket.tokens for plan in plans)

    device.memory = 32
    assert largest(1) == 64  # and it failed
    assert largest(2) == 32
    clock.now += 119.0
    assert largest(3) == 32
    clock.now += 2.0
    assert largest(4) == 64  # tried for nothing
    clock.now += 130.0
    assert largest(5) == 32
    clock.now += 120.0
    device.memory = 64
    assert largest(6) == 64
    clock.now += 1000.0
    device.memory = 16
    assert largest(7) == 64
    clock.now += 481.0
    device.memory = 64
    assert [largest(8), largest(9)] == [32, 32], "one size at a time"
    clock.now += 481.0
    assert largest(10) == 64


def test_too_little_memory_for_the_smallest_step_is_the_request_s_fault():
    core, device = faulty_core(seats=4, budget=16)
    device.memory = 7
    outputs = run_told(core, [make_request("long", [1] * 12), make_request("other", [2] * 12)])
    assert {code_of(end) for end in ends_of(outputs).values()} == {"request_failed"}


def test_a_device_that_cannot_be_restored_ends_the_engine():
    core, device = faulty_core()
    device.hiccups, device.broken = 1, True
    for number in (1, 2):
        core.add(make_request(str(number), [number]))
    with pytest.raises(StepFailed):
        core.run_until_idle()


def test_aborts_and_deadlines_end_suspects_like_others():
    clock = FakeClock()
    core, device = faulty_core(clock=clock)
    device.guilty = {"1"}
    requests = [
        make_request(str(i), [i + 1] * 14, ignore_eos=True, deadline=5.0 if i == 2 else None)
        for i in range(4)
    ]
    outputs: list[SequenceOutput] = []
    for request in requests:
        core.add(request)
    while not core.scheduler.isolating_failure:
        outputs += core.step().outputs
    core.abort("3")
    clock.now = 6.0
    outputs += core.run_until_idle()
    ends = ends_of(outputs)
    check_innocent([requests[0]], outputs)
    finishes = [ends[str(i), 0].finish for i in (1, 2, 3)]
    assert finishes == ["error", "deadline", "abort"]
    core.check()


@pytest.mark.parametrize(
    ("seed", "policy"),
    [
        *((0, "continuous"), (1, "continuous"), (2, "continuous"), (3, "continuous")),
        *((4, "static"), (5, "static"), (6, "dynamic"), (7, "dynamic")),
    ],
)
def test_random_requests_and_failures_lose_nothing(seed: int, policy: str):
    """Requests come and go, some of them poison, with pages short and prefixes shared."""
    rng, clock = random.Random(seed), FakeClock(tick=0.001)
    core, device = faulty_core(
        cramped_core,
        policy=policy,
        order=rng.choice(("fcfs", "fair", "shortest")),
        retain=rng.random() < 0.7,
        share_outputs=rng.random() < 0.5,
        static_timeout_ms=100.0,
        clock=clock,
    )
    requests: list[EngineRequest] = []
    outputs: list[SequenceOutput] = []
    for event in range(800):
        kind = rng.random()
        device.at = rng.choice(PLACES)
        if kind < 0.08:
            request = random_request(rng, len(requests), clock.now)
            requests.append(request)
            if rng.random() < 0.15:
                device.guilty.add(request.id)
            core.add(request)
        elif kind < 0.10 and requests:
            core.abort(rng.choice(requests[-8:]).id, rng.choice((None, 0)))
        elif kind < 0.11:
            device.hiccups += 1
        else:
            outputs += core.step().outputs
        if event % 5 == 0:
            core.scheduler.check()
    outputs += core.run_until_idle(20_000)
    core.check()
    assert device.restored > 3 and core.scheduler.pool.used == 0
    ends = ends_of(outputs)
    assert set(ends) == {(r.id, i) for r in requests for i in range(r.sampling.n)}
    for request in requests:
        for index in range(request.sampling.n):
            check_life(request, index, ends[request.id, index], outputs, device.guilty)


def check_life(
    request: EngineRequest,
    index: int,
    end: SequenceOutput,
    outputs: list[SequenceOutput],
    guilty: set[str],
) -> None:
    """Only the guilty fail; everybody's tokens are the beginning of a run alone, or all of it."""
    assert code_of(end) != "internal_error"
    if code_of(end) == "request_failed":
        assert request.id in guilty
    if code_of(end) == "context_length_exceeded":
        return
    seed = _sibling_seed(request.sampling.seed or 0, index)
    want = solo(request, seed, LONGEST - len(request.prompt))
    got = tokens_of(outputs, request.id, index)
    assert got == want[: len(got)]
    if end.finish in ("stop", "length"):
        assert got == want and request.id not in guilty


def test_a_suspect_of_the_background_runs_although_a_live_request_waits():
    """Nothing else may run before it has: the engine would stand still for good."""
    core, runner = faulty_core(seats=2, eos=())
    early = [make_request(f"b{i}", [i + 1] * 4, max_tokens=12, background=True) for i in range(2)]
    for request in early:
        core.add(request)
    for _ in range(4):
        core.step()
    assert len(core.scheduler.sequences.seats.decoding) == 2
    runner.hiccups = 1
    outputs = [*core.step().outputs, *core.step().outputs]
    assert not runner.hiccups
    live = [make_request(f"live{i}", [9] * 4, max_tokens=3) for i in range(3)]
    for request in live:
        core.add(request)
    for _ in range(200):
        outputs += core.step().outputs
    assert {name for name, _ in ends_of(outputs)} == {one.id for one in (*early, *live)}
