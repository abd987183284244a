"""Sizes by what steps take: what is chosen for machines that are made up, and one real measurement
of a small model.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitney.engine.common.errors import JitneyError
from jitney.engine.common.other_work import OtherWork
from jitney.engine.config.layers import ResolvedConfig
from jitney.engine.config.schema import Config, EngineSection, _ModelSection
from jitney.engine.core.measuring.made_up_steps import StepCase
from jitney.engine.core.scheduler.buckets import Bucket, Buckets
from jitney.engine.lab.bench import sizes, sizes_worker, timing_behind
from jitney.engine.lab.bench.sizes import (
    NoTimeLeft,
    OtherPrograms,
    SizeTimes,
    Timed,
    TimingLine,
    _best_size,
    _measure_sizes,
    _SizeRule,
    time_apart,
)
from jitney.engine.lab.bench.sizes_worker import _prompt_chunks, _StepTimer
from jitney.engine.lab.bench.timing_behind import TimingBehind
from jitney.engine.lab.tuned_sizes import _FROM_MEASURED, _MEASURED, MeasuredTimes

Seconds = Callable[[int], float]


def linear(first_s: float, row_s: float) -> Seconds:
    return lambda rows: first_s + row_s * rows


LINEAR = linear(0.02, 0.001)


@dataclass
class Machine:
    """Its steps take what two functions of their rows say, in seconds with both threads."""

    decode: Seconds = LINEAR
    prompts: Seconds = LINEAR
    #: Times as long that a step takes with one thread.
    alone: float = 1.9
    #: Engines whose steps there is time to time.
    most: int = 1000
    #: Times as long that a step of so many rows takes if its products are ours; None: no product
    #: has a choice.
    ours: Seconds | None = None
    #: Times as long that a step takes with the reference, where nobody measured that; 0: somebody
    #: did.
    plain: float = 0.0
    #: Settings whose steps were timed, in turn.
    asked: list[EngineSection] = field(default_factory=list)

    async def time_steps(self, config: Config) -> SizeTimes:
        engine = config.engine
        if len(self.asked) == self.most:
            raise NoTimeLeft("enough")
        self.asked.append(engine)
        threads = engine.threads or 2
        slower = self.alone if threads == 1 else 1.0
        if engine.kernels == "reference":
            slower *= self.plain
        buckets = Buckets.of(
            max_seats=engine.max_seats,
            token_budget=engine.token_budget,
            seat_sizes=engine.seat_buckets,
            token_sizes=engine.token_buckets,
        )
        decode = [bucket.tokens for bucket in buckets.decode]
        prompts = [bucket.tokens for bucket in buckets.mixed]

        def seconds(rows: int, of: Seconds) -> float:
            if self.ours is None or not 8 < rows <= engine.product_rows:
                return slower * of(rows)
            return slower * of(rows) * self.ours(rows)

        return SizeTimes(
            threads,
            tuple(Timed(rows, seconds(rows, self.decode)) for rows in decode),
            tuple(Timed(rows, seconds(rows, self.prompts)) for rows in prompts),
            rows_choose=self.ours is not None and engine.kernels == "auto",
            untried=self.plain > 0 and engine.kernels == "auto",
        )

    def chosen(self, engine: EngineSection | None = None) -> Mapping[str, object]:
        config = Config(engine=engine or EngineSection())
        return asyncio.run(_measure_sizes(config, self.time_steps)).values


def rule(limit_s: float, usual: int) -> _SizeRule:
    """Larger sizes than the usual one may take half as long, and must bring a tenth more."""
    return _SizeRule(usual, limit_s, larger_limit_s=limit_s / 2, worth=1.1)


_STEPS = {1: 0.1, 2: 0.12, 4: 0.19, 8: 0.3}


@pytest.mark.parametrize(
    ("seconds", "limit_s", "usual", "best"),
    [
        (_STEPS, 0.2, 8, 4),
        (_STEPS, 1.0, 8, 8),
        # All are too slow: the one that takes hardly longer than the smallest.
        ({1: 3.0, 2: 4.0, 4: 6.0}, 0.2, 4, 2),
        # A larger size than the usual one must be quicker.
        (_STEPS, 0.5, 2, 4),
        (_STEPS, 0.6, 2, 8),
        # Up to the usual size, a step must bring about as much.
        ({1: 0.1, 2: 0.2, 4: 0.41}, 1.0, 4, 4),
        ({1: 0.1, 2: 0.2, 4: 0.41}, 1.0, 2, 2),
        # 2 bring too little; 4 bring nine tenths of what 1 brings again.
        ({1: 0.1, 2: 0.25, 4: 0.44}, 1.0, 4, 4),
        ({1: 0.1, 2: 0.25, 4: 0.46}, 1.0, 4, 1),
        # Beyond it, each doubling must bring a tenth more.
        ({2: 0.1, 4: 0.18, 8: 0.36}, 1.0, 2, 4),
        ({2: 0.1, 4: 0.18, 8: 0.32}, 1.0, 2, 8),
        ({2: 0.1, 4: 0.19, 8: 0.34}, 1.0, 2, 2),
        ({2: 0.1, 4: 0.19, 8: 0.33}, 1.0, 2, 8),
    ],
)
def test_a_size_is_quick_and_brings_more(
    seconds: dict[int, float], limit_s: float, usual: int, best: int
):
    steps = [Timed(size, step_s) for size, step_s in seconds.items()]
    assert _best_size(steps, rule(limit_s, usual)) == best


def test_a_slow_machine_has_fewer_seats_and_rows():
    machine = Machine(linear(0.1, 0.01), linear(0.1, 0.004))
    values = machine.chosen()
    assert values["max_seats"] == 8  # 0.18 s; 16 take 0.26
    assert values["token_budget"] == 64  # 0.36 s; 128 take 0.61
    assert values["token_buckets"] == (16, 32, 64)


def test_where_rows_cost_what_they_bring_the_usual_sizes_are_best():
    """One seat does all that 32 do, 64 rows all that 512 do: as they are, prompts wait less."""
    machine = Machine(linear(0.0, 0.001), linear(0.0, 0.0001))
    values = machine.chosen()
    assert "max_seats" not in values and "token_budget" not in values


def test_a_bucket_that_saves_nothing_is_no_program():
    """Up to 64 rows take the same; so do 4 and 8 seats."""
    machine = Machine(
        lambda rows: 0.02 + 0.003 * max(8, rows), lambda rows: 0.02 + 0.0005 * max(64, rows)
    )
    values = machine.chosen()
    assert values["token_buckets"] == (64, 128, 256, 512)
    assert values["seat_buckets"] == (8, 16, 32)


def test_a_second_thread_that_does_not_help_is_left_to_others():
    assert Machine(alone=1.02).chosen()["threads"] == 1
    assert "threads" not in Machine(alone=1.2).chosen()


def test_products_are_ours_up_to_the_rows_where_xlas_are_quicker():
    machine = Machine(ours=lambda rows: 0.9 if rows <= 64 else 1.2)
    assert machine.chosen()["product_rows"] == 64
    assert [engine.product_rows for engine in machine.asked][:3] == [8, 1 << 20, 64]


def test_products_of_any_number_of_rows_are_ours_where_none_of_xlas_is_quicker():
    assert Machine(ours=lambda rows: 1.02).chosen()["product_rows"] == 1 << 20
    assert "product_rows" not in Machine(ours=lambda rows: 1.2).chosen()
    assert "product_rows" not in Machine().chosen()


def test_product_rows_that_are_given_stay():
    machine = Machine(ours=lambda rows: 0.5)
    assert "product_rows" not in machine.chosen(EngineSection(product_rows=16))
    assert {engine.product_rows for engine in machine.asked} == {16}


def test_kernels_that_nobody_measured_serve_where_they_are_quicker():
    assert "kernels" not in Machine(plain=1.3).chosen()
    machine = Machine(plain=0.9)
    assert machine.chosen()["kernels"] == "reference"
    assert [engine.kernels for engine in machine.asked][:3] == ["auto", "reference", "reference"]
    # Who asks for them gets them.
    assert "kernels" not in Machine(plain=0.9).chosen(EngineSection(kernels="native"))


def test_what_was_timed_decides_where_no_time_is_left():
    fast = Machine(linear(0.01, 0.0001), linear(0.01, 0.00001), ours=lambda rows: 0.5, most=1)
    values = fast.chosen()
    assert not {"max_seats", "token_budget", "threads", "product_rows"} & set(values)
    even = linear(0.05, 0.003), linear(0.05, 0.0005)
    assert Machine(*even, alone=1.0, most=2).chosen()["threads"] == 1
    assert "threads" not in Machine(*even, alone=1.0, most=1).chosen()


class Shares:
    """Stands in for `OtherWork`: what other programs use, look by look."""

    def __init__(self, *shares: float):
        self.shares = iter(shares)

    def __call__(self, processors: Iterable[int]) -> Shares:
        return self

    def share(self) -> float:
        return next(self.shares)


def timed_beside(
    monkeypatch: pytest.MonkeyPatch, *shares: float
) -> tuple[list[Timed], list[TimingLine]]:
    """Steps of 4 and 8 rows that take as many milliseconds, and what is said of them."""
    monkeypatch.setattr(sizes_worker, "OtherWork", Shares(*shares))
    monkeypatch.setattr(sizes_worker, "_REST_S", 0.0)
    monkeypatch.setattr(
        sizes_worker, "_least_seconds", lambda llm, case: 0.001 * case.bucket.tokens
    )
    said: list[TimingLine] = []
    timer = _StepTimer(cast(Any, None), {("prompts", 4): Timed(4, 9.0)}, said.append)
    steps = []
    with contextlib.suppress(OtherPrograms):
        steps.extend(timer.timed("decode", [StepCase(Bucket(rows, rows)) for rows in (4, 8)]))
    return steps, said


def test_a_step_beside_other_work_is_timed_again(monkeypatch: pytest.MonkeyPatch):
    steps, said = timed_beside(monkeypatch, 0.05, 0.4, 0.3, 0.1)
    assert steps == [Timed(4, 0.004), Timed(8, 0.008)]
    assert [line.step.step for line in said if line.step] == steps


def test_what_was_timed_before_other_work_came_is_not_lost(monkeypatch: pytest.MonkeyPatch):
    _, said = timed_beside(monkeypatch, 0.05, *[0.4] * 99)
    assert [line.step.step for line in said if line.step] == [Timed(4, 0.004)]
    assert said[-1] == TimingLine(other_work=0.4)


def test_work_of_others_is_what_processors_did_beyond_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In hundredths of a second: user, nice, system, idle, iowait, irq, softirq, steal, guest,
    guest_nice, of which the last two are in the first two already.
    """
    assert os.sysconf("SC_CLK_TCK") == 100
    own = iter([5.0, 5.5, 6.0, 6.0, 6.0])
    monkeypatch.setattr(time, "process_time", lambda: next(own))
    stat = tmp_path / "stat"
    stat.write_text("cpu 9 9 9 9\ncpu0 100 0 0 900 0 0 0 0 50 0\ncpu1 0 0 0 0 0 0 0 0 0 0\n")
    others = OtherWork([0], stat)
    # Two seconds later: one was idle, half a second is ours, half somebody else's.
    stat.write_text("cpu 9 9 9 9\ncpu0 150 10 10 950 50 5 5 20 99 0\ncpu1 900 0 0 0 0 0 0 0 0 0\n")
    assert others.share() == pytest.approx(0.25)
    stat.write_text("cpu0 100 0 0 1100 0 0 0 0 50 0\n")
    assert others.share() == 0.0  # ours alone
    assert OtherWork([0], tmp_path / "none").share() == 0.0


