"""Gated delta nets (Yang et al. 2024, arXiv 2412.06464) over the rows of a step: the state that a
layer keeps of each sequence, and the computation in plain jax.numpy.

Instead of keys and values a layer keeps a matrix per head, its memory. A row decays the memory,
reads the old value at its key, adds beta times the difference between the new value and the old one
at that key, and reads at its query. Here the rows of a sequence are computed one after another,
always in the same order, so that the results do not depend on how a prompt is cut into chunks. A
GPU computes long pieces in chunks of positions: a cut within a chunk changes the last bits.

Layers of short convolutions (`short_conv`) keep the inputs of their convolution in the same way,
but no memory; those of `jitney.kernels.mamba` keep both.

The state of a sequence is stored in a slot. A step reads it from one slot and writes it to another,
or to the same one; so a slot that is not written again is a checkpoint (`StateSlots`).

Axes: T rows, S sequences, K pieces of a sequence's rows, M slots, G key heads, H value heads (H / G
neighbours share a key head), D and V numbers of a key and of a value, C channels of the convolution
(queries and keys of all key heads, then values: 2 G D + H V), W taps of the convolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jitney.kernels.interface import AttentionMeta

#: Added to the sum of squares when queries and keys are normalised to length 1.
NORM_EPS = 1e-6


#: Most bytes of memories that a TPU computes on at once: 24 MiB stay on the chip, 64 do not.
_BYTES_ON_CHIP = 32 << 20
#: Marks "no slot": an index past all slots.
_NO_SLOT = 1 << 30


class StateSlots(NamedTuple):
    """The slots that a step's sequences read and write; int32 arrays.

    The rows of a sequence are divided into K pieces, some of them empty. The first piece continues
    from the state in `reads`, each later one from the state after the previous piece; the state
    after each piece is written to its own slot. In one step no sequence reads or writes a slot that
    another one writes.
    """

    reads: jax.Array  #: [S]
    cuts: jax.Array  #: [S, K - 1] rows before the end of each piece but the last, ascending
    writes: jax.Array  #: [S, K]; those of empty pieces are not read
    #: [S + 1] the first row of each sequence, then the end of the last one, if drafts are further
    #: rows of their sequence; None: use `AttentionMeta.cu_q`, in which each draft is a sequence.
    ends: jax.Array | None = None
    #: [S] the slot of the state after each sequence's first draft; the slots of the next drafts
    #: follow it.
    drafts: jax.Array | None = None

    @classmethod
    def in_place(cls, slots: jax.Array) -> StateSlots:
        """Each sequence reads and writes one slot, [S]."""
        return cls(slots, jnp.zeros((len(slots), 0), jnp.int32), slots[:, None])


class DeltaState(NamedTuple):
    """State of a recurrent layer in slots, in place of pages; a pytree of arrays."""

    #: Dtypes of the arrays below.
    dtypes = ("float32", "float32", "int32")

    #: float32 [M, W, C]: the last inputs of the convolution, oldest first.
    taps: jax.Array
    #: float32 [M, H, D, V]: the memory; None in layers of short convolutions.
    memory: jax.Array
    #: int32 [M]: number of tokens that both include.
    lengths: jax.Array

    @classmethod
    def empty(cls, shapes: Iterable[tuple[int, ...] | None]) -> DeltaState:
        """The state with all slots empty."""
        pairs = zip(shapes, cls.dtypes, strict=True)
        arrays: list[Any] = [shape and jnp.zeros(shape, dtype) for shape, dtype in pairs]
        return cls(*arrays)


class DeltaWeights(NamedTuple):
    """Weights that mix a layer's rows; a pytree of arrays."""

    #: [W, C]: weights of the convolution, the oldest tap first.
    taps: jax.Array
    #: float32 [H]: the log of the fastest decay; the bias added to the rows' decay rates.
    log_decay: jax.Array
    rate_bias: jax.Array
    #: float32 [V]: weight of the RMS norm of a head's output.
    norm: jax.Array


