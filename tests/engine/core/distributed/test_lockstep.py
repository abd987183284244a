"""Cores of engines that share experts, on fake devices: all run the same steps, and everybody gets
the tokens of a solo run.
"""

from __future__ import annotations

import random
import select
import threading
from concurrent.futures import ThreadPoolExecutor

from core_runs import assert_solo_tokens, cramped_core, random_events
from fakes import FakeClock, FakeRunner, make_request, tokens_of

from jitney.engine.common.records import Ledger
from jitney.engine.core.distributed.lockstep import LockstepCore
from jitney.engine.core.distributed.messages import StepSize
from jitney.engine.core.distributed.step_barrier import Coordinator, StepBarrier
from jitney.engine.core.executor.hosts import _bucket_of, _size_of
from jitney.engine.core.scheduler.buckets import Bucket, Buckets
from jitney.engine.core.scheduler.plan import Plan

LIMIT_S = 60.0


class LockstepFake(FakeRunner):
    """A fake device whose steps are those of all."""

    barrier: StepBarrier
    buckets: Buckets

    def __init__(self, n_pages: int, page_size: int, seats: int):
        super().__init__(n_pages, page_size, seats)
        #: All steps so far, and how many of them it had no row in.
        self.steps: list[Bucket] = []
        self.empty = 0

    def batch(self, plan: Plan):
        plan.bucket = self._agree(_size_of(plan))
        return super().batch(plan)

    def run_empty_step(self) -> None:
        self.empty += 1
        self._agree(None)

    def _agree(self, size: StepSize | None) -> Bucket:
        self.steps.append(_bucket_of(self.barrier.agree(size), self.buckets))
        return self.steps[-1]


def lockstep_cores(count: int) -> list[tuple[LockstepCore, LockstepFake]]:
    found: list[tuple[LockstepCore, LockstepFake]] = []
    coordinator = Coordinator({number: lambda m, at=number: hear(at, m) for number in range(count)})

    def hear(number: int, message) -> None:
        found[number][0].barrier.take(message)

    for number in range(count):
        barrier = StepBarrier(lambda want, at=number: coordinator.take(at, want))
        found.append(lockstep_core(barrier))
    return found


def lockstep_core(barrier: StepBarrier) -> tuple[LockstepCore, LockstepFake]:
    clock = FakeClock(tick=0.001)
    core = cramped_core(
        clock=clock,
        device=LockstepFake,
    )
    runner = core.runner
    assert isinstance(runner, LockstepFake)
    runner.barrier, runner.buckets = barrier, core.scheduler.buckets
    joined = LockstepCore(
        core.scheduler, runner, Ledger(), clock, lockstep_runner=runner, barrier=barrier
    )
    return joined, runner


def test_engines_in_lockstep_lose_no_random_request():
    engines = lockstep_cores(3)
    left = [3]
    counting = threading.Lock()

    def live(number: int) -> None:
        core, _ = engines[number]
        assert isinstance(core.clock, FakeClock)
        requests, outputs = random_events(core, core.clock, random.Random(number), 300)
        assert_solo_tokens(requests, outputs)
        with counting:
            left[0] -= 1
        while left[0]:
            select.select([core], [], [], 0.01)
            core.run_empty_step()

    with ThreadPoolExecutor(3) as pool:
        for job in [pool.submit(live, number) for number in range(3)]:
            job.result(LIMIT_S)
    first, *others = [runner.steps for _, runner in engines]
    assert first and all(steps == first for steps in others)
    assert any(runner.empty for _, runner in engines)


def test_an_engine_without_work_takes_part_and_stays_idle():
    (busy, _), (idle, runner) = lockstep_cores(2)
    busy.add(make_request("r", [1, 2, 3], max_tokens=5, ignore_eos=True))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(busy.run_until_idle)
        while not answer.done():
            select.select([idle], [], [], 0.01)
            assert not idle.has_work
            idle.run_empty_step()
        assert len(tokens_of(answer.result(), "r")) == 5
    assert runner.empty == len(runner.steps) > 0
    idle.run_empty_step()
    assert runner.empty == len(runner.steps)
    idle.check()
