"""Made-up steps: a step of given rows and contexts on an engine's runner, without a scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitney.engine.common.requests import EngineRequest, SamplingParams
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.scheduler.buckets import Bucket
from jitney.engine.core.scheduler.plan import Chunk, Plan, StepResult, StepWork
from jitney.engine.core.scheduler.sequence import Sequence

_GREEDY = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class StepCase:
    """One made-up step."""

    bucket: Bucket
    #: Contexts of its decode rows.
    decode: tuple[int, ...] = ()
    #: (start, rows) of its prompt chunks.
    prompts: tuple[tuple[int, int], ...] = ()

    @property
    def positions(self) -> int:
        """KV positions of all its sequences."""
        prompts = sum(start + count for start, count in self.prompts)
        return sum(self.decode) + len(self.decode) + prompts

    def plan(self, number: int, page_size: int) -> Plan:
        """The step as a plan whose sequences have just boarded, each with its own pages."""
        rows = [(length, 1, True) for length in self.decode]
        rows += [(start, count, False) for start, count in self.prompts]
        chunks = []
        page = 1  # 0 is trash
        for seat, (start, count, decode) in enumerate(rows):
            # A decoding row's token is still on the device, as in the engine.
            tokens = [1] * (start if decode else start + count)
            name = f"{number}-{seat}"
            request = EngineRequest(id=name, prompt=tokens, sampling=_GREEDY, arrival=0.0)
            last = page - (-(start + count) // page_size)
            pages = list(range(page, last))
            seq = Sequence(request, 0, 0, tokens, 1, seat=seat, pages=pages)
            page = last
            chunks.append(Chunk(seq, start, count, decode=decode, sample=True))
        boarded = [chunk.seq for chunk in chunks]
        return Plan(number, chunks, self.bucket, True, StepWork.of(chunks), boarded=boarded)

    def on(self, core: EngineCore, number: int = 0) -> MadeUpStep:
        """The step on an idle engine. number: different for steps that run in turn."""
        plan = self.plan(number, core.scheduler.pool.page_size)
        return MadeUpStep(self, plan, core.runner)


@dataclass(frozen=True, slots=True)
class MadeUpStep:
    """A made-up step on an engine's runner, whose three calls are timed one by one."""

    case: StepCase
    _plan: Plan
    _runner: Any

    @property
    def work(self) -> StepWork:
        return self._plan.work

    @property
    def n_pages(self) -> int:
        """Pages of all its sequences."""
        return sum(len(chunk.seq.pages) for chunk in self._plan.chunks)

    def batch(self) -> Any:
        """Pack its inputs, for `launch`."""
        return self._runner.batch(self._plan)

    def launch(self, batch: Any) -> Any:
        """Start it without waiting, and return what `fetch` takes."""
        return self._runner.launch(batch)

    def fetch(self, launched: Any) -> StepResult:
        """Wait for its result."""
        return self._runner.fetch(launched)
