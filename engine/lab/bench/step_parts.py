"""Times of the parts of a step, by the clocks of the native kernels: products, head, attention,
norms, rotation, and the rest of the step.

A kernel adds the time of each of its calls to one sum per part. Steps run one after the other here,
without overlap, so the growth of the sums is the time of one step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jitney.engine.common.requests import JsonDict
from jitney.engine.core import Buckets, MadeUpStep, StepCase
from jitney.engine.lab.simulation.roofline import ModelCost

if TYPE_CHECKING:
    from jitney.engine.core import LLM, ModelConfig

#: Decoding seats, each in the smallest bucket that holds them.
_SEATS = (1, 8, 32)
#: Contexts of decoding rows, if the pool and the model allow them: the first for all seat counts,
#: the others for few seats, where pages are most of the bytes that a step reads.
_CONTEXTS = (384, 1024, 4096, 8192)
_FEW_SEATS = 8
#: Context of the rows that decode beside a prompt.
_BESIDE = 384
#: Seconds of each part so far.
_Clock = Callable[[], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class _PartTimes:
    """Times of a step, in seconds."""

    whole: float
    #: Part's name in the kernels -> seconds; their sum is at most the whole.
    parts: Mapping[str, float]

    @property
    def rest(self) -> float:
        """Seconds outside kernels: XLA's own programs, sampling, the launch and the host."""
        return self.whole - sum(self.parts.values())


def measure_parts(llm: LLM, config: ModelConfig, repeats: int) -> list[JsonDict]:
    """A row for each measured step as JSON; none if the kernels have no clocks, or if several
    devices run them in parallel.
    """
    runner: Any = llm.core.runner
    clock = runner.programs.step.kernels.part_seconds
    if clock is None or llm.info.device.tensor_parallel > 1:
        return []
    pool, info = llm.core.scheduler.pool, llm.info
    buckets = llm.core.scheduler.buckets
    number = "f32" if info.formats.dtype == "float32" else "bf16"
    kv_bytes = ModelCost(config, number, number).kv_bytes
    rows = []
    for turn, case in enumerate(_part_cases(buckets, info.model.context_length)):
        step = case.on(llm.core, turn)
        if step.n_pages <= pool.capacity:
            rows.append(_row_of(step, _timed(step, clock, repeats), kv_bytes))
    return rows


def _part_cases(buckets: Buckets, context: int) -> list[StepCase]:
    """Steps of only decoding seats, of only a prompt, and of a prompt with decoding seats."""
    made: dict[StepCase, None] = {}  # in order, each once
    for seats in _SEATS:
        made |= dict.fromkeys(_decode_cases(buckets, seats, context))
    bucket = buckets.mixed[-1]
    made[StepCase(bucket, (), ((0, min(bucket.tokens, context - 1)),))] = None
    beside = min(bucket.seats - 1, bucket.tokens // 2)
    if beside:
        decode = (min(_BESIDE, context - 1),) * beside
        chunk = (0, min(bucket.tokens - beside, context - 1))
        made[StepCase(bucket, decode, (chunk,))] = None
    return list(made)


def _decode_cases(buckets: Buckets, seats: int, context: int) -> Iterator[StepCase]:
    fitting = [bucket for bucket in buckets.decode if bucket.seats >= seats]
    if not fitting:
        return
    contexts = _CONTEXTS if seats <= _FEW_SEATS else _CONTEXTS[:1]
    for length in contexts:
        yield StepCase(fitting[0], (min(length, context - 1),) * seats)


def _timed(step: MadeUpStep, clock: _Clock, repeats: int) -> _PartTimes:
    """The mean of the fastest quarter of the repeats, after one that does not count: other work
    makes steps longer, and some parts more than others.
    """
    _once(step, clock)
    times = [_once(step, clock) for _ in range(repeats)]
    times.sort(key=lambda one: one.whole)
    return _mean(times[: -(-repeats // 4)])


def _once(step: MadeUpStep, clock: _Clock) -> _PartTimes:
    batch = step.batch()
    before = clock()
    started = time.perf_counter()
    step.fetch(step.launch(batch))
    whole = time.perf_counter() - started
    return _PartTimes(whole, {name: now - before[name] for name, now in clock().items()})


def _mean(times: Sequence[_PartTimes]) -> _PartTimes:
    parts = {name: float(np.mean([one.parts[name] for one in times])) for name in times[0].parts}
    return _PartTimes(float(np.mean([one.whole for one in times])), parts)


def _row_of(step: MadeUpStep, times: _PartTimes, kv_bytes: float) -> JsonDict:
    """The row of the report. kv_bytes: KV bytes per position."""
    return {
        "bucket": str(step.case.bucket),
        "decode": step.work.decode,
        "prompt": step.work.prompt,
        "keys": step.work.keys,
        "step_s": times.whole,
        "parts_s": dict(times.parts),
        "rest_s": times.rest,
        "kv_read_bytes": step.work.keys * kv_bytes,
    }
