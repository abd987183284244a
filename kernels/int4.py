"""Group-wise int4 weights: their memory layout, and products with them in jax.numpy.

Axes: M rows, I inputs, O outputs, R inputs per group (32, 64 or 128). A weight is (nibble - zero) *
scale with one scale and one zero point per group and output.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


class Int4(NamedTuple):
    """A weight matrix [I, O] in 4 bits; a pytree of arrays."""

    # uint8 [I // 2, O]: row r of group g (R // 2 rows each) holds inputs gR + r (low bits) and gR +
    # r + R // 2.
    packed: jax.Array
    scales: jax.Array  # floating [I // R, O]
    zeros: jax.Array | None  # uint8 [I // R, O], 0..16; None: `middle` everywhere

    #: Supported numbers of inputs per group.
    group_sizes = (32, 64, 128)
    #: Zero point of symmetric weights: nibbles 0..15 are -8..7.
    middle = 8

    @property
    def shape(self) -> tuple[int, int]:
        """(I, O)."""
        return 2 * self.packed.shape[0], self.packed.shape[1]

    @property
    def group_size(self) -> int:
        """R."""
        return self.shape[0] // self.scales.shape[0]

    def unpacked(self) -> jax.Array:
        """The weights as float32 [I, O]."""
        groups = self.scales.shape[0]
        halves = self.packed.reshape(groups, -1, self.shape[1])
        nibbles = jnp.concatenate([halves & 15, halves >> 4], axis=1).astype(jnp.float32)
        zeros = self.middle if self.zeros is None else self.zeros.astype(jnp.float32)[:, None]
        wide = (nibbles - zeros) * self.scales.astype(jnp.float32)[:, None]
        return wide.reshape(self.shape)


def matmul_int4(x: jax.Array, weights: Int4, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """x [M, I] -> [M, O] in `dtype`; the weights are first unpacked and rounded to x's dtype."""
    wide = weights.unpacked().astype(x.dtype)
    return jnp.matmul(x, wide, preferred_element_type=jnp.float32).astype(dtype)
