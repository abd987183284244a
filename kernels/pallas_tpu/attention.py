"""The Pallas kernel of ragged paged attention for TPUs: writes a step's keys and values, then
attends.

One program does the whole step. Its work is a list of items, each one query block of one sequence:
the single row of a decoding sequence, or up to B rows of a prompt chunk. An item sweeps its
sequence's keys in blocks of C, by an online softmax (Milakov and Gimelshein, arXiv 1805.02867) in
base 2; while it computes on one block, the pages of the next are on their way from HBM into a ring
of buffers, across the ends of items and sequences too, so that short contexts keep the memory as
busy as long ones.

A block [C, R, W] is turned to [R, C, W] in registers, all heads at once: 2.2 cycles a key for 16
rows of bfloat16 in the compiler's schedule for v5e, where reading one head after the other takes
13.

Where a row's keys are split follows from their positions alone, so a sequence's result never
depends on its neighbours. Axes as in `jitney.kernels.interface`; R and W as in
`jitney.kernels.pallas_tpu.layout`, G = H // K, and M = G * B rows of a tile for B query rows, the
rows of one query head together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jitney.kernels.pallas_tpu.walk import Constants, Cursor, Step, Walk

LOG2E = math.log2(math.e)
#: Score of a key that a row must not see; finite, so that no NaN comes of it.
HIDDEN = -1e30


class Buffers(NamedTuple):
    """Scratch memory of a sweep; B query rows, M = G * B."""

    pages: Any  # [depth, C, R, W]
    rows: Any  # [depth, B, H, W]: query rows as they came
    queries: Any  # [K, M, W]: of the item
    top: Any  # float32 [K, M, 128]: running maximum, alike in all lanes
    total: Any  # and sum
    acc: Any  # float32 [K, M, W]
    out: Any  # [2, B, H, W]
    leaving: Any  # int32 [2] in SMEM: rows on their way out of each half of `out`
    arrived: Any  # DMA semaphores [depth]
    left: Any  # DMA semaphores [2]


def attention_kernel(
    fixed: Constants, kv_lens: Any, cu_q: Any, table: Any, write_rows: Any, counts: Any, *refs: Any
) -> None:
    """Body of the kernel. refs: [factors], then pool, new, q, pool, q if it writes, the
    last two being results in place of operands, else pool, q, q; then the ring, its semaphores and
    one for writes."""
    waiting = list(refs)
    factors = waiting.pop(0) if fixed.scaled else None
    if fixed.writes:
        _, new, _, pool, q, pages, arrived, wrote = waiting
    else:
        pool, _, q, pages, arrived, wrote = waiting
        new = None
    step = Step(kv_lens, cu_q, table, write_rows, counts, new, q, pool, factors)
    if fixed.writes:
        write(fixed, step, wrote)
    for slot in range(fixed.depth):
        pages[slot] = jnp.zeros(
            pages.shape[1:], pages.dtype
        )  # a hidden key still meets its value, as 0 * v
    n_decode, n_seqs = counts[0], counts[1]
    with_buffers(
        fixed,
        step,
        pages,
        arrived,
        1,
        lambda buffers: sweep(fixed, step, buffers, jnp.int32(0), n_decode),
    )
    if fixed.block:
        with_buffers(
            fixed,
            step,
            pages,
            arrived,
            fixed.block,
            lambda buffers: sweep(fixed, step, buffers, n_decode, n_seqs),
        )


def with_buffers(
    fixed: Constants,
    step: Step,
    pages: Any,
    arrived: Any,
    size: int,
    run: Callable[[Buffers], None],
) -> None:
    """Call `run` with scratch memory for items of `size` query rows."""
    heads, tile, width = fixed.layout.heads, fixed.group * size, fixed.layout.width
    dtype = step.q.dtype
    pl.run_scoped(
        lambda rows, queries, top, total, acc, out, leaving, left: run(
            Buffers(pages, rows, queries, top, total, acc, out, leaving, arrived, left)
        ),
        pltpu.VMEM((fixed.depth, size, fixed.n_heads, width), dtype),
        pltpu.VMEM((heads, tile, width), dtype),
        pltpu.VMEM((heads, tile, 128), jnp.float32),
        pltpu.VMEM((heads, tile, 128), jnp.float32),
        pltpu.VMEM((heads, tile, width), jnp.float32),
        pltpu.VMEM((2, size, fixed.n_heads, width), dtype),
        pltpu.SMEM((2,), jnp.int32),
        pltpu.SemaphoreType.DMA((2,)),
    )


def write(fixed: Constants, step: Step, wrote: Any) -> None:
    """Copy the new rows into their pages, whole pages where rows fill one, and wait until all are
    there.
    """
    n_rows, n_slots = step.new.shape[0], step.pool.shape[0] * fixed.page

    def put(row: Any, slot: Any, count: int) -> Any:
        return pltpu.make_async_copy(
            step.new.at[pl.ds(row, count)],
            step.pool.at[lax.div(slot, fixed.page), pl.ds(lax.rem(slot, fixed.page), count)],
            wrote,
        )

    def each(act: Callable[[Any], None]) -> None:
        def body(row: jax.Array) -> jax.Array:
            slot = step.write_rows[row]
            last = jnp.minimum(row + fixed.page, n_rows) - 1
            whole = (
                (lax.rem(slot, fixed.page) == 0)
                & (row + fixed.page <= n_rows)
                & (slot < n_slots)
                & (step.write_rows[last] == slot + fixed.page - 1)
            )
            if n_rows >= fixed.page:
                pl.when(whole)(lambda: act(put(row, slot, fixed.page)))
            pl.when(~whole & (slot < n_slots))(lambda: act(put(row, slot, 1)))
            return row + jnp.where(whole, fixed.page, 1)

        lax.while_loop(lambda row: row < step.counts[2], body, jnp.int32(0))

    each(lambda copy: copy.start())
    each(lambda copy: copy.wait())


def sweep(fixed: Constants, step: Step, buffers: Buffers, first: jax.Array, end: jax.Array) -> None:
    """Attend for sequences [first, end), one item after the other."""
    size = buffers.rows.shape[1]
    walk = Walk(fixed, step, size)
    for half in range(2):
        buffers.leaving[half] = 0
    ahead = walk.begin(first)
    for slot in range(fixed.depth - 1):
        pl.when(ahead.seq < end)(
            lambda at=ahead, slot=slot: fetch(walk, buffers, at, slot, lambda copy: copy.start())
        )
        ahead = walk.after(ahead)

    def body(
        state: tuple[Cursor, Cursor, jax.Array, jax.Array],
    ) -> tuple[Cursor, Cursor, jax.Array, jax.Array]:
        at, ahead, slot, half = state
        free = lax.rem(slot + fixed.depth - 1, fixed.depth)
        pl.when(ahead.seq < end)(
            lambda: fetch(walk, buffers, ahead, free, lambda copy: copy.start())
        )
        fetch(walk, buffers, at, slot, lambda copy: copy.wait())
        pl.when(walk.is_first(at))(lambda: start(fixed, buffers, slot))
        attend(fixed, step, buffers, slot, walk.before(at.seq) + at.row, at.block * fixed.keys)
        last = walk.is_last(at)
        pl.when(last)(lambda: finish(fixed, step, walk, buffers, at, half))
        return (
            walk.after(at),
            walk.after(ahead),
            lax.rem(slot + 1, fixed.depth),
            jnp.where(last, 1 - half, half),
        )

    lax.while_loop(
        lambda state: state[0].seq < end,
        body,
        (walk.begin(first), ahead, jnp.int32(0), jnp.int32(0)),
    )
    for half in range(2):
        leave(step, buffers, half, jnp.int32(0), lambda copy: copy.wait())


def fetch(walk: Walk, buffers: Buffers, at: Cursor, slot: Any, act: Callable[[Any], None]) -> None:
    """Start, or await, the copies of a block's pages, and of the query rows if it is the item's
    first.
    """
    page, step = walk.fixed.page, walk.step
    pages = walk.fixed.keys // page
    first = lax.div(walk.first_key(at.seq, at.row), page)
    end = lax.div(walk.end_key(at.seq, at.row) + page - 1, page)

    def copy(i: jax.Array, _: None) -> None:
        where = pl.multiple_of((i - at.block * pages) * page, page)
        act(
            pltpu.make_async_copy(
                step.pool.at[step.table[at.seq, i]],
                buffers.pages.at[slot, pl.ds(where, page)],
                buffers.arrived.at[slot],
            )
        )

    lax.fori_loop(
        jnp.maximum(first, at.block * pages), jnp.minimum(end, (at.block + 1) * pages), copy, None
    )
    source = walk.source(at)
    pl.when(walk.is_first(at))(
        lambda: by_rows(
            walk.size,
            walk.count(at),
            lambda row, n: act(
                pltpu.make_async_copy(
                    step.q.at[pl.ds(source + row, n)],
                    buffers.rows.at[slot, pl.ds(row, n)],
                    buffers.arrived.at[slot],
                )
            ),
        )
    )


def by_rows(size: int, count: jax.Array, act: Callable[[Any, int], None]) -> None:
    """act(0, size) if `count` is all of `size` rows, else act(row, 1) for each."""
    pl.when(count == size)(lambda: act(0, size))
    if size > 1:
        pl.when(count < size)(lambda: lax.fori_loop(0, count, lambda row, _: act(row, 1), None))


def start(fixed: Constants, buffers: Buffers, slot: jax.Array) -> None:
    """An item's queries by key head, and the softmax of nothing."""
    size, heads = buffers.rows.shape[1], fixed.layout.heads
    rows = buffers.rows[slot]
    by_head = rows[0] if size == 1 else jnp.swapaxes(rows, 0, 1)
    buffers.queries[...] = by_head.reshape(heads, fixed.group * size, fixed.layout.width)
    buffers.acc[...] = jnp.zeros_like(buffers.acc)
    buffers.top[...] = jnp.full_like(buffers.top, HIDDEN)
    buffers.total[...] = jnp.zeros_like(buffers.total)