class DeltaRows(NamedTuple):
    """The rows of a step as `recur` reads them; a pytree of arrays, float32."""

    #: [T, G, D], of length 1; queries are also divided by the square root of D.
    queries: jax.Array
    keys: jax.Array
    #: [T, H, V]
    values: jax.Array
    #: [T, H]: the factor that decays the memory, and the share of the value that is written. beta
    #: None: the value is added unchanged (`jitney.kernels.mamba`), and queries and keys may have
    #: any length.
    decay: jax.Array
    beta: jax.Array | None


class DeltaSequences(NamedTuple):
    """The rows and the slots of a step's sequences; int32 arrays."""

    #: [S + 1]: the first row of each sequence, then the end of the last one.
    ends: jax.Array
    #: [S, K]: rows of a sequence up to the end of each piece.
    stops: jax.Array
    #: [S, K]: the slots that each piece reads and writes; an index past the last slot: not written.
    reads: jax.Array
    writes: jax.Array
    #: [S]: the position of the sequence's first row. At 0 its state is empty, whatever the slot
    #: holds.
    starts: jax.Array
    #: [S] 1: the sequence's only row is in the state already, and only reads it again; else 0.
    again: jax.Array

    @classmethod
    def of(cls, meta: AttentionMeta, lengths: jax.Array) -> DeltaSequences:
        """The sequences of a step; lengths: `DeltaState.lengths`. If the last token of a sequence
        did not count (`Scheduler.sit_out`), its last row is computed a second time.
        """
        slots = meta.state
        assert slots is not None
        ends = meta.cu_q if slots.ends is None else slots.ends
        counts = jnp.diff(ends)[:, None]
        stops = jnp.concatenate([slots.cuts, counts], axis=1)
        has_rows = jnp.diff(stops, axis=1, prepend=0) > 0
        starts = meta.positions.at[ends[:-1]].get(mode="clip")
        old_lengths = lengths.at[slots.reads].get(mode="clip")
        first = slots.reads
        if slots.drafts is not None:
            # The state after the last step's first row is in `reads`. The sequence has advanced by
            # the number of accepted drafts; the step continues from the state after the last one.
            right = jnp.clip(starts - old_lengths, 0, len(lengths) - slots.drafts)
            first = jnp.where(right > 0, slots.drafts + right - 1, first)
        reads = [first]
        for piece in range(stops.shape[1] - 1):
            reads.append(jnp.where(has_rows[:, piece], slots.writes[:, piece], reads[-1]))
        return cls(
            ends=ends,
            stops=stops,
            reads=jnp.stack(reads, axis=1),
            writes=jnp.where(has_rows, slots.writes, _NO_SLOT),
            starts=starts,
            again=((starts > 0) & (starts < old_lengths)).astype(jnp.int32),
        )

    def lengths(self, before: jax.Array) -> jax.Array:
        """`DeltaState.lengths` after the step."""
        return before.at[self.writes].set(self.starts[:, None] + self.stops, mode="drop")

    def owners(self, n_rows: int) -> jax.Array:
        """The sequence of each row, int32 [T]; any sequence for padding rows."""
        # No binary search: it is a loop, and a GPU's step must have no loop to be one graph.
        owners = jnp.sum(self.ends[1:] <= jnp.arange(n_rows)[:, None], axis=1, dtype=jnp.int32)
        return jnp.minimum(owners, len(self.starts) - 1)

    def slots_of_rows(self, n_rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(the slot that each row reads, the slot that it writes, whether its state is empty), [T].

        The first row of a piece reads the piece's slot in `reads`; all its rows write the slot in
        `writes`, which the later rows also read.
        """
        owners, within, piece, begins = self.pieces_of_rows(n_rows)
        writes = self.writes[owners, piece]
        reads = jnp.where(within == begins, self.reads[owners, piece], writes)
        return reads, writes, (within == 0) & (self.starts[owners] == 0)

    def pieces_of_rows(self, n_rows: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """(each row's sequence, its index in the sequence, its piece, the index in the sequence of
        the piece's first row), int32 [T].
        """
        owners = self.owners(n_rows)
        within = jnp.arange(n_rows) - self.ends[owners]
        stops = self.stops[owners]
        piece = jnp.sum(within[:, None] >= stops[:, :-1], axis=1)
        begins = jnp.pad(stops, ((0, 0), (1, 0)))[jnp.arange(n_rows), piece]
        return owners, within, piece, begins


#: Maps a step's rows to the output of each head, float32 [T, H, V], and the memory after the step.
type Recur = Callable[
    [DeltaRows, jax.Array, DeltaSequences, jax.Array], tuple[jax.Array, jax.Array]
]


def recur(
    rows: DeltaRows, memory: jax.Array, sequences: DeltaSequences, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `Recur`: memory [M, H, D, V]; count int32: rows from `count` on are padding."""
    n_rows, n_heads = rows.decay.shape
    if sequences.stops.shape != (n_rows, 1):
        return recur_by_rows(rows, memory, sequences, count)
    # A decode-only bucket: row s is sequence s.
    before = memory.at[sequences.reads[:, 0]].get(mode="clip")
    before = jnp.where((sequences.starts > 0)[:, None, None, None], before, 0)
    read, after = _passed(rows, before, n_heads // rows.keys.shape[1])
    return read, memory.at[sequences.writes[:, 0]].set(after, mode="drop")


def recur_on_tpu(
    rows: DeltaRows, memory: jax.Array, sequences: DeltaSequences, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`recur` for TPUs: one row after another if the memories of all rows together do not fit on
    the chip. Otherwise they would pass through main memory again between reading and writing.
    """
    n_bytes = len(rows.decay) * math.prod(memory.shape[1:]) * memory.dtype.itemsize
    by_rows = n_bytes > _BYTES_ON_CHIP
    return (recur_by_rows if by_rows else recur)(rows, memory, sequences, count)


def recur_by_rows(
    rows: DeltaRows, memory: jax.Array, sequences: DeltaSequences, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`recur` computed one row after another, in any bucket."""
    n_rows, n_heads = rows.decay.shape
    shared = n_heads // rows.keys.shape[1]
    reads, writes, empty = sequences.slots_of_rows(n_rows)
    keep_apart = jax.lax.optimization_barrier

    def add(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        read, memory = carry
        row = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), rows)
        # Without the barriers XLA fuses the read with the write, and copies the memory of all slots
        # for each row.
        before = keep_apart(jax.lax.dynamic_index_in_dim(memory, reads[number], keepdims=False))
        own, after = keep_apart(_passed(row, jnp.where(empty[number], 0, before), shared))
        read = jax.lax.dynamic_update_index_in_dim(read, own, number, 0)
        return read, jax.lax.dynamic_update_index_in_dim(memory, after, writes[number], 0)

    read = jnp.zeros(rows.values.shape, jnp.float32)
    return jax.lax.fori_loop(0, count, add, (read, memory))


def _passed(row: DeltaRows, memory: jax.Array, shared: int) -> tuple[jax.Array, jax.Array]:
    """(output [..., H, V], memory [..., H, D, V]) after one row of each sequence; shared: value
    heads per key head.
    """
    queries, keys = (jnp.repeat(x, shared, axis=-2)[..., None] for x in (row.queries, row.keys))
    memory = memory * row.decay[..., None, None]
    change = row.values
    if row.beta is not None:
        old_values = jnp.sum(memory * keys, axis=-2)
        change = (change - old_values) * row.beta[..., None]
    memory = memory + keys * change[..., None, :]
    return jnp.sum(memory * queries, axis=-2), memory


def delta_net(
    x: jax.Array,
    rates: jax.Array,
    weights: DeltaWeights,
    state: DeltaState,
    meta: AttentionMeta,
    *,
    eps: float,
    recur: Recur = recur,
) -> tuple[jax.Array, DeltaState]:
    """See `jitney.kernels.interface.DeltaNet`. recur: the function that updates and reads the
    memory.
    """
    n_heads, dim, width = state.memory.shape[1:]
    channels = state.taps.shape[2]
    sequences = DeltaSequences.of(meta, state.lengths)
    mixed, gates = x[:, :channels], x[:, channels:].astype(jnp.float32)
    convolved, taps = convolve(mixed, weights.taps, state.taps, sequences)
    rows = _rows_of(jax.nn.silu(convolved), rates, weights, (n_heads, dim, width), sequences)
    read, memory = recur(rows, state.memory, sequences, meta.counts[2])
    read *= jax.lax.rsqrt(jnp.mean(read * read, axis=-1, keepdims=True) + eps) * weights.norm
    o = read.reshape(x.shape[0], -1) * jax.nn.silu(gates)
    return o.astype(x.dtype), DeltaState(taps, memory, sequences.lengths(state.lengths))


def short_conv(
    x: jax.Array, weights: jax.Array, state: DeltaState, meta: AttentionMeta
) -> tuple[jax.Array, DeltaState]:
    """See `jitney.kernels.interface.ShortConv`."""
    sequences = DeltaSequences.of(meta, state.lengths)
    before, behind, values = jnp.split(x.astype(jnp.float32), 3, axis=1)
    convolved, taps = convolve(before * values, weights, state.taps, sequences)
    o = (behind * convolved).astype(x.dtype)
    return o, state._replace(taps=taps, lengths=sequences.lengths(state.lengths))


def convolve(
    mixed: jax.Array, weights: jax.Array, taps: jax.Array, sequences: DeltaSequences
) -> tuple[jax.Array, jax.Array]:
    """mixed [T, C] -> (each channel's convolution, float32 [T, C]; taps [M, W, C] after the
    step).
    """
    n_rows, n_taps = mixed.shape[0], weights.shape[0]
    owners = sequences.owners(n_rows)
    within = jnp.arange(n_rows) - sequences.ends[owners]
    wide = weights.astype(jnp.float32)

    def earlier(back: jax.Array, owners: jax.Array) -> jax.Array:
        """The inputs `back` >= 1 tokens before a sequence's first row; zeros before its start."""
        at = n_taps - back - sequences.again[owners]
        slots = sequences.reads[owners, 0]
        stored = taps.at[slots, jnp.clip(at, 0, n_taps - 1)].get(mode="clip")
        return jnp.where((sequences.starts[owners] >= back)[..., None], stored, 0)

    total = mixed.astype(jnp.float32) * wide[-1]
    for lag in range(1, n_taps):
        here = jnp.pad(mixed, ((lag, 0), (0, 0)))[:n_rows]
        back = jnp.maximum(lag - within, 1)
        row = jnp.where((within >= lag)[:, None], here, earlier(back, owners))
        total += row.astype(jnp.float32) * wide[-1 - lag]
    # The last W rows up to the end of each piece, including rows of earlier steps.
    back = sequences.stops[..., None] - n_taps + jnp.arange(n_taps)  # from the first row on
    new = mixed.at[sequences.ends[:-1, None, None] + back].get(mode="clip")
    every = jnp.arange(len(sequences.starts))[:, None, None]
    old = earlier(jnp.maximum(-back, 1), jnp.broadcast_to(every, back.shape))
    last = jnp.where((back >= 0)[..., None], new, old).astype(taps.dtype)
    total, last = jax.lax.optimization_barrier((total, last))  # read before it is written in place
    return total, taps.at[sequences.writes].set(last, mode="drop")


def _rows_of(
    convolved: jax.Array,
    rates: jax.Array,
    weights: DeltaWeights,
    sizes: tuple[int, int, int],
    sequences: DeltaSequences,
) -> DeltaRows:
    """convolved float32 [T, C], rates float32 [T, 2 H]; sizes: H, D and V."""
    n_heads, dim, width = sizes
    n_rows, channels = convolved.shape
    keys_end = channels - n_heads * width
    queries, keys = jnp.split(convolved[:, :keys_end].reshape(n_rows, -1, dim), 2, axis=1)
    betas, rates = jnp.split(rates, 2, axis=1)
    decay = jnp.exp(-jnp.exp(weights.log_decay) * jax.nn.softplus(rates + weights.rate_bias))
    # A row that is in the memory already does not change it, and reads the same values again.
    again = sequences.again[sequences.owners(n_rows)][:, None] > 0
    return DeltaRows(
        queries=_of_length_one(queries) * dim**-0.5,
        keys=_of_length_one(keys),
        values=convolved[:, keys_end:].reshape(n_rows, n_heads, width),
        decay=jnp.where(again, 1.0, decay),
        beta=jnp.where(again, 0.0, jax.nn.sigmoid(betas)),
    )


def _of_length_one(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPS)
