"""The Pallas kernel of ragged paged attention for TPUs: writes a step's keys and values, then
attends.

One program computes the whole step. Its work is a list of items, each one query block of one
sequence: the single row of a decoding sequence, or up to B rows of a prompt chunk. An item reads
its sequence's keys in blocks of C, with an online softmax (Milakov and Gimelshein, arXiv
1805.02867) in base 2. While it computes on one block, the pages of the next are copied from HBM
into a ring of buffers, also across items and sequences, so that short contexts keep the memory as
busy as long ones.

A block [C, R, W] is transposed to [R, C, W] in registers, all heads at once: 2.2 cycles a key for
16 rows of bfloat16 in the compiler's schedule for v5e; reading one head after another takes 13.

A row's keys are split by their positions alone, so a sequence's result never depends on its
neighbours. Axes as in `jitney.kernels.interface`; R and W as in `pool_layout`, G = H // K, and M =
G * B rows of a tile for B query rows, the rows of one query head together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from jitney.kernels.pallas_tpu.work_order import Constants, Cursor, StepRefs, Walk

_LOG2E = math.log2(math.e)
#: Score of a key that a row must not see; finite, so that it causes no NaN.
_HIDDEN = -1e30


class _Ring(NamedTuple):
    """Buffers for blocks of the pool that are being copied in."""

    pages: jax.Ref  # [depth, C, R, W]
    arrived: jax.Ref  # DMA semaphores [depth]


class _Buffers(NamedTuple):
    """Scratch memory of a sweep; B query rows, M = G * B."""

    ring: _Ring
    rows: jax.Ref  # [depth, B, H, width]: query rows as copied in
    queries: jax.Ref  # [K, M, width]: queries of the item
    top: jax.Ref  # float32 [K, M, 128]: running maximum, the same in all lanes
    total: jax.Ref  # float32 [K, M, 128]: running sum, the same in all lanes
    acc: jax.Ref  # float32 [K, M, width]: weighted values
    out: jax.Ref  # [2, B, H, width]: two halves of results
    leaving: jax.Ref  # int32 [2] in SMEM: rows being copied out of each half of `out`
    left: jax.Ref  # DMA semaphores [2]


def attention_kernel(
    fixed: Constants,
    kv_lens: jax.Ref,
    cu_q: jax.Ref,
    table: jax.Ref,
    write_rows: jax.Ref,
    counts: jax.Ref,
    *refs: jax.Ref,
) -> None:
    """Body of the kernel. refs: [factors], [sinks]; then pool, new, q, pool, q if it writes, else
    pool, q, q, where the last ones are results that alias operands; then the ring, its semaphores
    and a semaphore for writes.
    """
    waiting = list(refs)
    factors = waiting.pop(0) if fixed.scaled else None
    sinks = waiting.pop(0) if fixed.sinks else None
    if fixed.writes:
        _, new, _, pool, q, pages, arrived, wrote = waiting
    else:
        pool, _, q, pages, arrived, wrote = waiting
        new = None
    step = StepRefs(kv_lens, cu_q, table, write_rows, counts, new, q, pool, factors, sinks)
    if fixed.writes:
        _write(fixed, step, wrote)
    lax.fori_loop(0, fixed.depth, partial(_clear, pages), None)
    ring = _Ring(pages, arrived)
    n_decode, n_seqs = counts[0], counts[1]
    _sweep_in_scope(fixed, step, ring, 1, jnp.int32(0), n_decode)
    if fixed.block:
        _sweep_in_scope(fixed, step, ring, fixed.block, n_decode, n_seqs)


def _clear(pages: jax.Ref, slot: jax.Array, _: None) -> None:
    """Fill a block of the ring with zeros: a hidden key still multiplies its value by 0."""
    pages[slot] = jnp.zeros(pages.shape[1:], pages.dtype)


def _sweep_in_scope(
    fixed: Constants, step: StepRefs, ring: _Ring, size: int, first: jax.Array, end: jax.Array
) -> None:
    """`_sweep` with scratch memory for items of `size` query rows."""
    heads, width = fixed.layout.heads, fixed.layout.width
    tile = fixed.group * size
    dtype = step.q.dtype
    pl.run_scoped(
        lambda *scratch: _sweep(fixed, step, _Buffers(ring, *scratch), first, end),
        pltpu.VMEM((fixed.depth, size, fixed.n_heads, width), dtype),
        pltpu.VMEM((heads, tile, width), dtype),
        pltpu.VMEM((heads, tile, 128), jnp.float32),
        pltpu.VMEM((heads, tile, 128), jnp.float32),
        pltpu.VMEM((heads, tile, width), jnp.float32),
        pltpu.VMEM((2, size, fixed.n_heads, width), dtype),
        pltpu.SMEM((2,), jnp.int32),
        pltpu.SemaphoreType.DMA((2,)),
    )


class _Copy(Protocol):
    """A copy between memories, as `pltpu.make_async_copy` describes it."""

    def start(self) -> None: ...

    def wait(self) -> None: ...


_Act = Callable[[_Copy], None]


def _begin(copy: _Copy) -> None:
    """Start a copy."""
    copy.start()


def _wait(copy: _Copy) -> None:
    """Wait for a copy, of which only the size matters."""
    copy.wait()


def _write(fixed: Constants, step: StepRefs, wrote: jax.Ref) -> None:
    """Copy the new rows into their pages, whole pages at once if possible, and wait for them."""
    _each_write(fixed, step, wrote, _begin)
    _each_write(fixed, step, wrote, _wait)


def _each_write(fixed: Constants, step: StepRefs, wrote: jax.Ref, act: _Act) -> None:
    """act(copy) for each copy of a row, or of a page of rows, into the pool."""
    page, new = fixed.page, step.new
    assert new is not None  # the step writes
    n_rows, n_slots = new.shape[0], step.pool.shape[0] * page

    def put(row: jax.Array, slot: jax.Array, count: int) -> None:
        source = new.at[pl.ds(row, count)]
        target = step.pool.at[lax.div(slot, page), pl.ds(lax.rem(slot, page), count)]
        act(pltpu.make_async_copy(source, target, wrote))

    def body(row: jax.Array) -> jax.Array:
        slot = step.write_rows[row]
        last = jnp.minimum(row + page, n_rows) - 1
        inside = slot < n_slots
        begins = (lax.rem(slot, page) == 0) & (row + page <= n_rows)
        whole = begins & inside & (step.write_rows[last] == slot + page - 1)
        if n_rows >= page:
            pl.when(whole)(lambda: put(row, slot, page))
        pl.when(~whole & inside)(lambda: put(row, slot, 1))
        return row + jnp.where(whole, page, 1)

    lax.while_loop(lambda row: row < step.counts[2], body, jnp.int32(0))


class _State(NamedTuple):
    """Position of a sweep."""

    at: Cursor  # the block that is computed on
    ahead: Cursor  # the next block to copy in
    slot: jax.Array  # slot of the ring that holds `at`
    half: jax.Array  # half of `out` for the item's rows


def _sweep(
    fixed: Constants, step: StepRefs, buffers: _Buffers, first: jax.Array, end: jax.Array
) -> None:
    """Attend for sequences [first, end), one item after another."""
    walk = Walk(fixed, step, buffers.rows.shape[1])
    for half in range(2):
        buffers.leaving[half] = 0

    def ask(slot: jax.Array, ahead: Cursor) -> Cursor:
        pl.when(ahead.seq < end)(partial(_fetch, walk, buffers, ahead, slot, _begin))
        return walk.after(ahead)

    ahead = lax.fori_loop(0, fixed.depth - 1, ask, walk.begin(first))

    def body(state: _State) -> _State:
        at, ahead, slot, half = state
        free = lax.rem(slot + fixed.depth - 1, fixed.depth)
        pl.when(ahead.seq < end)(partial(_fetch, walk, buffers, ahead, free, _begin))
        _fetch(walk, buffers, at, slot, _wait)
        pl.when(walk.is_first(at))(partial(_start, step, buffers, slot))
        position = walk.before(at.seq) + at.row
        _attend(fixed, step, buffers, slot, position, at.block * fixed.keys)
        last = walk.is_last(at)
        pl.when(last)(partial(_finish, fixed, step, walk, buffers, at, half))
        next_slot = lax.rem(slot + 1, fixed.depth)
        return _State(walk.after(at), walk.after(ahead), next_slot, jnp.where(last, 1 - half, half))

    state = _State(walk.begin(first), ahead, jnp.int32(0), jnp.int32(0))
    lax.while_loop(lambda state: state.at.seq < end, body, state)
    for half in range(2):
        _leave(step, buffers, half, jnp.int32(0), _wait)


def _fetch(walk: Walk, buffers: _Buffers, at: Cursor, slot: jax.Array, act: _Act) -> None:
    """Start, or wait for, the copies of a block's pages, and of the query rows if it is the item's
    first block.
    """
    page, step = walk.fixed.page, walk.step
    pages = walk.fixed.keys // page
    arrived = buffers.ring.arrived.at[slot]
    first_row = walk.source(at)
    first_page = lax.div(walk.first_key(at.seq, at.row), page)
    end_page = lax.div(walk.end_key(at.seq, at.row) + page - 1, page)

    def copy_page(i: jax.Array, _: None) -> None:
        where = pl.multiple_of((i - at.block * pages) * page, page)
        source = step.pool.at[step.table[at.seq, i]]
        target = buffers.ring.pages.at[slot, pl.ds(where, page)]
        act(pltpu.make_async_copy(source, target, arrived))

    def copy_rows(row: jax.Array | int, count: int) -> None:
        source = step.q.at[pl.ds(first_row + row, count)]
        target = buffers.rows.at[slot, pl.ds(row, count)]
        act(pltpu.make_async_copy(source, target, arrived))

    low = jnp.maximum(first_page, at.block * pages)
    high = jnp.minimum(end_page, (at.block + 1) * pages)
    lax.fori_loop(low, high, copy_page, None)
    pl.when(walk.is_first(at))(partial(_by_rows, walk.size, walk.count(at), copy_rows))


def _by_rows(size: int, count: jax.Array, act: Callable[[jax.Array | int, int], None]) -> None:
    """Call act(0, size) if `count` equals `size`, else act(row, 1) for each row."""
    pl.when(count == size)(lambda: act(0, size))
    if size > 1:
        pl.when(count < size)(lambda: lax.fori_loop(0, count, lambda row, _: act(row, 1), None))


def _start(step: StepRefs, buffers: _Buffers, slot: jax.Array) -> None:
    """Arrange an item's queries by key head, and initialise its softmax, with sinks if any."""
    size = buffers.rows.shape[1]
    rows = buffers.rows[slot]  # [B, H, width]
    turned = rows[0] if size == 1 else jnp.swapaxes(rows, 0, 1)
    buffers.queries[...] = turned.reshape(buffers.queries.shape)
    buffers.acc[...] = jnp.zeros(buffers.acc.shape, jnp.float32)
    shape = buffers.top.shape
    if step.sinks is None:
        buffers.top[...] = jnp.full(shape, _HIDDEN, jnp.float32)
        buffers.total[...] = jnp.zeros(shape, jnp.float32)
        return
    heads, group, lanes = step.sinks.shape
    of_rows = jnp.broadcast_to(step.sinks[...][:, :, None], (heads, group, size, lanes))
    buffers.top[...] = of_rows.reshape(shape)
    buffers.total[...] = jnp.ones(shape, jnp.float32)


