"""MXFP4 weights: memory layout, and the product with them in plain jax.numpy.

A weight is an e2m1 number (a sign, two bits of exponent, one of fraction) times a power of two that
32 inputs of an output share (OCP Microscaling Formats, version 1.0). So every weight is exact in
bfloat16. Axes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

#: The magnitudes of e2m1, by their code; the code of a negative number is 8 greater.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Mxfp4(NamedTuple):
    """A weight matrix [I, O] in 4.25 bits per weight; a pytree of arrays."""

    #: uint8 [I // 2, O]: row r of block b (16 rows each) holds inputs 32b + r (low bits) and 32b +
    #: r + 16. Or packed by `Mxfp4Products.pack`, or a `OneOf` of packed matrices.
    packed: Any
    #: uint8 [I // 32, O]: exponents of two plus 127; or packed like `packed`.
    scales: Any

    #: Inputs that share a scale.
    block = 32

    @classmethod
    def rounded(cls, weights: jax.Array) -> Mxfp4:
        """Floats [I, O] rounded to e2m1, with powers of two by which the largest magnitude of each
        32 inputs is in [4, 8); the largest value of e2m1 is 6.
        """
        blocks = weights.astype(jnp.float32).reshape(-1, cls.block, weights.shape[1])
        _, exponent = jnp.frexp(jnp.max(jnp.abs(blocks), axis=1))
        scales = jnp.clip(exponent - 3 + 127, 1, 254).astype(jnp.uint8)
        sizes = jnp.abs(blocks) / powers(scales)[:, None]
        middles = jnp.array([(a + b) / 2 for a, b in itertools.pairwise(_MAGNITUDES)], jnp.float32)
        codes = jnp.searchsorted(middles, sizes).astype(jnp.uint8) | jnp.where(blocks < 0, 8, 0)
        low, high = jnp.split(codes.astype(jnp.uint8), 2, axis=1)
        return cls((low | high << 4).reshape(-1, weights.shape[1]), scales)

    def unpacked(self) -> jax.Array:
        """The weights as float32 [I, O]."""
        blocks, outputs = self.scales.shape
        halves = self.packed.reshape(blocks, -1, outputs)
        codes = jnp.concatenate([halves & 15, halves >> 4], axis=1)
        signed = jnp.array((*_MAGNITUDES, *(-one for one in _MAGNITUDES)), jnp.float32)
        wide = signed[codes] * powers(self.scales)[:, None]
        return wide.reshape(-1, outputs)


def powers(scales: jax.Array) -> jax.Array:
    """Exponents of two plus 127, uint8 -> the powers of two, float32; 0 for exponent code 0."""
    return jax.lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32)


def matmul_mxfp4(x: jax.Array, weights: Mxfp4, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """x [M, I] -> [M, O] in `dtype`; the weights are first unpacked to memory in x's dtype."""
    wide = weights.unpacked().astype(x.dtype)
    return jnp.matmul(x, wide, preferred_element_type=jnp.float32).astype(dtype)
