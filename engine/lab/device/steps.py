"""Measures whole steps of a model with random weights, through the engine's own runner.

Bytes of a step are those of `RandomEngine`; operations are counted as in
`engine.lab.simulation.roofline`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median

import jax.numpy as jnp
from jax.typing import DTypeLike
from msgspec.structs import replace

from jitney.engine.core import Bucket, Buckets, RandomEngine, RandomModel, StepCase, StepWork
from jitney.engine.lab.device.rows import PartJob, Row, Task, Tasks
from jitney.engine.lab.device.timing import repeated
from jitney.engine.lab.simulation.roofline import ModelCost
from jitney.kernels.interface import KernelSet

#: Bytes.
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class StepBench:
    """An engine with random weights, and the operations of its steps."""

    engine: RandomEngine
    cost: ModelCost

    @classmethod
    def of(cls, job: PartJob, model: RandomModel, buckets: Buckets, context: int) -> StepBench:
        """See `RandomEngine.of`."""
        engine = RandomEngine.of(model, buckets, page_size=job.page_size, context=context)
        return cls(engine, ModelCost(model.config))

    def operations(self, bucket: Bucket, work: StepWork) -> float:
        """Least operations: those of its rows, without padding."""
        sampled = min(bucket.seats, work.decode or 1)
        return sum(self.cost.operations(work.decode + work.prompt, sampled, work))


def _step_row(
    job: PartJob,
    get: Callable[[], StepBench],
    group: Sequence[Bucket],
    case: StepCase,
    row: Row,
) -> Iterator[Row]:
    """Measure one step; `group` is compiled together with its bucket."""
    bench = get()
    engine = bench.engine
    needed = _room_of(case, engine.page_size)
    if needed > engine.positions:
        yield row.noted(_no_room(engine, needed))
        return
    engine.compile(group)
    step = engine.step(case)
    step.check()
    work = step.work
    samples = repeated(lambda _: step.run(), None, job.sizes.sample_s)
    floor_s, bound = job.measured.of(engine.floor_bytes(work), bench.operations(case.bucket, work))
    figures = {"tokens_s": (work.decode + work.prompt) / median(samples)}
    yield replace(row.timed(samples), floor_s=floor_s, bound=bound, figures=figures)


def _no_room(engine: RandomEngine, positions: int) -> str:
    """Note for a pool that is too small. positions: KV positions that the case needs."""
    needed = positions * engine.row_bytes / _GIB
    room = engine.positions * engine.row_bytes / _GIB
    return f"does not fit: {needed:.1f} GiB of keys and values, room for {room:.1f}"


def _room_of(case: StepCase, page: int) -> int:
    """KV positions of a case, in whole pages."""
    lengths = [length + 1 for length in case.decode]
    lengths += [start + count for start, count in case.prompts]
    return sum(math.ceil(length / page) * page for length in lengths)


def short_steps(job: PartJob, sets: Sequence[KernelSet], dtype: DTypeLike) -> Tasks:
    """Decode steps of few seats and short contexts, which count for the goal."""
    model, sizes = RandomModel(job.config, sets[0], dtype), job.sizes
    yield from _decode_tasks(job, model, sizes.steps[:1], sizes.contexts[0])


def long_steps(job: PartJob, sets: Sequence[KernelSet], dtype: DTypeLike) -> Tasks:
    """Decode steps of more seats, and of longer contexts."""
    model, sizes = RandomModel(job.config, sets[0], dtype), job.sizes
    yield from _decode_tasks(job, model, sizes.steps, sizes.contexts[1], sizes.contexts[0])


def library_steps(job: PartJob, sets: Sequence[KernelSet], dtype: DTypeLike) -> Tasks:
    """Decode steps with weight formats that cuBLASLt multiplies directly."""
    yield from short_steps(job, sets, dtype)
    yield from _narrow_steps(job, sets[0], dtype, "fp8")


def quantised_steps(job: PartJob, sets: Sequence[KernelSet], dtype: DTypeLike) -> Tasks:
    """Decode steps with weights in 8 and 4 bits."""
    for weights in ("fp8", "int8", "int4"):
        yield from _narrow_steps(job, sets[0], dtype, weights)


def _narrow_steps(job: PartJob, kernels: KernelSet, dtype: DTypeLike, weights: str) -> Tasks:
    model, sizes = RandomModel(job.config, kernels, dtype, weights), job.sizes
    yield from _decode_tasks(job, model, (sizes.quantised,), sizes.contexts[0][-1:])


def _decode_tasks(
    job: PartJob,
    model: RandomModel,
    groups: Sequence[Sequence[int]],
    contexts: Sequence[int],
    later: Sequence[int] = (),
) -> Tasks:
    """Every seat count of every group at `contexts`; from the second group on, also at `later`."""
    longest = max((*contexts, *later)) + job.page_size
    get = cache(partial(StepBench.of, job, model, _decode_buckets(groups), longest))
    open_contexts = set(contexts)
    for seat_counts in groups:
        group = [Bucket(seats, seats) for seats in seat_counts]
        for bucket, context in itertools.product(group, sorted(open_contexts)):
            case = StepCase(bucket, (context - 1,) * bucket.seats)
            row = _decode_row(job, model, bucket.seats, context)
            yield Task(row, partial(_step_row, job, get, group, case))
        open_contexts |= set(later)


def _decode_row(job: PartJob, model: RandomModel, seats: int, context: int) -> Row:
    """A decode step's row without figures."""
    weights, goal = model.weights, ""
    if weights == "plain":
        weights = str(jnp.dtype(model.dtype))
        goal = _goal_of(job, seats, context)
    case = f"{seats} x {context:,}, {weights}"
    return job.row("decode step", case, model.kernels.label, goal)


def _decode_buckets(groups: Sequence[Sequence[int]]) -> Buckets:
    """Decode buckets for these seats, and one bucket for prompts."""
    sizes = sorted(itertools.chain.from_iterable(groups))
    decode = tuple(Bucket(seats, seats) for seats in sizes)
    return Buckets(decode, (Bucket(2 * sizes[-1], sizes[-1]),))


def _goal_of(job: PartJob, seats: int, context: int) -> str:
    """The goal for which a step with plain weights counts; empty for none."""
    short = seats <= 32 and context <= 1024
    return "step" if short and job.part not in ("graphs", "cublas") else ""


def prefill_steps(job: PartJob, sets: Sequence[KernelSet], dtype: DTypeLike) -> Tasks:
    """Steps of one complete prompt."""
    kernels, sizes = sets[0], sorted(job.sizes.prefill)
    seats = min(8, sizes[0] // 2)
    buckets = Buckets((Bucket(1, 1),), tuple(Bucket(rows, seats) for rows in sizes))
    context = sizes[-1] + job.page_size
    model = RandomModel(job.config, kernels, dtype)
    get = cache(partial(StepBench.of, job, model, buckets, context))
    for rows in job.sizes.prefill:
        bucket = Bucket(rows, seats)
        row = job.row("prompt step", f"{rows:,} rows, {jnp.dtype(dtype)}", kernels.label)
        case = StepCase(bucket, (), ((0, rows),))
        yield Task(row, partial(_step_row, job, get, [bucket], case))