def attend(
    fixed: Constants,
    step: Step,
    buffers: Buffers,
    slot: jax.Array,
    position: jax.Array,
    first: jax.Array,
) -> None:
    """Add a block of keys, the first at position `first`, to the item's softmax."""
    keys, values = by_head(fixed, buffers.pages[slot], buffers.queries.dtype)
    precision = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
    scores = lax.dot_general(
        buffers.queries[...],
        keys,
        (((2,), (2,)), ((0,), (0,))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    scores = hide(fixed, capped(fixed, step, scores), position - first)
    top = jnp.maximum(buffers.top[...], jnp.max(scores, axis=2, keepdims=True))
    weights = jnp.exp2(scores - lanes(top, fixed.keys))
    keep = jnp.exp2(buffers.top[...] - top)
    buffers.top[...] = top
    buffers.total[...] = buffers.total[...] * keep + jnp.sum(weights, axis=2, keepdims=True)
    buffers.acc[...] = buffers.acc[...] * lanes(keep, fixed.layout.width) + lax.dot_general(
        weights.astype(values.dtype),
        values,
        (((2,), (1,)), ((0,), (0,))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def by_head(fixed: Constants, block: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Keys and values [K, C, W] of a block [C, R, W]; both the same where they share rows."""
    layout = fixed.layout
    rows = jnp.swapaxes(block, 0, 1).astype(dtype)
    if layout.packed:
        return rows[: layout.heads], rows[: layout.heads]
    pairs = rows[: 2 * layout.heads].reshape(layout.heads, 2, fixed.keys, layout.width)
    return pairs[:, 0], pairs[:, 1]


def capped(fixed: Constants, step: Step, scores: jax.Array) -> jax.Array:
    """Products of queries and stored keys [K, M, C] -> scores in base 2."""
    scores = scores * (fixed.scale if fixed.softcap else fixed.scale * LOG2E)
    if fixed.scaled:
        scores = scores * step.factors[0][:, :, :1]
    return fixed.softcap * LOG2E * jnp.tanh(scores / fixed.softcap) if fixed.softcap else scores


def hide(fixed: Constants, scores: jax.Array, distance: jax.Array) -> jax.Array:
    """HIDDEN where a row must not see a key. distance: position of the tile's first row less that
    of its first key.
    """
    rows, size = scores.shape[1], scores.shape[1] // fixed.group
    key = lax.broadcasted_iota(jnp.int32, (1, rows, fixed.keys), 2)
    row = lax.broadcasted_iota(jnp.int32, (1, rows, fixed.keys), 1)
    ahead = key - (row & (size - 1))
    seen = ahead <= distance
    if fixed.window:
        seen &= ahead > distance - fixed.window
    return jnp.where(seen, scores, HIDDEN)


def lanes(x: jax.Array, width: int) -> jax.Array:
    """x [K, M, 128], alike in all lanes -> [K, M, width]."""
    return jnp.concatenate([x] * (width // 128), axis=2) if width > 128 else x[:, :, :width]


def finish(
    fixed: Constants, step: Step, walk: Walk, buffers: Buffers, at: Cursor, half: jax.Array
) -> None:
    """Send an item's rows out, once those of the item before last have left."""
    leave(step, buffers, half, jnp.int32(0), lambda copy: copy.wait())
    total = lanes(buffers.total[...], fixed.layout.width)
    done = buffers.acc[...] / total
    if fixed.scaled:
        done = done * step.factors[1][:, :, :1]
    done = done.astype(step.q.dtype)
    by_row = done.reshape(fixed.n_heads, walk.size, fixed.layout.width)
    buffers.out[half] = (
        done.reshape(1, fixed.n_heads, fixed.layout.width)
        if walk.size == 1
        else jnp.swapaxes(by_row, 0, 1)
    )
    buffers.leaving[half] = walk.count(at)
    leave(step, buffers, half, walk.source(at), lambda copy: copy.start())


def leave(
    step: Step, buffers: Buffers, half: Any, source: jax.Array, act: Callable[[Any], None]
) -> None:
    """Start, or await, the copies of one half of `out` to where its rows were read."""
    by_rows(
        buffers.out.shape[1],
        buffers.leaving[half],
        lambda row, n: act(
            pltpu.make_async_copy(
                buffers.out.at[half, pl.ds(row, n)],
                step.q.at[pl.ds(source + row, n)],
                buffers.left.at[half],
            )
        ),
    )
