"""fp8 products with `RoundingKernels`, and `PartialProducts`, in plain JAX: they round and divide
the reference's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jitney.kernels import reference, w8a8
from jitney.kernels.experts import gate
from jitney.kernels.int4 import Int4
from jitney.kernels.interface import Fp8Products, PartialProducts, RoundingKernels
from jitney.kernels.partial_sums import PartialSums
from jitney.kernels.w8a8 import Fp8, RoundedRows


def rounded(x: jax.Array) -> RoundedRows:
    """Rows [T, I], rounded."""
    return RoundedRows(*w8a8.round_to_fp8(x), x.dtype)


def norm_sum(
    x: jax.Array, added: jax.Array, weight: jax.Array, eps: float
) -> tuple[jax.Array, RoundedRows]:
    """See `RoundingKernels`."""
    total, normed = reference.norm_sum(x, added, weight, eps)
    return total, rounded(normed)


def gated(x: jax.Array | RoundedRows, w: Fp8) -> RoundedRows:
    """See `RoundingKernels`."""
    return rounded(gate(w8a8.matmul_fp8(x, w, x.dtype), x.dtype))


ROUNDING = RoundingKernels(norm_sum, gated)
PRODUCTS = Fp8Products(w8a8.pack_fp8, w8a8.matmul_fp8, ROUNDING)


def multiply_in_parts(
    x: jax.Array | RoundedRows, w: jax.Array | Fp8 | Int4, scale: jax.Array | None = None
) -> PartialSums | None:
    """See `PartialProducts`: two parts, with a padding row, of plain and of fp8 weights."""
    units, dtype, rows = None, x.dtype, x
    if isinstance(w, Fp8):
        (rows, units), scale = w8a8.codes_of(x), w.scale
        w = w.kernel[0].T
    if isinstance(w, Int4) or w.shape[0] % 2:
        return None
    assert isinstance(rows, jax.Array)
    padded = jnp.pad(rows.astype(jnp.float32), ((0, 1), (0, 0)), constant_values=jnp.nan)
    halves = padded.reshape(len(padded), 2, -1), w.astype(jnp.float32).reshape(2, -1, w.shape[1])
    return PartialSums(jnp.einsum("tpi,pio->pto", *halves), units, scale, x.shape[0], dtype)


def norm_parts(
    x: jax.Array, added: PartialSums, weight: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `PartialProducts`."""
    return reference.norm_sum(x, added.whole(), weight, eps)


def rounded_norm_parts(
    x: jax.Array, added: PartialSums, weight: jax.Array, eps: float
) -> tuple[jax.Array, RoundedRows]:
    """See `PartialProducts`."""
    return norm_sum(x, added.whole(), weight, eps)


def rotate_parts(
    heads: PartialSums, rope: tuple[jax.Array, jax.Array], kv: jax.Array, *args: Any, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """See `PartialProducts`."""
    rows = heads.whole().reshape(heads.rows, -1, kv.shape[3])
    return reference.rotate_and_write(rows, rope, kv, *args, **options)


PARTS = PartialProducts(multiply_in_parts, norm_parts, rounded_norm_parts, rotate_parts)
