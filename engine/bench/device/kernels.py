"""Attention, and what goes before it, of a kernel set: every case checked against the reference,
then timed.

Axes as in `jitney.kernels.interface`. Bytes: each key and value once, queries and outputs once.
Operations: four per query-key pair, head and dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from msgspec.structs import replace

from jitney.engine.bench.device.rows import FULL, PartJob, Row, Task, Tasks
from jitney.engine.bench.device.timing import copies_for, distance, timed
from jitney.engine.checkpoints.model_config import ModelConfig
from jitney.engine.models.quantization import KV_TYPES
from jitney.kernels.interface import AttentionMeta, KernelSet
from jitney.kernels.scales import LIMITS, as_stored
from jitney.kernels.select import reference

#: A kernel farther from the reference than this is wrong. Both round to the activations' dtype;
#: products of float32 may be made in tf32, which errs by 5e-4.
WRONG = {2: 2e-2, 4: 2e-3}
#: A kernel set's page tables are padded to a multiple of this, as the runner's are.
_TABLE = 16


class _AttentionInputs(NamedTuple):
    """One attention's inputs; kv_scales None: the pool holds plain floats."""

    q: jax.Array
    kv: jax.Array
    meta: AttentionMeta
    kv_scales: jax.Array | None = None


@dataclass(frozen=True, slots=True)
class Contexts:
    """Who attends in one case. decode: contexts, this step's token included; prompts: (context,
    rows of them new).
    """

    decode: tuple[int, ...] = ()
    prompts: tuple[tuple[int, int], ...] = ()

    @property
    def lengths(self) -> list[int]:
        return [*self.decode, *(length for length, _ in self.prompts)]

    @property
    def rows(self) -> list[int]:
        return [1] * len(self.decode) + [count for _, count in self.prompts]

    @property
    def pairs(self) -> int:
        """Query-key pairs."""
        return sum(self.decode) + sum(
            count * (2 * length - count + 1) // 2 for length, count in self.prompts
        )

    def moved(self, config: ModelConfig, size: int, stored: int) -> float:
        """Least bytes, at `size` bytes a number of queries and outputs and `stored` of keys and
        values.
        """
        keys = sum(self.lengths) * 2 * config.n_kv_heads * config.head_dim
        return stored * keys + size * 2 * sum(self.rows) * config.n_heads * config.head_dim

    def operations(self, config: ModelConfig) -> float:
        """Least operations."""
        return 4.0 * config.n_heads * config.head_dim * self.pairs


