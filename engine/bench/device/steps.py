"""Whole steps of a model with random weights made on the device, through the engine's own runner.

Bytes of a step: every weight but the embedding table once (a tied one is the head: once), of the
table the rows looked up, each sequence's keys and values once, the step's own written once.
Operations as `engine.simulation.roofline` counts them.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from msgspec.structs import replace

from jitney.engine.bench.device.rows import PartJob, Row, Sizes, Task, Tasks
from jitney.engine.bench.device.timing import REPEATS, repeated
from jitney.engine.bench.step import StepCase, plan_of
from jitney.engine.errors import ConfigError
from jitney.engine.executor.memory import GIB
from jitney.engine.executor.program import StateSizes, allocate, compile_step
from jitney.engine.executor.runner import LaunchedStep, Runner
from jitney.engine.models.protocol import Model
from jitney.engine.models.registry import abstract_model
from jitney.engine.scheduler.buckets import Bucket, Buckets
from jitney.engine.scheduler.plan import StepWork
from jitney.engine.simulation.roofline import ModelCost
from jitney.kernels.interface import KernelSet

#: Of the memory that jax may use: left for temporaries, fragments and uploads.
_SPARE = 0.08
#: KV positions at most: enough for 256 sequences of 1k, and for 8 of 32k.
_MOST_POSITIONS = 1 << 18
#: Positions where the device does not say what memory it has.
_FEW_POSITIONS = 1 << 10
#: Programs compiled side by side.
_THREADS = 8


@dataclass
class StepBench:
    """A runner over random weights, and what a step of it must move."""

    runner: Runner
    cost: ModelCost
    weight_bytes: int  # read in every step
    embed_bytes: int  # of one token's embedding
    row_bytes: int  # of one token's keys and values in all layers
    positions: int  # KV positions of the pool
    page_size: int

    def floor_bytes(self, work: StepWork) -> float:
        """Least bytes of a step."""
        rows = work.decode + work.prompt
        return self.weight_bytes + rows * self.embed_bytes + (work.keys + rows) * self.row_bytes

    def operations(self, bucket: Bucket, work: StepWork) -> float:
        """Least operations: of its rows, not of its padding."""
        return sum(
            self.cost.operations(
                work.decode + work.prompt, min(bucket.seats, work.decode or 1), work
            )
        )


def _random_weights(model: Model) -> Model:
    """An abstract model with numbers in it, made on the device leaf by leaf: of the right size, of
    no meaning.
    """
    graph, state = nnx.split(model)
    leaves = [
        (
            path,
            leaf.replace(
                _fill(jax.random.key(number), str(path[-1]), leaf.shape, jnp.dtype(leaf.dtype))
            ),
        )
        for number, (path, leaf) in enumerate(nnx.to_flat_state(state))
    ]
    return nnx.merge(graph, nnx.from_flat_state(leaves))


@partial(jax.jit, static_argnums=(1, 2, 3))
def _fill(key: jax.Array, name: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Entries for the leaf of that name: matrices have a spread of 1 / sqrt(inputs), norms are 1,
    and scales small, so that no step overflows."""
    if jnp.issubdtype(dtype, jnp.integer):
        width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[dtype.itemsize]
        bits = jax.random.bits(key, shape, width)
        return (
            jnp.full(shape, 8, dtype)
            if name == "zeros"
            else jax.lax.bitcast_convert_type(bits, dtype)
        )
    if name in ("scale", "kv_scales"):
        return jnp.full(shape, 1e-3, dtype)
    if len(shape) < 2:
        return jnp.zeros(shape, dtype) if name == "bias" else jnp.ones(shape, dtype)
    spread = 1.0 if dtype.itemsize == 1 else shape[0] ** -0.5
    return (spread * jax.random.normal(key, shape, jnp.bfloat16)).astype(dtype)


