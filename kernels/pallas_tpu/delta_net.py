"""The Pallas kernel of gated delta nets for TPUs: updates and reads the memory of each sequence row
by row.

A step's rows are cut into items: rows of one piece of a sequence that are in one tile of rows. A
slot is read from main memory only at a sequence's first item, and written only after a piece's last
one. Between items a sequence's memory stays in VMEM; meanwhile the memory of the next sequence is
copied in, and that of the previous one copied out. No sequence writes a slot that another one
reads, so the order of these copies does not matter.

A row does the same operations in the same order in every bucket: its result does not depend on how
a prompt is cut, nor on other rows. In the compiler's schedule for v6e a row takes 148 cycles for a
key head that three value heads share. Chunks of 64 rows with products in float32 would take 106 a
row, and 6806 for a sequence's only row.

Axes as in `jitney.kernels.delta_net`; N items, tiles of R rows.
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
#: Value heads that are computed side by side, so that none waits for its own sums.
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
    """See `jitney.kernels.delta_net.Recur`; the output of padding rows is zero. XLA computes
    Mamba-2 layers, and memories that are not whole vectors.
    """
    n_rows, n_heads = rows.decay.shape
    n_slots, _, dim, width = memory.shape
    if rows.beta is None or width != _LANES or dim % _SUBLANES:
        return recur_on_tpu(rows, memory, sequences, count)
    tile = min(_TILE, n_rows)
    items = _Items.of(sequences, count, n_rows, tile, n_slots)
    gates = jnp.concatenate([rows.decay, rows.beta], axis=1)
    keys, queries, values, gates = (
        jnp.pad(x, ((0, -n_rows % tile), *[(0, 0)] * (x.ndim - 1)))
        for x in (rows.keys, rows.queries, rows.values, gates)
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

        return pl.BlockSpec((1, *memory.shape[1:]), place)

    call = pl.pallas_call(
        partial(_kernel, tile),
        name="delta_net",
        interpret=interpret,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(items),
            grid=(len(items.reads),),
            in_specs=[
                of_rows(1, *columns.shape[1:]),
                of_rows(tile, n_heads, width),
                of_rows(tile, 2 * n_heads, memory_space=pltpu.SMEM),
                of_slot(lambda own: own.reads),
            ],
            out_specs=[of_rows(tile, n_heads, width), of_slot(lambda own: own.writes)],
            scratch_shapes=[pltpu.VMEM(memory.shape[1:], jnp.float32)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(values.shape, jnp.float32),
            jax.ShapeDtypeStruct(memory.shape, memory.dtype),
        ],
        input_output_aliases={len(items) + 3: 1},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_VMEM),
    )
    read, memory = call(*items, columns, values, gates, memory)
    is_row = jnp.arange(n_rows)[:, None, None] < count
    return jnp.where(is_row, read[:n_rows], 0), memory


def _as_columns(rows: jax.Array, tile: int) -> jax.Array:
    """rows [T, G, D] -> [T / R, G, D, 64], the rows of a tile as columns."""
    tiles = rows.reshape(-1, tile, *rows.shape[1:]).transpose(0, 2, 3, 1)
    return jnp.pad(tiles, ((0, 0), (0, 0), (0, 0), (0, _TILE - tile)))


def _kernel(tile: int, *refs: jax.Ref) -> None:
    """Compute one item. refs: those of `_Items`; keys and queries as columns [1, G, D, 128], values
    [R, H, V], decays and betas [R, 2 H], the slot's memory before [1, H, D, V]; the output
    [R, H, V], the slot's memory after [1, H, D, V]; scratch for the sequence's memory [H, D, V].
    """
    items = _Items._make(refs[: len(_Items._fields)])
    columns, values, gates, before, read, after, kept = refs[len(items) :]
    number = pl.program_id(0)
    n_heads, n_keys = len(kept), columns.shape[1]
    shared = n_heads // n_keys
    most = max(1, _SIDE_BY_SIDE // shared)
    group = max(n for n in range(1, most + 1) if n_keys % n == 0)

    @pl.when((number < items.count[0]) & (items.begins[number] > 0))
    def _begin() -> None:
        kept[...] = jnp.where(items.empty[number] > 0, 0.0, before[0])

    def pass_key_head(row: jax.Array, key_head: jax.Array) -> None:
        both = columns[0, key_head]
        key, query = _column(both, row), _column(both, _TILE + row)
        for part in range(shared):
            head = key_head * shared + part
            decay, beta = gates[row, head], gates[row, n_heads + head]
            known = decay * jnp.sum(kept[head] * key, axis=0, keepdims=True)
            change = (values[row, pl.ds(head, 1)] - known) * beta
            memory = kept[head] * decay + key * change
            kept[head] = memory
            read[row, pl.ds(head, 1)] = jnp.sum(memory * query, axis=0, keepdims=True)

    @pl.when(number < items.count[0])
    def _pass() -> None:
        first = lax.rem(items.first[number], tile)
        end = first + items.first[number + 1] - items.first[number]

        def pass_row(row: jax.Array, key_head: jax.Array) -> jax.Array:
            for own in range(group):
                pass_key_head(row, key_head + own)
            return key_head

        def pass_group(at: jax.Array, _: None) -> None:
            lax.fori_loop(first, end, pass_row, at * group)

        lax.fori_loop(0, n_keys // group, pass_group, None)

    @pl.when((number < items.count[0]) & (items.ends[number] > 0))
    def _end() -> None:
        after[0] = kept[...]


def _column(x: jax.Array, at: jax.Array) -> jax.Array:
    """Column `at` of x [D, 128], broadcast to all lanes."""
    lanes = jnp.full(x.shape, at, jnp.int32)
    return jnp.take_along_axis(x, lanes, axis=1, mode="promise_in_bounds")