steps = st.builds(linear, st.floats(1e-5, 2.0), st.floats(0.0, 0.05))


@given(decode=steps, prompts=steps, alone=st.floats(0.5, 3.0))
def test_what_is_chosen_is_a_configuration(decode: Seconds, prompts: Seconds, alone: float):
    values = Machine(decode, prompts, alone).chosen()
    assert set(values) <= _MEASURED
    engine = ResolvedConfig.load().with_values(values, _FROM_MEASURED).config.engine
    assert 4 <= engine.max_seats <= 128
    assert 2 * engine.max_seats <= engine.token_budget <= 2048
    if engine.max_seats > 4:
        assert decode(engine.max_seats) <= max(0.2, 1.5 * decode(1))
    if engine.token_budget > 2 * engine.max_seats:
        limit = 0.5 if engine.token_budget <= 512 else 0.3
        assert prompts(engine.token_budget) <= max(limit, 1.5 * prompts(16))


def test_many_prompt_rows_are_several_prompts():
    assert _prompt_chunks(Bucket(tokens=256, seats=32), 512, 100) == ((0, 256),)
    assert _prompt_chunks(Bucket(tokens=1024, seats=32), 512, 100) == ((0, 512), (0, 512))
    assert _prompt_chunks(Bucket(tokens=64, seats=16), 63, 100) == ((0, 63), (0, 1))
    # As many as there are seats, and pages.
    assert _prompt_chunks(Bucket(tokens=2048, seats=3), 512, 100) == ((0, 512),) * 3
    assert _prompt_chunks(Bucket(tokens=2048, seats=32), 512, 2) == ((0, 512),) * 2


