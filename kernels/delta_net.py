"""Gated delta nets (Yang et al. 2024, arXiv 2412.06464) over the rows of a step: what a layer keeps
of each sequence, and what it computes in plain jax.numpy.

Instead of keys and values a layer keeps a matrix for each head, its memory. A row decays the
memory, reads the old value at its key, adds beta times the difference between the new value and the
old one at that key, and reads at its query. Here rows of a sequence are computed one after the
other, always in the same order, so that the numbers do not depend on how a prompt was cut into
chunks. On a GPU long pieces pass in chunks of positions: a cut within one changes last bits.

Layers of short convolutions (`short_conv`) keep the inputs of theirs alike, and no memory; those of
`jitney.kernels.mamba` keep both.

A sequence's state is in a slot. A step reads it in one and leaves it in another, or in the same; so
a slot that is not written again is a checkpoint (`StateSlots`).

Axes: T rows, S sequences, K pieces of a sequence's rows, M slots, G key heads, H value heads (H / G
neighbours share a key head), D and V numbers of a key and of a value, C channels of the convolution
(queries and keys of all key heads, then values: 2 G D + H V), W its taps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jitney.kernels.interface import AttentionMeta

#: Added to the sum of squares where queries and keys are brought to length 1.
NORM_EPS = 1e-6


#: Bytes of memories that a TPU computes on at once: 24 MiB were seen to stay, 64 not.
_BYTES_ON_CHIP = 32 << 20
#: No slot: behind all there are.
_NO_SLOT = 1 << 30


class StateSlots(NamedTuple):
    """The slots that a step's sequences read and write; int32 arrays.

    A sequence's rows are K pieces, some of them empty. The first one goes on from the state in
    `reads`, each other one from that behind the piece before; behind each piece the state is left
    in a slot of its own. No slot that one sequence writes is another's in the same step, but where
    both only read it.
    """

    reads: jax.Array  #: [S]
    cuts: jax.Array  #: [S, K - 1] rows before the end of each piece but the last, ascending
    writes: jax.Array  #: [S, K]; those of empty pieces are not read
    #: [S + 1] the first row of each sequence, and the end of the last one, where drafts are further
    #: rows of their sequence; None: `AttentionMeta.cu_q`, in which each draft is a sequence.
    ends: jax.Array | None = None
    #: [S] the slot behind each sequence's first draft; those behind its next ones follow.
    drafts: jax.Array | None = None

    @classmethod
    def in_place(cls, slots: jax.Array) -> StateSlots:
        """Each sequence reads and writes one slot, [S]."""
        return cls(slots, jnp.zeros((len(slots), 0), jnp.int32), slots[:, None])


class DeltaState(NamedTuple):
    """State of a recurrent layer in slots, in place of pages; a pytree of arrays."""

    #: Of the arrays.
    dtypes = ("float32", "float32", "int32")

    #: float32 [M, W, C]: the last inputs of the convolution, oldest first.
    taps: jax.Array
    #: float32 [M, H, D, V]; None of layers that convolve and have no memory.
    memory: jax.Array
    #: int32 [M]: tokens that are in both.
    lengths: jax.Array

    @classmethod
    def empty(cls, shapes: Iterable[tuple[int, ...] | None]) -> DeltaState:
        """The state of slots that no sequence has."""
        pairs = zip(shapes, cls.dtypes, strict=True)
        arrays: list[Any] = [shape and jnp.zeros(shape, dtype) for shape, dtype in pairs]
        return cls(*arrays)


class DeltaWeights(NamedTuple):
    """Weights that mix a layer's rows; a pytree of arrays."""

    #: [W, C]: of the convolution, the oldest tap first.
    taps: jax.Array
    #: float32 [H]: the log of the fastest decay, and what is added to the rows' own rates.
    log_decay: jax.Array
    rate_bias: jax.Array
    #: float32 [V]: of the norm of what a head reads.
    norm: jax.Array


