"""Group-wise int4 weights: how they lie in memory, and the product with them in plain jax.numpy.

Axes: M rows, I inputs, O outputs, R inputs per group (32, 64 or 128). A weight is (nibble - zero) *
scale with one scale and one zero point per group and output.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

GROUP_SIZES = (32, 64, 128)
#: Zero point of symmetric weights: nibbles 0..15 stand for -8..7.
MIDDLE = 8


class Int4(NamedTuple):
    """A weight matrix [I, O] kept in 4 bits; a pytree of arrays."""

    # uint8 [I // 2, O]: row r of group g (R // 2 rows each) holds inputs gR + r (low) and + R // 2
    packed: jax.Array
    scales: jax.Array  # floating [I // R, O]
    zeros: jax.Array | None  # uint8 [I // R, O], 0..16; None: MIDDLE everywhere

    @property
    def shape(self) -> tuple[int, int]:
        """(I, O)."""
        return 2 * self.packed.shape[0], self.packed.shape[1]

    @property
    def group_size(self) -> int:
        """R."""
        return self.shape[0] // self.scales.shape[0]


class Int4Matmul(Protocol):
    """A product with group-wise int4 weights."""

    def __call__(self, x: jax.Array, weights: Int4, /, dtype: DTypeLike = ...) -> jax.Array:
        """x [M, I] -> [M, O] in `dtype`, which is float32 unless given."""
        ...


class Int4Gated(Protocol):
    """That product, gated at once."""

    def __call__(self, x: jax.Array, weights: Int4, /) -> jax.Array:
        """x [M, I], weights [I, 2F] -> silu(first F columns of the product) * the others, [M, F] in
        x's dtype.
        """
        ...


def unpack_int4(weights: Int4) -> jax.Array:
    """The weights as float32 [I, O]."""
    size_in, size_out = weights.shape
    groups = weights.scales.shape[0]
    halves = weights.packed.reshape(groups, -1, size_out)
    nibbles = jnp.concatenate([halves & 15, halves >> 4], axis=1).astype(jnp.float32)
    zeros = MIDDLE if weights.zeros is None else weights.zeros.astype(jnp.float32)[:, None]
    return ((nibbles - zeros) * weights.scales.astype(jnp.float32)[:, None]).reshape(
        size_in, size_out
    )


def matmul_int4(x: jax.Array, weights: Int4, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """See `Int4Matmul`; the weights are written out in x's dtype first, rounded to it."""
    wide = unpack_int4(weights).astype(x.dtype)
    return jnp.matmul(x, wide, preferred_element_type=jnp.float32).astype(dtype)