def make_bench(
    job: PartJob, kernels: KernelSet, dtype: Any, weights: str, buckets: Buckets, context: int
) -> StepBench:
    """A runner that has compiled nothing yet, with as many pages as fit, up to what the cases
    need.
    """
    gc.collect()  # the arrays of the one before it may hang in cycles
    model = _random_weights(abstract_model(job.config, dtype=dtype, weights=weights))
    model.arrange(kernels)
    _, state = nnx.split(model)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    config, size = job.config, jnp.dtype(dtype).itemsize
    table = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size * size
    row_bytes = config.n_layers * 2 * config.n_kv_heads * config.head_dim * size
    positions = min(_MOST_POSITIONS + buckets.seats * job.page_size, _free_positions(row_bytes))
    pages = positions // job.page_size
    if pages < 2:
        raise ConfigError(f"{held / GIB:.1f} GiB of weights leave no room for keys and values")
    sizes = StateSizes(buckets.seats, pages, job.page_size, context, dtype)
    runner = Runner(model, buckets, kernels, sizes, end_ids=(), plain_mixed=True)
    runner.state = allocate(runner.shapes, runner.config)
    return StepBench(
        runner,
        ModelCost(config),
        held - table,
        config.hidden_size * size,
        row_bytes,
        (pages - 1) * job.page_size,
        job.page_size,
    )


