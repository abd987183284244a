"""The Pallas kernel of gated delta nets and Mamba-2 for TPUs: updates and reads the memory of each
sequence row by row.

A step's rows are cut into items: rows of one piece of a sequence that are in one tile of rows. A
slot is read from main memory only at a sequence's first item, and written only after a piece's last
one. Between items a sequence's memory stays in VMEM; meanwhile the memory of the next sequence is
copied in, and that of the previous one copied out. No sequence writes a slot that another one
reads, so the order of these copies does not matter.

A row does the same operations in the same order in every bucket: its result does not depend on how
a prompt is cut, nor on other rows. In the compiler's schedule for v6e a row takes 148 cycles for a
key head that three value heads share. Chunks of 64 rows with products in float32 would take 106 a
row, and 6806 for a sequence's only row.

Heads of fewer than 128 values, as those of Mamba-2, are computed in packs whose values fill a
vector. XLA stores their memory with the dims of keys in lanes, in which each row would sum over
lanes; so it is transposed where a sequence begins and where a piece ends. A row of Nemotron 3 Nano
takes 155 cycles for a group of eight heads, 1,240 for all eight groups; the transpositions of a
sequence take 1,960. Copying its memory in and out takes some 5,000 (XLA's estimate).

Axes as in `jitney.kernels.delta_net`; N items, tiles of R rows, P packs of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jitney.kernels.delta_net import DeltaRows, DeltaSequences, recur_on_tpu
from jitney.kernels.pallas_tpu.interpreting import Interpret

#: A number of a program in its grid, or of a block.
type _Index = jax.Array | int
#: Rows and columns of a vector register.
_SUBLANES, _LANES = 8, 128
#: Most rows of a tile: its keys and queries, as columns, fill the width of a register.
_TILE = _LANES // 2
#: Packs that are computed side by side at most, so that none waits for its own sums.
_SIDE_BY_SIDE = 6
#: Most VMEM of the kernel, in bytes: five times the memory of a sequence, and tiles of rows.
_VMEM = 56 << 20


class _Items(NamedTuple):
    """The rows and slots of each item: int32 arrays, or references to them in the kernel."""

    #: [N + 1]: the item's first row; after the last item, the end of all rows.
    first: jax.Array
    #: [N]: the slot that the item's sequence starts from, and the one that its piece writes.
    reads: jax.Array
    writes: jax.Array
    #: [N] 1: a sequence begins; its memory is empty; a piece ends; else 0.
    begins: jax.Array
    empty: jax.Array
    ends: jax.Array
    #: [1]: number of items, at least 1; an item without rows writes its slot unchanged.
    count: jax.Array

    def present(self, number: _Index) -> jax.Array:
        """The item of that number, or the last item, after which nothing is copied in."""
        return jnp.minimum(number, self.count[0] - 1)

    @classmethod
    def of(
        cls, sequences: DeltaSequences, count: jax.Array, n_rows: int, tile: int, n_slots: int
    ) -> _Items:
        """The items of `count` rows in a bucket of `n_rows` rows, with tiles of `tile` rows."""
        owners, within, piece, begins = sequences.pieces_of_rows(n_rows)
        row = jnp.arange(n_rows)
        opens = ((within == begins) | (row % tile == 0)) & (row < count)
        most = min(n_rows, sequences.writes.size + n_rows // tile)
        opened = jnp.cumsum(opens, dtype=jnp.int32)
        first = jnp.sum(opened <= jnp.arange(most + 1)[:, None], axis=1, dtype=jnp.int32)
        first = jnp.minimum(first, count)
        at = jnp.minimum(first[:-1], n_rows - 1)
        own, piece, some = owners[at], piece[at], opened[-1] > 0
        reads = jnp.clip(sequences.reads[own, 0], 0, n_slots - 1)
        ends = sequences.ends[own] + sequences.stops[own, piece] == first[1:]
        return cls(
            first=first,
            reads=reads,
            writes=jnp.where(some, sequences.writes[own, piece], reads),
            begins=((within[at] == 0) | ~some).astype(jnp.int32),
            empty=((sequences.starts[own] == 0) & some).astype(jnp.int32),
            ends=(ends | ~some).astype(jnp.int32),
            count=jnp.maximum(opened[-1:], 1),
        )


def recur(
    rows: DeltaRows,
    memory: jax.Array,
    sequences: DeltaSequences,
    count: jax.Array,
    interpret: Interpret = False,
) -> tuple[jax.Array, jax.Array]:
    """See `jitney.kernels.delta_net.Recur`; the output of padding rows is zero. XLA computes heads
    that do not fill whole vectors.
    """
    n_rows, n_heads = rows.decay.shape
    n_slots, _, dim, width = memory.shape
    pack = max(1, _LANES // width)
    has_whole_vectors = pack * width == _LANES and dim % (_LANES if pack > 1 else _SUBLANES) == 0
    if not has_whole_vectors or n_heads % (pack * rows.keys.shape[1]):
        return recur_on_tpu(rows, memory, sequences, count)
    n_packs = n_heads // pack
    slots = memory
    if pack > 1:
        # XLA stores such a memory with the dims of keys in lanes: this moves nothing.
        slots = memory.swapaxes(2, 3).reshape(n_slots, n_packs, _LANES, dim)
    tile = min(_TILE, n_rows)
    items = _Items.of(sequences, count, n_rows, tile, n_slots)
    gates = rows.decay
    if rows.beta is not None:
        gates = jnp.concatenate([rows.decay, rows.beta], axis=1)
    keys, queries, values, gates = (
        jnp.pad(x, ((0, -n_rows % tile), *[(0, 0)] * (x.ndim - 1)))
        for x in (rows.keys, rows.queries, rows.values.reshape(n_rows, n_packs, _LANES), gates)
    )
    columns = jnp.concatenate([_as_columns(x, tile) for x in (keys, queries)], axis=3)

    def of_rows(*shape: int, memory_space: Any = None) -> pl.BlockSpec:
        """The block spec of an array with one block per tile."""

        def place(number: _Index, *refs: jax.Ref) -> tuple[_Index, ...]:
            own = _Items._make(refs)
            return own.first[own.present(number)] // tile, *[0] * (len(shape) - 1)

        return pl.BlockSpec(shape, place, memory_space=memory_space)

    def of_slot(which: Callable[[_Items], jax.Array]) -> pl.BlockSpec:
        def place(number: _Index, *refs: jax.Ref) -> tuple[_Index, ...]:
            own = _Items._make(refs)
            return which(own)[own.present(number)], 0, 0, 0

        return pl.BlockSpec((1, *slots.shape[1:]), place)

    call = pl.pallas_call(
        partial(_kernel, tile, width, rows.beta is not None),
        name="delta_net",
        interpret=interpret,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(items),
            grid=(len(items.reads),),
            in_specs=[
                of_rows(1, *columns.shape[1:]),
                of_rows(tile, n_packs, _LANES),
                of_rows(tile, gates.shape[1], memory_space=pltpu.SMEM),
                of_slot(lambda own: own.reads),
            ],
            out_specs=[of_rows(tile, n_packs, _LANES), of_slot(lambda own: own.writes)],
            scratch_shapes=[pltpu.VMEM((n_packs, dim, _LANES), jnp.float32)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(values.shape, jnp.float32),
            jax.ShapeDtypeStruct(slots.shape, memory.dtype),
        ],
        input_output_aliases={len(items) + 3: 1},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_VMEM),
    )
    read, slots = call(*items, columns, values, gates, slots)
    is_row = jnp.arange(n_rows)[:, None, None] < count
    read = jnp.where(is_row, read[:n_rows], 0).reshape(rows.values.shape)
    if pack > 1:
        slots = slots.reshape(n_slots, n_heads, width, dim).swapaxes(2, 3)
    return read, slots


def _as_columns(rows: jax.Array, tile: int) -> jax.Array:
    """rows [T, G, D] -> [T / R, G, D, 64], the rows of a tile as columns."""
    tiles = rows.reshape(-1, tile, *rows.shape[1:]).transpose(0, 2, 3, 1)
    return jnp.pad(tiles, ((0, 0), (0, 0), (0, 0), (0, _TILE - tile)))


def _kernel(tile: int, width: int, corrects: bool, *refs: jax.Ref) -> None:
    """Compute one item. refs: those of `_Items`; keys and queries as columns [1, G, D, 128], values
    [R, P, 128], decays [R, H] and, if `corrects`, betas beside them, the slot's memory before; the
    output [R, P, 128], the slot's memory after; scratch for the sequence's memory [P, D, 128]. The
    slots are [1, P, D, 128], or with several heads in a pack [1, P, 128, D]. width: values of a
    head.
    """
    items = _Items._make(refs[: len(_Items._fields)])
    columns, values, gates, before, read, after, kept = refs[len(items) :]
    number = pl.program_id(0)
    n_packs, n_keys, pack = len(kept), columns.shape[1], _LANES // width
    shared = n_packs // n_keys
    parts = _divisor(shared, _SIDE_BY_SIDE)
    group = _divisor(n_keys, _SIDE_BY_SIDE // shared)

    @pl.when((number < items.count[0]) & (items.begins[number] > 0))
    def _begin() -> None:
        for own in range(n_packs):
            old = before[0, own]
            kept[own] = jnp.where(items.empty[number] > 0, 0.0, old.T if pack > 1 else old)

    def by_lane(row: jax.Array, head: jax.Array) -> jax.Array:
        """The gates of a pack's heads from `head` on, each in its head's lanes."""
        gate = gates[row, head]
        lane = lax.broadcasted_iota(jnp.int32, (1, _LANES), 1)
        for own in range(1, pack):
            gate = jnp.where(lane >= own * width, gates[row, head + own], gate)
        return gate

    def pass_packs(row: jax.Array, key_head: jax.Array, first: jax.Array) -> None:
        both = columns[0, key_head]
        key, query = _column(both, row), _column(both, _TILE + row)
        for part in range(parts):
            at = first + part
            decay = by_lane(row, at * pack)
            change = values[row, pl.ds(at, 1)]
            if corrects:
                known = decay * jnp.sum(kept[at] * key, axis=0, keepdims=True)
                change = (change - known) * by_lane(row, (n_packs + at) * pack)
            memory = kept[at] * decay + key * change
            kept[at] = memory
            read[row, pl.ds(at, 1)] = jnp.sum(memory * query, axis=0, keepdims=True)

    @pl.when(number < items.count[0])
    def _pass() -> None:
        first = lax.rem(items.first[number], tile)
        end = first + items.first[number + 1] - items.first[number]

        def pass_group(at: jax.Array, _: None) -> None:
            def pass_row(row: jax.Array, _: None) -> None:
                for own in range(group):
                    run = at * group + own
                    pass_packs(row, run // (shared // parts), run * parts)

            lax.fori_loop(first, end, pass_row, None)

        lax.fori_loop(0, n_packs // (group * parts), pass_group, None)

    @pl.when((number < items.count[0]) & (items.ends[number] > 0))
    def _end() -> None:
        for own in range(n_packs):
            after[0, own] = kept[own].T if pack > 1 else kept[own]


def _divisor(number: int, most: int) -> int:
    """The greatest divisor of a number up to `most`, or 1."""
    return max(n for n in range(1, max(1, most) + 1) if number % n == 0)


def _column(x: jax.Array, at: jax.Array) -> jax.Array:
    """Column `at` of x [D, 128], broadcast to all lanes."""
    lanes = jnp.full(x.shape, at, jnp.int32)
    return jnp.take_along_axis(x, lanes, axis=1, mode="promise_in_bounds")