def _attend(
    fixed: Constants,
    step: StepRefs,
    buffers: _Buffers,
    slot: jax.Array,
    position: jax.Array,
    first: jax.Array,
) -> None:
    """Add a block of keys, whose first position is `first`, to the item's softmax."""
    keys, values = _by_head(fixed, buffers.ring.pages[slot], buffers.queries.dtype)  # [K, C, width]
    precision = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
    multiply = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    scores = multiply("kmw,kcw->kmc", buffers.queries[...], keys)
    scores = _hide(fixed, _capped(fixed, step, scores), position - first)
    top = jnp.maximum(buffers.top[...], jnp.max(scores, axis=2, keepdims=True))
    weights = jnp.exp2(scores - _lanes(top, fixed.keys))
    keep = jnp.exp2(buffers.top[...] - top)
    summed = multiply("kmc,kcw->kmw", weights.astype(values.dtype), values)
    buffers.top[...] = top
    buffers.total[...] = buffers.total[...] * keep + jnp.sum(weights, axis=2, keepdims=True)
    buffers.acc[...] = buffers.acc[...] * _lanes(keep, fixed.layout.width) + summed


def _by_head(fixed: Constants, block: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Keys and values [K, C, width] of a block [C, R, W]; both the same where they share rows."""
    layout = fixed.layout
    rows = jnp.swapaxes(block, 0, 1).astype(dtype)
    if layout.packed:
        parts = rows[: layout.heads * layout.parts]
        parts = parts.reshape(layout.heads, layout.parts, fixed.keys, layout.row_width)
        keys = jnp.concatenate([parts[:, part] for part in range(layout.parts)], axis=2)
        keys = keys[:, :, : layout.width]
        return keys, keys
    pairs = rows[: 2 * layout.heads].reshape(layout.heads, 2, fixed.keys, layout.width)
    return pairs[:, 0], pairs[:, 1]


def _capped(fixed: Constants, step: StepRefs, scores: jax.Array) -> jax.Array:
    """Products of queries and stored keys [K, M, C] -> scores in base 2."""
    scores = scores * (fixed.scale if fixed.softcap else fixed.scale * _LOG2E)
    if step.factors is not None:
        scores = scores * step.factors[0][:, :, :1]
    if fixed.softcap:
        scores = fixed.softcap * _LOG2E * jnp.tanh(scores / fixed.softcap)
    return scores


def _hide(fixed: Constants, scores: jax.Array, distance: jax.Array) -> jax.Array:
    """scores with `_HIDDEN` where a row must not see a key. distance: position of the tile's first
    row minus that of its first key.
    """
    rows, size = scores.shape[1], scores.shape[1] // fixed.group
    key = lax.broadcasted_iota(jnp.int32, (1, rows, fixed.keys), 2)
    row = lax.broadcasted_iota(jnp.int32, (1, rows, fixed.keys), 1)
    ahead = key - (row & (size - 1))
    seen = ahead <= distance
    if fixed.window:
        seen &= ahead > distance - fixed.window
    return jnp.where(seen, scores, _HIDDEN)


def _lanes(x: jax.Array, width: int) -> jax.Array:
    """x [K, M, 128], the same in all lanes -> [K, M, width]."""
    if width > 128:
        return jnp.concatenate([x] * (width // 128), axis=2)
    return x[:, :, :width]


def _finish(
    fixed: Constants, step: StepRefs, walk: Walk, buffers: _Buffers, at: Cursor, half: jax.Array
) -> None:
    """Start copying an item's rows out, once those of the item before last are copied."""
    _leave(step, buffers, half, jnp.int32(0), _wait)
    n_heads, width = fixed.n_heads, fixed.layout.width
    done = buffers.acc[...] / _lanes(buffers.total[...], width)
    if step.factors is not None:
        done = done * step.factors[1][:, :, :1]
    done = done.astype(step.q.dtype)
    if walk.size == 1:
        buffers.out[half] = done.reshape(1, n_heads, width)
    else:
        buffers.out[half] = jnp.swapaxes(done.reshape(n_heads, walk.size, width), 0, 1)
    buffers.leaving[half] = walk.count(at)
    _leave(step, buffers, half, walk.source(at), _begin)


def _leave(
    step: StepRefs, buffers: _Buffers, half: jax.Array | int, first_row: jax.Array, act: _Act
) -> None:
    """Start, or wait for, the copies of one half of `out` to the item's rows of q."""

    def copy_rows(row: jax.Array | int, count: int) -> None:
        source = buffers.out.at[half, pl.ds(row, count)]
        target = step.q.at[pl.ds(first_row + row, count)]
        act(pltpu.make_async_copy(source, target, buffers.left.at[half]))

    _by_rows(buffers.out.shape[1], buffers.leaving[half], copy_rows)
