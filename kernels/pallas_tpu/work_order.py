"""The order of work of the Pallas attention kernel.

It needs only scalar arithmetic on integers in SMEM. Names and axes as in
`jitney.kernels.pallas_tpu.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jitney.kernels.pallas_tpu.pool_layout import PoolLayout


@dataclass(frozen=True)
class Constants:
    """Compile-time constants of the kernel."""

    layout: PoolLayout  # of the pool
    n_heads: int  # H
    page: int  # tokens of a page
    keys: int  # C, keys of a block: a multiple of the page size
    depth: int  # blocks in the ring
    block: int  # query rows of a prompt's item; 0 for a decode-only step
    scale: float  # of the scores
    window: int  # positions that a row sees, its own included; 0: all
    softcap: float  # 0: none
    scaled: bool  # the pool is quantised
    sinks: bool  # heads have attention sinks
    writes: bool  # the kernel writes the step's keys and values first

    @property
    def group(self) -> int:
        """G, query heads of a key head."""
        return self.n_heads // self.layout.heads


class StepRefs(NamedTuple):
    """References to a step's inputs."""

    # Fields of `AttentionMeta`, int32 in SMEM.
    kv_lens: jax.Ref  # [S]
    cu_q: jax.Ref  # [S+1]
    table: jax.Ref  # [S, P]
    write_rows: jax.Ref  # [T]
    counts: jax.Ref  # [3] or [4]
    # Arrays in HBM.
    new: jax.Ref | None  # [T, R, W]
    q: jax.Ref  # [T, H, width]; also the output: each row is read before it is written
    pool: jax.Ref  # [N, page, R, W]
    # In VMEM.
    factors: jax.Ref | None  # float32 [2, K, 1, 128] of keys and values
    sinks: jax.Ref | None  # float32 [K, G, 128], in base 2, the same in all lanes


class Cursor(NamedTuple):
    """A position in the work; int32."""

    seq: jax.Array  # of the step
    row: jax.Array  # index in the sequence of the item's first row
    block: jax.Array  # of keys


@dataclass(frozen=True)
class Walk:
    """The order of the work, and the rows and keys of each position."""

    fixed: Constants
    step: StepRefs
    size: int  # B, query rows of an item

    def begin(self, seq: jax.Array) -> Cursor:
        """The first item of a sequence, at its first block."""
        return Cursor(seq, jnp.int32(0), self.first_block(seq, jnp.int32(0)))

    def after(self, at: Cursor) -> Cursor:
        """The next block of the item; or the next item of the sequence, or of the next sequence."""
        last = self.is_last(at)
        row = jnp.where(last, at.row + self.size, at.row)
        done = row >= self.n_rows(at.seq)
        seq = jnp.where(done, at.seq + 1, at.seq)
        row = jnp.where(done, 0, row)
        block = jnp.where(last, self.first_block(seq, row), at.block + 1)
        return Cursor(seq, row, block)

    def is_first(self, at: Cursor) -> jax.Array:
        return at.block == self.first_block(at.seq, at.row)

    def is_last(self, at: Cursor) -> jax.Array:
        return (at.block + 1) * self.fixed.keys >= self.end_key(at.seq, at.row)

    def present(self, seq: jax.Array) -> jax.Array:
        """The sequence's index, clipped to a valid one once all sequences are done."""
        return jnp.minimum(seq, self.step.kv_lens.shape[0] - 1)

    def n_rows(self, seq: jax.Array) -> jax.Array:
        seq = self.present(seq)
        return self.step.cu_q[seq + 1] - self.step.cu_q[seq]

    def before(self, seq: jax.Array) -> jax.Array:
        """Number of the sequence's keys from earlier steps: the position of its first query row."""
        return self.step.kv_lens[self.present(seq)] - self.n_rows(seq)

    def first_key(self, seq: jax.Array, row: jax.Array) -> jax.Array:
        """The first key that the item's rows see."""
        if not self.fixed.window:
            return jnp.int32(0)
        return jnp.maximum(self.before(seq) + row - self.fixed.window + 1, 0)

    def first_block(self, seq: jax.Array, row: jax.Array) -> jax.Array:
        return lax.div(self.first_key(seq, row), self.fixed.keys)

    def end_key(self, seq: jax.Array, row: jax.Array) -> jax.Array:
        """One past the last key that the item's rows see."""
        length = self.step.kv_lens[self.present(seq)]
        return jnp.minimum(length, self.before(seq) + row + self.size)

    def source(self, at: Cursor) -> jax.Array:
        """The item's first row of q."""
        return self.step.cu_q[self.present(at.seq)] + at.row

    def count(self, at: Cursor) -> jax.Array:
        """Query rows of the item, at most B; results of the tile's other rows are dropped."""
        return jnp.minimum(self.size, self.n_rows(at.seq) - at.row)