def _free_positions(row_bytes: int) -> int:
    """KV positions that fit beside what the device holds now."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return _FEW_POSITIONS
    return int((1 - _SPARE) * stats["bytes_limit"] - stats["bytes_in_use"]) // row_bytes


def compile_buckets(bench: StepBench, buckets: Sequence[Bucket]) -> None:
    """Compile the greedy step of these buckets, side by side."""
    runner = bench.runner
    keys = [(bucket, runner.is_plain(bucket, True)) for bucket in buckets]
    missing = [key for key in keys if key not in runner.executables]
    with ThreadPoolExecutor(_THREADS) as pool:
        for key, done in [(key, pool.submit(compile_step, runner.lower(*key))) for key in missing]:
            runner.executables[key] = done.result()


def _time_step(bench: StepBench, case: StepCase, sample_s: float) -> tuple[list[float], StepWork]:
    """Seconds of a made-up step, many in flight, its upload included. RuntimeError if its logits
    are not finite.
    """
    runner = bench.runner
    plan = plan_of(case, 0, bench.page_size)
    packed, plain = runner.batch(plan).packed, runner.is_plain(case.bucket, True)
    if min(runner.fetch(LaunchedStep(plan, runner.run(case.bucket, plain, packed), 0)).tokens) < 0:
        raise RuntimeError("the step's logits are not finite")
    samples = repeated(lambda _: runner.run(case.bucket, plain, packed), None, sample_s)
    return samples, plan.work


def _step_row(
    job: PartJob,
    get: Callable[[], StepBench],
    group: Sequence[Bucket],
    name: str,
    by: str,
    case: StepCase,
    text: str,
    goal: str = "",
) -> Iterator[Row]:
    """One step; `group` is compiled together with its bucket."""
    bench = get()
    base = Row(part=job.part, name=name, case=text, by=by)
    if _room_of(case, bench.page_size) > bench.positions:
        needed = _room_of(case, bench.page_size) * bench.row_bytes / GIB
        room = bench.positions * bench.row_bytes / GIB
        yield replace(
            base, note=f"does not fit: {needed:.1f} GiB of keys and values, room for {room:.1f}"
        )
        return
    compile_buckets(bench, group)
    samples, work = _time_step(bench, case, job.sizes.sample_s)
    seconds = sorted(samples)[len(samples) // 2]
    floor_s, bound = job.measured.of(bench.floor_bytes(work), bench.operations(case.bucket, work))
    yield replace(
        base,
        seconds=seconds,
        least=min(samples),
        most=max(samples),
        repeats=REPEATS,
        floor_s=floor_s,
        bound=bound,
        goal=goal,
        figures={"tokens_s": (work.decode + work.prompt) / seconds},
    )


def _room_of(case: StepCase, page: int) -> int:
    """KV positions in whole pages."""
    lengths = [length + 1 for length in case.decode] + [
        start + count for start, count in case.prompts
    ]
    return sum(math.ceil(length / page) * page for length in lengths)


def _decode_buckets(groups: Sequence[Sequence[int]]) -> list[list[Bucket]]:
    return [[Bucket(seats, seats) for seats in group] for group in groups]


def short_steps(job: PartJob, sets: Sequence[KernelSet], dtype: Any) -> Tasks:
    """Decode steps of few seats and short contexts: what the goal is about."""
    sizes = job.sizes
    yield from _decode_tasks(job, sets[0], dtype, "plain", sizes.steps[:1], sizes.contexts[0])


def long_steps(job: PartJob, sets: Sequence[KernelSet], dtype: Any) -> Tasks:
    """Decode steps of more seats, and of longer contexts."""
    sizes = job.sizes
    yield from _decode_tasks(
        job, sets[0], dtype, "plain", sizes.steps, sizes.contexts[1], sizes.contexts[0]
    )


def quantised_steps(job: PartJob, sets: Sequence[KernelSet], dtype: Any) -> Tasks:
    """Decode steps with weights in 8 and 4 bits."""
    for weights in ("fp8", "int8", "int4"):
        yield from _decode_tasks(
            job, sets[0], dtype, weights, (job.sizes.quantised,), job.sizes.contexts[0][-1:]
        )


def _decode_tasks(
    job: PartJob,
    kernels: KernelSet,
    dtype: Any,
    weights: str,
    groups: Sequence[Sequence[int]],
    contexts: Sequence[int],
    later: Sequence[int] = (),
) -> Tasks:
    """Every seat count of every group at `contexts`; from the second group on, at `later` too."""
    grouped = _decode_buckets(groups)
    seats = max(bucket.seats for group in grouped for bucket in group)
    longest = max((*contexts, *later))
    buckets = Buckets(
        tuple(sorted((b for group in grouped for b in group), key=lambda b: b.seats)),
        (Bucket(2 * seats, seats),),
    )
    get = cache(lambda: make_bench(job, kernels, dtype, weights, buckets, longest + job.page_size))
    kept = str(jnp.dtype(dtype)) if weights == "plain" else weights
    for number, group in enumerate(grouped):
        for bucket in group:
            for context in sorted({*contexts, *(later if number else ())}):
                text = f"{bucket.seats} x {context:,}, {kept}"
                short = bucket.seats <= 32 and context <= 1024
                goal = "step" if short and weights == "plain" and job.part != "graphs" else ""
                yield Task(
                    "decode step",
                    text,
                    kernels.label,
                    partial(
                        _step_row,
                        job,
                        get,
                        group,
                        "decode step",
                        kernels.label,
                        StepCase(bucket, (context - 1,) * bucket.seats),
                        text,
                        goal,
                    ),
                )


def prefill_steps(job: PartJob, sets: Sequence[KernelSet], dtype: Any) -> Tasks:
    """Steps of one prompt, whole."""
    kernels, sizes = sets[0], job.sizes
    buckets = Buckets(
        (Bucket(1, 1),), tuple(Bucket(rows, _min_seats(sizes)) for rows in sorted(sizes.prefill))
    )
    get = cache(
        lambda: make_bench(
            job, kernels, dtype, "plain", buckets, max(sizes.prefill) + job.page_size
        )
    )
    for rows in sizes.prefill:
        bucket = Bucket(rows, _min_seats(sizes))
        text = f"{rows:,} rows, {jnp.dtype(dtype)}"
        yield Task(
            "prompt step",
            text,
            kernels.label,
            partial(
                _step_row,
                job,
                get,
                [bucket],
                "prompt step",
                kernels.label,
                StepCase(bucket, (), ((0, rows),)),
                text,
            ),
        )


def _min_seats(sizes: Sizes) -> int:
    """Seats of the prompt steps' buckets."""
    return min(8, min(sizes.prefill) // 2)