class DeltaRows(NamedTuple):
    """The rows of a step as `recur` reads them; a pytree of arrays, float32."""

    #: [T, G, D], of length 1; queries are divided by the root of D.
    queries: jax.Array
    keys: jax.Array
    #: [T, H, V]
    values: jax.Array
    #: [T, H]: what is left of the memory, and how much of the value is written; None: the value is
    #: added as it is (`jitney.kernels.mamba`), and queries and keys are of any length.
    decay: jax.Array
    beta: jax.Array | None


class DeltaSequences(NamedTuple):
    """Where the rows and the state of a step's sequences lie; int32 arrays."""

    #: [S + 1]: the first row of each sequence, and the end of the last one.
    ends: jax.Array
    #: [S, K]: rows of a sequence up to the end of each piece.
    stops: jax.Array
    #: [S, K]: the slots that a piece reads, and writes; behind the last slot: not written.
    reads: jax.Array
    writes: jax.Array
    #: [S]: the position of its first row. At 0 its state is empty, whatever is in the slot.
    starts: jax.Array
    #: [S] 1: its only row is in the state already, and is to be read again; else 0.
    again: jax.Array

    @classmethod
    def of(cls, meta: AttentionMeta, lengths: jax.Array) -> DeltaSequences:
        """The sequences of a step; lengths: `DeltaState.lengths`. One whose token did not count
        (`Scheduler.sit_out`) has its last row computed a second time.
        """
        slots = meta.state
        assert slots is not None
        ends = meta.cu_q if slots.ends is None else slots.ends
        counts = jnp.diff(ends)[:, None]
        stops = jnp.concatenate([slots.cuts, counts], axis=1)
        has_rows = jnp.diff(stops, axis=1, prepend=0) > 0
        starts = meta.positions.at[ends[:-1]].get(mode="clip")
        known = lengths.at[slots.reads].get(mode="clip")
        first = slots.reads
        if slots.drafts is not None:
            # The last step's first row left its state in `reads`; as many drafts as the sequence
            # is further were right, and the last of these left the state to go on from.
            right = jnp.clip(starts - known, 0, len(lengths) - slots.drafts)
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
            again=((starts > 0) & (starts < known)).astype(jnp.int32),
        )

    def lengths(self, before: jax.Array) -> jax.Array:
        """`DeltaState.lengths` behind the step."""
        return before.at[self.writes].set(self.starts[:, None] + self.stops, mode="drop")

    def owners(self, n_rows: int) -> jax.Array:
        """The sequence of each row, int32 [T]; of padding some sequence."""
        # Not by halving, which is a loop: a GPU's step is one graph only without.
        found = jnp.sum(self.ends[1:] <= jnp.arange(n_rows)[:, None], axis=1, dtype=jnp.int32)
        return jnp.minimum(found, len(self.starts) - 1)

    def slots_of_rows(self, n_rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(the slot that each row reads, the slot that it writes, whether its state is empty), [T].

        A piece goes from the slot that it reads to the one that it writes, and on in that.
        """
        owners, within, piece, begins = self.pieces_of_rows(n_rows)
        writes = self.writes[owners, piece]
        reads = jnp.where(within == begins, self.reads[owners, piece], writes)
        return reads, writes, (within == 0) & (self.starts[owners] == 0)

    def pieces_of_rows(self, n_rows: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """(each row's sequence, its number in that, its piece, the number of that one's first row),
        int32 [T].
        """
        owners = self.owners(n_rows)
        within = jnp.arange(n_rows) - self.ends[owners]
        stops = self.stops[owners]
        piece = jnp.sum(within[:, None] >= stops[:, :-1], axis=1)
        begins = jnp.pad(stops, ((0, 0), (1, 0)))[jnp.arange(n_rows), piece]
        return owners, within, piece, begins


#: From a step's rows to what each head reads, float32 [T, H, V], and the memory behind the step.
type Recur = Callable[
    [DeltaRows, jax.Array, DeltaSequences, jax.Array], tuple[jax.Array, jax.Array]
]


def recur(
    rows: DeltaRows, memory: jax.Array, sequences: DeltaSequences, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `Recur`: memory [M, H, D, V], count int32: rows from there on pad the step."""
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
    """`recur`, one row after the other if all of them have more memory than a TPU keeps on the chip
    from where it is read to where it is written: else all of it passes through main memory again.
    """
    n_bytes = len(rows.decay) * math.prod(memory.shape[1:]) * memory.dtype.itemsize
    by_rows = n_bytes > _BYTES_ON_CHIP
    return (recur_by_rows if by_rows else recur)(rows, memory, sequences, count)


def recur_by_rows(
    rows: DeltaRows, memory: jax.Array, sequences: DeltaSequences, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`recur` of one row after the other, in any bucket."""
    n_rows, n_heads = rows.decay.shape
    shared = n_heads // rows.keys.shape[1]
    reads, writes, empty = sequences.slots_of_rows(n_rows)
    keep_apart = jax.lax.optimization_barrier

    def add(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        read, memory = carry
        row = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), rows)
        # Without the barriers XLA fuses what is read with what is written, and copies the memory of
        # all slots for each row.
        before = keep_apart(jax.lax.dynamic_index_in_dim(memory, reads[number], keepdims=False))
        own, after = keep_apart(_passed(row, jnp.where(empty[number], 0, before), shared))
        read = jax.lax.dynamic_update_index_in_dim(read, own, number, 0)
        return read, jax.lax.dynamic_update_index_in_dim(memory, after, writes[number], 0)

    read = jnp.zeros(rows.values.shape, jnp.float32)
    return jax.lax.fori_loop(0, count, add, (read, memory))


def _passed(row: DeltaRows, memory: jax.Array, shared: int) -> tuple[jax.Array, jax.Array]:
    """(what is read [..., H, V], memory [..., H, D, V]) once a row of each has passed; shared:
    value heads of a key head.
    """
    queries, keys = (jnp.repeat(x, shared, axis=-2)[..., None] for x in (row.queries, row.keys))
    memory = memory * row.decay[..., None, None]
    change = row.values
    if row.beta is not None:
        known = jnp.sum(memory * keys, axis=-2)
        change = (change - known) * row.beta[..., None]
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
    """See `jitney.kernels.interface.DeltaNet`. recur: what passes the rows through the memory."""
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
    """x [T, 3 C] (gates of what is convolved, gates of what comes of it, values), weights [W, C]
    -> (o [T, C] in x's dtype, state), which has no memory.
    """
    sequences = DeltaSequences.of(meta, state.lengths)
    before, behind, values = jnp.split(x.astype(jnp.float32), 3, axis=1)
    convolved, taps = convolve(before * values, weights, state.taps, sequences)
    o = (behind * convolved).astype(x.dtype)
    return o, state._replace(taps=taps, lengths=sequences.lengths(state.lengths))


def convolve(
    mixed: jax.Array, weights: jax.Array, taps: jax.Array, sequences: DeltaSequences
) -> tuple[jax.Array, jax.Array]:
    """mixed [T, C] -> (each channel's convolution, float32 [T, C]; taps [M, W, C] behind the
    step).
    """
    n_rows, n_taps = mixed.shape[0], weights.shape[0]
    owners = sequences.owners(n_rows)
    within = jnp.arange(n_rows) - sequences.ends[owners]
    wide = weights.astype(jnp.float32)

    def earlier(back: jax.Array, owners: jax.Array) -> jax.Array:
        """So many tokens before a sequence's first row, at least one; zeros before its start."""
        at = n_taps - back - sequences.again[owners]
        slots = sequences.reads[owners, 0]
        kept = taps.at[slots, jnp.clip(at, 0, n_taps - 1)].get(mode="clip")
        return jnp.where((sequences.starts[owners] >= back)[..., None], kept, 0)

    total = mixed.astype(jnp.float32) * wide[-1]
    for lag in range(1, n_taps):
        here = jnp.pad(mixed, ((lag, 0), (0, 0)))[:n_rows]
        back = jnp.maximum(lag - within, 1)
        row = jnp.where((within >= lag)[:, None], here, earlier(back, owners))
        total += row.astype(jnp.float32) * wide[-1 - lag]
    # The last W rows up to the end of each piece, those of steps before among them.
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
    # A row that is in the memory already changes nothing, and reads what it read.
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
