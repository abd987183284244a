"""Live traffic with and without a batch, on a device whose steps take as long as a CPU's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from fakes import FakeClock, FakeRunner, make_core, make_request

from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.scheduler.plan import Plan, StepResult

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

#: Seconds of a step by its rows: those of SmolLM2-135M on two cores of an AMD EPYC, about.
DECODE = {1: 0.022, 4: 0.026, 8: 0.030, 16: 0.042, 32: 0.065}
MIXED = {64: 0.060, 128: 0.100, 256: 0.190, 512: 0.400}
SECONDS = 80.0


class TimedRunner(FakeRunner):
    """Steps run one after the other, and take their time; what they bring is nothing much."""

    clock: FakeClock

    def __init__(self, n_pages: int, page_size: int, seats: int):
        super().__init__(n_pages, page_size, seats)
        #: When the last step that was launched ends, and all that were not fetched.
        self.free_at = 0.0
        self.ends: list[float] = []

    def batch(self, plan: Plan) -> Any:
        return plan

    def launch(self, batch: Any) -> StepResult:
        table = DECODE if batch.bucket.decode_only else MIXED
        self.free_at = max(self.free_at, self.clock.now) + table[batch.bucket.tokens]
        self.ends.append(self.free_at)
        return StepResult([1] * batch.logit_rows)

    def fetch(self, launched: StepResult) -> StepResult:
        self.clock.now = max(self.clock.now, self.ends.pop(0))
        return launched


@dataclass
class Run:
    """What came of it."""

    #: Seconds to the first token of each live request.
    first_token_s: list[float]
    #: Lines of the batch that were answered.
    lines: int


def timed_core() -> tuple[EngineCore, FakeClock]:
    clock = FakeClock()
    core = make_core(
        seats=32,
        pages=2000,
        page_size=16,
        budget=512,
        context=1024,
        eos=(),
        retain=False,
        clock=clock,
        device=TimedRunner,
        prefill_share="auto",
    )
    assert isinstance(core.runner, TimedRunner)
    core.runner.clock = clock
    return core, clock


def live(rate: float, seed: int) -> list[tuple[float, int, int]]:
    """(when, prompt tokens, output tokens) of each request."""
    rng, at, arrivals = random.Random(seed), 0.0, []
    while at < SECONDS:
        at += rng.expovariate(rate)
        prompt = min(400, max(4, round(rng.lognormvariate(4.4, 0.5))))
        arrivals.append((at, prompt, max(4, round(rng.lognormvariate(3.1, 0.5)))))
    return arrivals


def run(rate: float, *, beside: bool, seed: int = 2) -> Run:
    core, clock = timed_core()
    rng = random.Random(seed)
    waiting, arrived, first, lines, open_lines = live(rate, seed), {}, [], 0, 0
    while waiting or arrived:
        while waiting and waiting[0][0] <= clock.now:
            at, prompt, output = waiting.pop(0)
            id = f"l{at}"
            arrived[id] = at
            ids = [rng.randrange(40) for _ in range(prompt)]
            core.add(make_request(id, ids, max_tokens=output, arrival=at))
        while beside and open_lines < 32:
            ids = [rng.randrange(40) for _ in range(rng.randint(20, 90))]
            id = f"b{lines + open_lines}-{clock.now}"
            core.add(make_request(id, ids, max_tokens=rng.randint(4, 30), background=True))
            open_lines += 1
        if not core.has_work:
            clock.now = waiting[0][0]
            continue
        for output in core.step().outputs:
            if output.request_id.startswith("b"):
                ended = output.finish is not None
                lines, open_lines = lines + ended, open_lines - ended
            elif output.request_id in arrived and output.tokens:
                first.append(clock.now - arrived.pop(output.request_id))
    return Run(first, lines)


@pytest.mark.parametrize("rate", [2.0, 3.0])
def test_first_tokens_are_hardly_later_beside_a_batch(rate: float):
    alone, beside = run(rate, beside=False), run(rate, beside=True)
    assert len(alone.first_token_s) == len(beside.first_token_s) > 0.7 * rate * SECONDS
    later = np.quantile(beside.first_token_s, 0.99) / np.quantile(alone.first_token_s, 0.99)
    assert later <= 1.2
    assert beside.lines > SECONDS, "the batch goes on all the same"
