"""Measures a kernel set's attention, and its norm, rotation and write: every case is compared with
the reference, then timed.

Axes as in `jitney.kernels.interface`. Bytes: each key and value once, queries and outputs once.
Operations: four per query-key pair, head and dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from msgspec.structs import replace

from jitney.engine.core import KV_TYPES, ModelConfig
from jitney.engine.lab.device.rows import PartJob, Row, Task, Tasks
from jitney.engine.lab.device.timing import distance, timed
from jitney.kernels import reference as plain
from jitney.kernels.interface import AttentionMeta, KernelSet, RotateAndWrite
from jitney.kernels.proof_attention import MetaBuilder
from jitney.kernels.scales import as_stored, limit_of
from jitney.kernels.select import reference

#: Bytes per activation -> largest error of a correct kernel. Kernel and reference round to the
#: activations' dtype; float32 products may run in tf32, which has an error of 5e-4.
_LIMITS = {2: 2e-2, 4: 2e-3}
#: Multiple to which page tables are padded, as in the runner.
_TABLE = 16
#: Programs that fill an H100: with fewer sequences times key heads, decode attention has too little
#: parallel work.
_FULL = 132


class _AttentionInputs(NamedTuple):
    """Inputs of one attention. kv_scales: None if the pool holds plain floats."""

    q: jax.Array
    kv: jax.Array
    meta: AttentionMeta
    kv_scales: jax.Array | None = None


_Attend = Callable[[_AttentionInputs], jax.Array]


@dataclass(frozen=True, slots=True)
class Contexts:
    """Contexts of the sequences of one case."""

    decode: tuple[int, ...] = ()  # contexts, this step's token included
    prompts: tuple[tuple[int, int], ...] = ()  # (context, rows of them new)

    @property
    def lengths(self) -> list[int]:
        return [*self.decode, *(length for length, _ in self.prompts)]

    @property
    def rows(self) -> list[int]:
        return [1] * len(self.decode) + [count for _, count in self.prompts]

    @property
    def pairs(self) -> int:
        """Number of query-key pairs."""
        pairs = sum(self.decode)
        for length, count in self.prompts:
            pairs += count * (2 * length - count + 1) // 2
        return pairs

    def moved(self, config: ModelConfig, size: int, stored: int) -> float:
        """Least bytes. size: bytes per number of queries and outputs; stored: of keys, values."""
        keys = sum(self.lengths) * 2 * config.n_kv_heads * config.head_dim
        return stored * keys + size * 2 * sum(self.rows) * config.n_heads * config.head_dim

    def operations(self, config: ModelConfig) -> float:
        """Least number of operations."""
        return 4.0 * config.n_heads * config.head_dim * self.pairs


def _make_meta(load: Contexts, page: int, total: int) -> tuple[AttentionMeta, int]:
    """(metadata, pages of the pool) for `total` rows: the sequences' pages are shuffled, and there
    are no padding sequences.
    """
    used = [-(-length // page) for length in load.lengths]
    n_pages = sum(used) + 1  # the trash page
    width = -(-max(used) // _TABLE) * _TABLE
    rng = np.random.default_rng(0)
    builder = MetaBuilder.empty((len(used), total, width), n_pages, page, rng)
    for length, rows in zip(load.lengths, load.rows, strict=True):
        builder.add(length, rows)
    return builder.meta(len(load.decode)), n_pages


def _make_inputs(
    load: Contexts, job: PartJob, dtype: DTypeLike, seed: int, kv: str = "auto"
) -> _AttentionInputs:
    """Random queries and pages; one row of padding where there would be as many rows as sequences,
    but prompts.

    kv: one of KV_TYPES for a quantised pool, else auto.
    """
    config, total = job.config, sum(load.rows)
    total += bool(load.prompts) and total == len(load.rows)
    meta, pages = _make_meta(load, job.page_size, total)
    for_queries, for_pool = jax.random.split(jax.random.key(seed))
    shape = (pages, job.page_size, 2 * config.n_kv_heads, config.head_dim)
    q = jax.random.normal(for_queries, (total, config.n_heads, config.head_dim), dtype)
    pool = jax.random.normal(for_pool, shape, dtype)
    if kv == "auto":
        return _AttentionInputs(q, pool, meta)
    stored, scale = _quantised(pool, kv)
    return _AttentionInputs(q, stored, meta, scale)


def _quantised(pool: jax.Array, kv: str) -> tuple[jax.Array, jax.Array]:
    """(the pool in 8 bits, its scales)."""
    # The largest representable number is 4 standard deviations.
    heads, dim = pool.shape[2:]
    scale = jnp.full((heads,), 4 / limit_of(KV_TYPES[kv]), jnp.float32)
    stored = as_stored(pool.reshape(-1, heads, dim), jnp.zeros((0,), KV_TYPES[kv]), scale)
    return stored.reshape(pool.shape), scale


def attention(job: PartJob, sets: Sequence[KernelSet], dtype: DTypeLike) -> Tasks:
    """Decode attention over sequences and contexts, one long sequence, prompts; then the first two
    over pools of 8 bits. The first kernel set counts for the goals.
    """
    cases = list(_attention_cases(job))
    for name, case, load, goal in cases:
        yield from _attention_tasks(job, sets, dtype, load, "auto", job.row(name, case, "", goal))
    for kv in KV_TYPES:
        for name, case, load, _ in cases[:2]:
            row = job.row(name, f"{case}, {kv} KV", "")
            yield from _attention_tasks(job, sets, dtype, load, kv, row)


def _attention_tasks(
    job: PartJob, sets: Sequence[KernelSet], dtype: DTypeLike, load: Contexts, kv: str, row: Row
) -> Tasks:
    for kernels in sets:
        goal = row.goal if kernels is sets[0] else ""
        run = partial(attend_row, job, kernels, dtype, load, kv)
        yield Task(replace(row, by=kernels.label, goal=goal), run)


def _attention_cases(job: PartJob) -> Iterator[tuple[str, str, Contexts, str]]:
    """(name, case, contexts, goal), the most important first."""
    sizes = job.sizes
    first, *others = sizes.attention
    yield _decode_case(job, *first)
    yield "decode attention", f"1 x {sizes.long:,}", Contexts((sizes.long,)), "long"
    for rows in sizes.prompts:
        goal = "prefill" if rows >= 4096 else ""
        yield "prompt attention", f"{rows:,} rows", Contexts((), ((rows, rows),)), goal
    for seqs, context in others:
        yield _decode_case(job, seqs, context)
    seqs, context, rows = sizes.mixed
    contexts = Contexts((context,) * seqs, ((rows, rows),))
    yield "mixed attention", f"{seqs} x {context:,} + {rows} rows", contexts, ""


def _decode_case(job: PartJob, seqs: int, context: int) -> tuple[str, str, Contexts, str]:
    fills = context >= 4096 and seqs * job.config.n_kv_heads >= _FULL
    goal = "decode" if fills else ""
    return "decode attention", f"{seqs} x {context:,}", Contexts((context,) * seqs), goal


def attend_row(
    job: PartJob, kernels: KernelSet, dtype: DTypeLike, load: Contexts, kv: str, row: Row
) -> Iterator[Row]:
    """Measure one case of attention; wrong answers are not timed. kv: see `_make_inputs`."""
    size = jnp.dtype(dtype).itemsize
    stored = size if kv == "auto" else KV_TYPES[kv].itemsize
    moved = load.moved(job.config, size, stored)
    inputs = _make_inputs(load, job, dtype, 0, kv)
    attend = partial(_attend_with, kernels, job.config.head_dim**-0.5)

    def time(floor_s: float) -> list[float]:
        seeds = range(1, job.copies_of(moved))
        copies = [inputs, *(_make_inputs(load, job, dtype, seed, kv) for seed in seeds)]
        return timed(
            lambda q, other: attend(other._replace(q=q)),
            jnp.copy(inputs.q),  # the carry is donated, and the first copy's queries stay an input
            copies,
            floor_s=floor_s,
            sample_s=job.sizes.sample_s,
        )

    yield measured(
        job,
        row,
        moved=moved,
        operations=load.operations(job.config),
        error=_attention_error(kernels, attend, inputs, sum(load.rows)),
        itemsize=size,
        time=time,
    )


def _attend_with(kernels: KernelSet, scale: float, inputs: _AttentionInputs) -> jax.Array:
    return kernels.attend(inputs.q, inputs.kv, inputs.meta, scale=scale, kv_scales=inputs.kv_scales)


def _attention_error(
    kernels: KernelSet, attend: _Attend, inputs: _AttentionInputs, rows: int
) -> float | None:
    """Error against the reference on this device; None for the reference itself."""
    if kernels.name == "reference":
        return None
    theirs = jax.jit(partial(_attend_with, reference(), inputs.q.shape[-1] ** -0.5))(inputs)
    return float(distance(jax.jit(attend)(inputs)[:rows], theirs[:rows]))


def measured(
    job: PartJob,
    row: Row,
    *,
    moved: float,
    operations: float = 0.0,
    error: float | None,
    itemsize: int,
    time: Callable[[float], Sequence[float]],
) -> Row:
    """The row with its floor, error and times; a wrong kernel is not timed.

    moved, operations: least bytes and operations. itemsize: bytes per activation. time: measures
    the times, given the floor.
    """
    floor_s, bound = job.measured.of(moved, operations)
    row = replace(row, floor_s=floor_s, bound=bound, error=error)
    if error is not None and not error < _LIMITS[itemsize]:
        wrong = row.as_wrong(f"{error:.3g} from the reference")
        return replace(wrong, goal="", floor_s=None)
    return row.timed(time(floor_s))


def writes(job: PartJob, sets: Sequence[KernelSet], dtype: DTypeLike) -> Tasks:
    """Norm, rotation and write of a step's keys and values, for sets with one kernel for all."""
    for rows in job.sizes.rows:
        for kernels in sets:
            row = job.row("rotate and write", f"{rows} rows", kernels.label)
            yield Task(row, partial(_write_row, job, kernels, dtype, rows))