#: The worker of sizes without its low priority: beside other tests it might not run for minutes.
PROMPT_WORKER = """
import os, runpy
os.nice = int
runpy.run_module("jitney.engine.lab.bench.sizes_worker", run_name="__main__")
"""


async def start_promptly(module: str, **options: Any) -> asyncio.subprocess.Process:
    """Stands in for `start_child`."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", PROMPT_WORKER, stdin=pipe, stdout=pipe, **options
    )


def state_of(process: int) -> str:
    """As Linux writes it: R and S go on, T stands still."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.usefixtures("hurried_processes")
def test_steps_are_timed_behind_an_engine_in_a_process_that_stands_still_while_it_is_busy(
    monkeypatch: pytest.MonkeyPatch,
):
    """Of steps of 4 and of 8 sequences, those of 4 are known."""
    engine = EngineSection(
        platform="cpu",
        kernels="reference",
        max_seats=8,
        token_budget=64,
        seat_buckets=(4, 8),
        token_buckets=(64,),
        pages=9,  # one is nobody's
        threads=1,
    )
    model = _ModelSection(id="tiny-random", dtype="float32", context=64)
    config = Config(model=model, engine=engine)
    kept = MeasuredTimes({"1 8 reference decode 4": 0.7, "2 8 reference decode 8": 0.9})
    keeps: list[int] = []
    beside_others = partial(time_apart, most_other_work=1.0)
    monkeypatch.setattr(timing_behind, "time_apart", beside_others)
    monkeypatch.setattr(sizes, "start_child", start_promptly)
    timing = TimingBehind(kept, lambda: keeps.append(len(kept.steps)))
    timing.hold(True)

    async def work() -> SizeTimes:
        timed = asyncio.create_task(timing.time_steps(config))
        while timing._process is None:
            await asyncio.sleep(0.01)
        while state_of(timing._process.pid) != "T":
            await asyncio.sleep(0.01)
        timing.hold(False)
        return await timed

    times = asyncio.run(work())
    assert times.threads == 1
    assert [step.size for step in times.decode] == [4, 8]
    assert [step.size for step in times.prompts] == [64]
    assert times.decode[0].seconds == 0.7, "known, and not timed again"
    assert all(step.seconds > 0 for step in (*times.decode, *times.prompts))
    assert keeps == [3, 4, 4], "each as soon as it is timed, and the whole"
    assert kept.spent_s > 0

    # Nothing is timed that is kept, and nothing else once that took long enough.
    kept.spent_s = 15.0
    assert asyncio.run(timing.time_steps(config)) == times
    other = config.model_copy(update={"engine": engine.model_copy(update={"product_rows": 4})})
    with pytest.raises(NoTimeLeft):
        asyncio.run(timing.time_steps(other))


def test_what_cannot_be_timed_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sizes, "start_child", start_promptly)
    config = Config(model=_ModelSection(id="/no/such/model"), engine=EngineSection(platform="cpu"))
    with pytest.raises(JitneyError, match=r"^steps cannot be timed: .*/no/such/model") as caught:
        asyncio.run(time_apart(config))
    assert "\n" not in str(caught.value)
