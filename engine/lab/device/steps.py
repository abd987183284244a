"""Measures whole steps of a model with random weights, through the engine's own runner.

Bytes of a step: every weight except the embedding table once (a tied table counts once, as the
head), the looked-up rows of the table, each sequence's keys and values once, and the step's own
ones written once. Operations are counted as in `engine.lab.simulation.roofline`.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from msgspec.structs import replace

from jitney.engine.common.errors import ConfigError
from jitney.engine.core import (
    Bucket,
    Buckets,
    LaunchedStep,
    Model,
    ModelConfig,
    Runner,
    StateSizes,
    StepPrograms,
    StepWork,
    abstract_model,
    fill_at_random,
)
from jitney.engine.lab.bench.step import StepCase
from jitney.engine.lab.device.rows import PartJob, Row, Task, Tasks
from jitney.engine.lab.device.timing import repeated
from jitney.engine.lab.simulation.roofline import ModelCost
from jitney.kernels.interface import KernelSet

#: Share of jax's memory that is left free for temporaries, fragments and uploads.
_SPARE = 0.08
#: Most KV positions: enough for 256 sequences of 1k, and for 8 of 32k.
_MOST_POSITIONS = 1 << 18
#: KV positions if the device does not report its memory.
_FEW_POSITIONS = 1 << 10
#: Programs that are compiled in parallel.
_THREADS = 8

#: Bytes.
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A model with random weights, and its kernels."""

    config: ModelConfig
    kernels: KernelSet
    dtype: DTypeLike  # of activations
    weights: str = "plain"  # or one of Packed.schemes, as they are packed

    @property
    def itemsize(self) -> int:
        """Bytes per number that is not packed."""
        return jnp.dtype(self.dtype).itemsize

    def make(self, kv: str = "auto") -> Model:
        """Build the model. kv: format of keys and values: auto, or one of KV_TYPES."""
        config, dtype = self.config, self.dtype
        return fill_at_random(abstract_model(config, dtype=dtype, weights=self.weights, kv=kv))


@dataclass
class StepBench:
    """A runner with random weights, and the bytes that its steps must move."""

    runner: Runner
    cost: ModelCost
    weight_bytes: int  # read in every step
    embed_bytes: int  # of one token's embedding
    row_bytes: int  # of one token's keys and values in all layers
    positions: int  # KV positions of the pool
    page_size: int

    @classmethod
    def of(
        cls, job: PartJob, random_model: RandomModel, buckets: Buckets, context: int
    ) -> StepBench:
        """A runner without compiled programs, with as many pages as fit, at most as many as the
        cases need.
        """
        gc.collect()  # reference cycles may keep the previous runner's arrays alive
        config, kernels = random_model.config, random_model.kernels
        model = random_model.make()
        model.pack(kernels)
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
        row_bytes = sum(config.kv_numbers) * random_model.itemsize
        pages = _pages_for(job, buckets, row_bytes, held)
        sizes = StateSizes(buckets.seats, pages, job.page_size, context, random_model.dtype)
        programs = StepPrograms(model, buckets, kernels, sizes, greedy_only_mixed=True)
        runner = Runner(programs, end_ids=())
        runner.state = programs.shapes.allocate(programs.config)
        runner.state.kv = [
            _at_random(layer_state, layer) for layer, layer_state in enumerate(runner.state.kv)
        ]
        return cls(
            runner=runner,
            cost=ModelCost(config),
            weight_bytes=held - _unread_bytes(random_model),
            embed_bytes=config.hidden_size * random_model.itemsize,
            row_bytes=row_bytes,
            positions=(pages - 1) * job.page_size,
            page_size=job.page_size,
        )

    def compile(self, buckets: Sequence[Bucket]) -> None:
        """Compile the greedy step of these buckets in parallel."""
        kinds = [
            (bucket, self.runner.programs.runs_greedy_only(bucket, True)) for bucket in buckets
        ]
        self.runner.programs.compile_steps(kinds, threads=_THREADS)

    def floor_bytes(self, work: StepWork) -> float:
        """Least bytes of a step."""
        rows = work.decode + work.prompt
        return self.weight_bytes + rows * self.embed_bytes + (work.keys + rows) * self.row_bytes

    def operations(self, bucket: Bucket, work: StepWork) -> float:
        """Least operations: those of its rows, without padding."""
        sampled = min(bucket.seats, work.decode or 1)
        return sum(self.cost.operations(work.decode + work.prompt, sampled, work))


def _at_random(layer_state: Any, layer: int) -> Any:
    """A pool of random numbers instead of zeros, with which a device needs less power and is
    faster; recurrent state stays unchanged.
    """
    if not isinstance(layer_state, jax.Array):
        return layer_state
    shape, dtype = layer_state.shape, layer_state.dtype
    layer_state.delete()
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(jax.random.key(layer), shape, -127, 128, dtype)
    return jax.random.normal(jax.random.key(layer), shape, jnp.bfloat16).astype(dtype)


def _unread_bytes(model: RandomModel) -> int:
    """Bytes of weights that a step does not read: the embedding table, unless it is the head."""
    config = model.config
    if config.tie_embeddings:
        return 0
    return config.vocab_size * config.hidden_size * model.itemsize


def _pages_for(job: PartJob, buckets: Buckets, row_bytes: int, held: int) -> int:
    """Pages that fit. held: bytes of the weights. Raises ConfigError if they leave no room."""
    positions = _MOST_POSITIONS + buckets.seats * job.page_size
    pages = min(positions, _free_positions(row_bytes)) // job.page_size
    if pages < 2:
        raise ConfigError(f"{held / _GIB:.1f} GiB of weights leave no room for keys and values")
    return pages


def _free_positions(row_bytes: int) -> int:
    """KV positions that fit into the device's free memory."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return _FEW_POSITIONS
    return int((1 - _SPARE) * stats["bytes_limit"] - stats["bytes_in_use"]) // row_bytes


def _time_step(bench: StepBench, case: StepCase, sample_s: float) -> tuple[list[float], StepWork]:
    """(seconds of a made-up step with its upload, its work), with many steps in flight. Raises
    RuntimeError if its logits are not finite.
    """
    runner = bench.runner
    plan = case.plan(0, bench.page_size)
    packed, plain = runner.batch(plan).packed, runner.programs.runs_greedy_only(case.bucket, True)
    launched = LaunchedStep(plan, 0, runner.run(case.bucket, plain, packed)[0])
    if min(runner.fetch(launched).tokens) < 0:
        raise RuntimeError("the step's logits are not finite")
    samples = repeated(lambda _: runner.run(case.bucket, plain, packed), None, sample_s)
    return samples, plan.work


def _step_row(
    job: PartJob,
    get: Callable[[], StepBench],
    group: Sequence[Bucket],
    case: StepCase,
    row: Row,
) -> Iterator[Row]:
    """Measure one step; `group` is compiled together with its bucket."""
    bench = get()
    needed = _room_of(case, bench.page_size)
    if needed > bench.positions:
        yield row.noted(_no_room(bench, needed))
        return
    bench.compile(group)
    samples, work = _time_step(bench, case, job.sizes.sample_s)
    floor_s, bound = job.measured.of(bench.floor_bytes(work), bench.operations(case.bucket, work))
    figures = {"tokens_s": (work.decode + work.prompt) / median(samples)}
    yield replace(row.timed(samples), floor_s=floor_s, bound=bound, figures=figures)


def _no_room(bench: StepBench, positions: int) -> str:
    """Note for a pool that is too small. positions: KV positions that the case needs."""
    needed = positions * bench.row_bytes / _GIB
    room = bench.positions * bench.row_bytes / _GIB
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