def _write_row(
    job: PartJob, kernels: KernelSet, dtype: DTypeLike, rows: int, row: Row
) -> Iterator[Row]:
    rotate_and_write = kernels.rotate_and_write
    if rotate_and_write is None:
        note = "not a kernel of its own in this set: XLA rotates, attention writes"
        yield row.noted(note)
        return
    inputs = _make_inputs(Contexts((job.page_size,) * rows), job, dtype, 0)
    heads, rope = _make_heads(job, dtype, inputs.meta)

    def write(
        rotate_and_write: RotateAndWrite[jax.Array], kv: jax.Array, heads: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return rotate_and_write(heads, rope, kv, inputs.meta)

    def step(pool: jax.Array, heads: jax.Array) -> jax.Array:
        # Without the barrier, XLA would not compute the unused queries.
        _, pool = jax.lax.optimization_barrier(write(rotate_and_write, pool, heads))
        return pool

    def time(floor_s: float) -> list[float]:
        pool = jnp.copy(inputs.kv)
        return timed(step, pool, [heads], floor_s=floor_s, sample_s=job.sizes.sample_s)

    ours = jax.jit(partial(write, rotate_and_write))(inputs.kv, heads)
    theirs = jax.jit(partial(write, plain.rotate_and_write))(inputs.kv, heads)
    yield measured(
        job,
        row,
        moved=2 * heads.nbytes + 2 * rope[0].nbytes,
        error=max(map(float, map(distance, ours, theirs))),
        itemsize=jnp.dtype(dtype).itemsize,
        time=time,
    )


def _make_heads(
    job: PartJob, dtype: DTypeLike, meta: AttentionMeta
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """(random queries, keys and values, (cosines, sines) of their positions)."""
    config = job.config
    shape = (len(meta.positions), config.n_heads + 2 * config.n_kv_heads, config.head_dim)
    frequencies = jnp.linspace(1, 1e-4, config.head_dim // 2)
    angles = meta.positions.astype(jnp.float32)[:, None, None] * frequencies
    return jax.random.normal(jax.random.key(1), shape, dtype), (jnp.cos(angles), jnp.sin(angles))
