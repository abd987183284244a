"""Cores of engines that share experts, on fake devices: all run the same steps, and everybody gets
the tokens of a solo run.
"""

from __future__ import annotations

import random
import select
import threading
from concurrent.futures import ThreadPoolExecutor

from core_runs import CONTEXT, PAGE_SIZE, PAGES, assert_solo_tokens, random_events
from fakes import FakeClock, FakeRunner, make_core, make_request, tokens_of

from jitney.engine.common.records import Ledger
from jitney.engine.core.distributed.joined import JoinedCore
from jitney.engine.core.distributed.messages import StepSize
from jitney.engine.core.distributed.rounds import Referee, Rounds
from jitney.engine.core.executor.hosts import _bucket_of, _size_of
from jitney.engine.core.scheduler.buckets import Bucket, Buckets
from jitney.engine.core.scheduler.plan import Plan

LIMIT_S = 60.0


class JoinedFake(FakeRunner):
    """A fake device whose steps are those of all."""

    rounds: Rounds
    buckets: Buckets

    def __init__(self, n_pages: int, page_size: int, seats: int):
        super().__init__(n_pages, page_size, seats)
        #: All steps so far, and how many of them it had no row in.
        self.steps: list[Bucket] = []
        self.empty = 0

    def batch(self, plan: Plan):
        plan.bucket = self._agree(_size_of(plan))
        return super().batch(plan)

    def take_part(self) -> None:
        self.empty += 1
        self._agree(None)

    def _agree(self, size: StepSize | None) -> Bucket:
        self.steps.append(_bucket_of(self.rounds.agree(size), self.buckets))
        return self.steps[-1]


def joined_cores(count: int) -> list[tuple[JoinedCore, JoinedFake]]:
    found: list[tuple[JoinedCore, JoinedFake]] = []
    referee = Referee({number: lambda m, at=number: hear(at, m) for number in range(count)})

    def hear(number: int, message) -> None:
        found[number][0].rounds.take(message)

    for number in range(count):
        rounds = Rounds(lambda want, at=number: referee.take(at, want))
        found.append(joined_core(rounds))
    return found


def joined_core(rounds: Rounds) -> tuple[JoinedCore, JoinedFake]:
    clock = FakeClock(tick=0.001)
    core = make_core(
        pages=PAGES,
        page_size=PAGE_SIZE,
        budget=13,
        context=CONTEXT,
        clock=clock,
        device=JoinedFake,
    )
    runner = core.runner
    assert isinstance(runner, JoinedFake)
    runner.rounds, runner.buckets = rounds, core.scheduler.buckets
    joined = JoinedCore(core.scheduler, runner, Ledger(), clock, partner=runner, rounds=rounds)
    return joined, runner


def test_random_lives_beside_each_other():
    engines = joined_cores(3)
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
            core.take_part()

    with ThreadPoolExecutor(3) as pool:
        for job in [pool.submit(live, number) for number in range(3)]:
            job.result(LIMIT_S)
    first, *others = [runner.steps for _, runner in engines]
    assert first and all(steps == first for steps in others)
    assert any(runner.empty for _, runner in engines)


def test_who_has_nothing_to_run_takes_part_and_stays_idle():
    (busy, _), (idle, runner) = joined_cores(2)
    busy.add(make_request("r", [1, 2, 3], max_tokens=5, ignore_eos=True))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(busy.run_until_idle)
        while not answer.done():
            select.select([idle], [], [], 0.01)
            assert not idle.has_work
            idle.take_part()
        assert len(tokens_of(answer.result(), "r")) == 5
    assert runner.empty == len(runner.steps) > 0
    idle.take_part()
    assert runner.empty == len(runner.steps)
    idle.check()