def _make_meta(load: Contexts, page: int, total: int) -> tuple[AttentionMeta, int]:
    """(the metadata, pages of the pool): pages of all sequences shuffled, `total` rows, no padding
    of sequences.
    """
    lengths, rows = load.lengths, load.rows
    used = [-(-length // page) for length in lengths]
    n_pages = sum(used) + 1  # the trash page
    free = np.random.default_rng(0).permutation(n_pages - 1).astype(np.int32) + 1
    table = np.zeros((len(lengths), -(-max(used) // _TABLE) * _TABLE), np.int32)
    positions = np.zeros(total, np.int32)
    write_rows = np.full(total, n_pages * page, np.int32)
    ends = np.cumsum(rows)
    for s, pages in enumerate(np.split(free, np.cumsum(used)[:-1])):
        new = slice(ends[s] - rows[s], ends[s])
        at = np.arange(lengths[s] - rows[s], lengths[s])
        table[s, : len(pages)] = pages
        positions[new] = at
        write_rows[new] = pages[at // page] * page + at % page
    meta = AttentionMeta(
        kv_lens=jnp.array(lengths, jnp.int32),
        cu_q=jnp.array([0, *ends], jnp.int32),
        page_table=jnp.asarray(table),
        write_rows=jnp.asarray(write_rows),
        positions=jnp.asarray(positions),
        counts=jnp.array([len(load.decode), len(lengths), sum(rows)], jnp.int32),
    )
    return meta, n_pages


def make_inputs(
    load: Contexts, job: PartJob, dtype: Any, seed: int, kv: str = "auto"
) -> _AttentionInputs:
    """Random queries and pages; one row of padding where there would be as many rows as sequences,
    but prompts.

    kv: one of KV_TYPES for a quantised pool, else auto.
    """
    config, total = job.config, sum(load.rows)
    total += bool(load.prompts) and total == len(load.rows)
    meta, pages = _make_meta(load, job.page_size, total)
    keys = jax.random.split(jax.random.key(seed))
    shape = (pages, job.page_size, 2 * config.n_kv_heads, config.head_dim)
    q = jax.random.normal(keys[0], (total, config.n_heads, config.head_dim), dtype)
    pool = jax.random.normal(keys[1], shape, dtype)
    if kv == "auto":
        return _AttentionInputs(q, pool, meta)
    # 4 spreads are the greatest number held.
    scale = jnp.full((shape[2],), 4 / LIMITS[KV_TYPES[kv]], jnp.float32)
    stored = as_stored(pool.reshape(-1, *shape[2:]), jnp.zeros((0,), KV_TYPES[kv]), scale)
    return _AttentionInputs(q, stored.reshape(shape), meta, scale)


def attention(job: PartJob, sets: Sequence[KernelSet], dtype: Any) -> Tasks:
    """Decode attention over sequences and contexts, one long sequence, prompts; then the first two
    over pools of 8 bits. The first kernel set counts for the goals.
    """
    cases = list(_attention_cases(job))
    for kv in ("auto", *KV_TYPES):
        for name, case, contexts, goal in cases if kv == "auto" else cases[:2]:
            if kv != "auto":
                case, goal = f"{case}, {kv} KV", ""
            for kernels in sets:
                counts = goal if kernels is sets[0] else ""
                run = partial(attend_row, job, kernels, dtype, name, case, contexts, counts, kv)
                yield Task(name, case, kernels.label, run)


def _attention_cases(job: PartJob) -> Iterator[tuple[str, str, Contexts, str]]:
    """(name, case, who attends, goal), in the order of what matters most."""
    sizes = job.sizes
    decode = []
    for seqs, context in sizes.attention:
        fills = context >= 4096 and seqs * job.config.n_kv_heads >= FULL
        goal = "decode" if fills else ""
        contexts = Contexts((context,) * seqs)
        decode.append(("decode attention", f"{seqs} x {context:,}", contexts, goal))
    yield decode[0]
    yield "decode attention", f"1 x {sizes.long:,}", Contexts((sizes.long,)), "long"
    for rows in sizes.prompts:
        goal = "prefill" if rows >= 4096 else ""
        yield "prompt attention", f"{rows:,} rows", Contexts((), ((rows, rows),)), goal
    yield from decode[1:]
    seqs, context, rows = sizes.mixed
    contexts = Contexts((context,) * seqs, ((rows, rows),))
    yield "mixed attention", f"{seqs} x {context:,} + {rows} rows", contexts, ""


def attend_row(
    job: PartJob,
    kernels: KernelSet,
    dtype: Any,
    name: str,
    case: str,
    load: Contexts,
    goal: str,
    kv: str = "auto",
) -> Iterator[Row]:
    """One case of attention; wrong answers are not timed."""
    size, config = jnp.dtype(dtype).itemsize, job.config
    moved = load.moved(config, size, size if kv == "auto" else KV_TYPES[kv].itemsize)
    floor_s, bound = job.measured.of(moved, load.operations(config))
    given = make_inputs(load, job, dtype, 0, kv)
    attend = partial(_attend_with, kernels, config.head_dim**-0.5)
    row = Row(
        part=job.part,
        name=name,
        case=case,
        by=kernels.label,
        floor_s=floor_s,
        bound=bound,
        goal=goal,
        error=_attention_error(kernels, attend, given, sum(load.rows)),
    )
    if row.error is not None and not row.error < WRONG[size]:
        yield wrong(row)
        return
    copies = [
        given,
        *(make_inputs(load, job, dtype, seed, kv) for seed in range(1, copies_for(job, moved))),
    ]
    # jnp.copy: the carry is donated, and the first copy's queries stay an input.
    timing = timed(
        lambda q, other: attend(other._replace(q=q)),
        jnp.copy(given.q),
        copies,
        floor_s=floor_s,
        sample_s=job.sizes.sample_s,
    )
    yield replace(row, **timing)


def _attend_with(kernels: KernelSet, scale: float, given: _AttentionInputs) -> jax.Array:
    return kernels.attend(given.q, given.kv, given.meta, scale=scale, kv_scales=given.kv_scales)


def _attention_error(
    kernels: KernelSet, attend: Any, given: _AttentionInputs, rows: int
) -> float | None:
    """Distance from the reference on this device; None for the reference itself."""
    if kernels.name == "reference":
        return None
    theirs = jax.jit(partial(_attend_with, reference(), given.q.shape[-1] ** -0.5))(given)
    return float(distance(jax.jit(attend)(given)[:rows], theirs[:rows]))


def wrong(row: Row) -> Row:
    """The row of a kernel that must not be timed."""
    return replace(row, note=f"WRONG: {row.error:.3g} from the reference", goal="", floor_s=None)


def writes(job: PartJob, sets: Sequence[KernelSet], dtype: Any) -> Tasks:
    """Norm, rotation and write of a step's keys and values, for the sets that have it in one."""
    for rows in job.sizes.rows:
        for kernels in sets:
            yield Task(
                "rotate and write",
                f"{rows} rows",
                kernels.label,
                partial(_write_row, job, kernels, dtype, rows),
            )


def _write_row(job: PartJob, kernels: KernelSet, dtype: Any, rows: int) -> Iterator[Row]:
    """One decode-like write: every row to a page of its own."""
    name, case, config = "rotate and write", f"{rows} rows", job.config
    if kernels.rotate_and_write is None:
        yield Row(
            part=job.part,
            name=name,
            case=case,
            by=kernels.label,
            note="not a kernel of its own in this set: XLA rotates, attention writes",
        )
        return
    size, n_kv, dim = jnp.dtype(dtype).itemsize, config.n_kv_heads, config.head_dim
    given = make_inputs(Contexts((job.page_size,) * rows), job, dtype, 0)
    heads = jax.random.normal(jax.random.key(1), (rows, config.n_heads + 2 * n_kv, dim), dtype)
    angles = given.meta.positions.astype(jnp.float32)[:, None, None] * jnp.linspace(
        1, 1e-4, dim // 2
    )
    rope = jnp.cos(angles), jnp.sin(angles)
    moved = 2 * heads.size * size + 2 * rope[0].nbytes
    floor_s, bound = job.measured.of(moved)

    def write(kernels: KernelSet, kv: jax.Array, heads: jax.Array) -> tuple[jax.Array, jax.Array]:
        assert kernels.rotate_and_write is not None
        return kernels.rotate_and_write(heads, rope, kv, given.meta)

    row = Row(
        part=job.part,
        name=name,
        case=case,
        by=kernels.label,
        floor_s=floor_s,
        bound=bound,
        error=_write_error(kernels, write, given.kv, heads),
    )
    if row.error is not None and not row.error < WRONG[size]:
        yield wrong(row)
        return

    def step(pool: jax.Array, heads: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(write(kernels, pool, heads))[
            1
        ]  # else unread queries are not computed

    timing = timed(step, jnp.copy(given.kv), [heads], floor_s=floor_s, sample_s=job.sizes.sample_s)
    yield replace(row, **timing)


def _write_error(kernels: KernelSet, write: Any, kv: jax.Array, heads: jax.Array) -> float | None:
    """Distance of rotated queries and of the pool from the reference's, whichever is more."""
    if kernels.name == "reference":
        return None
    ours, theirs = (jax.jit(partial(write, each))(kv, heads) for each in (kernels, reference()))
    return max(float(distance(a, b)) for a, b in zip(ours, theirs, strict=True))
