"""fp8 products with `RoundingKernels` in plain JAX, which round the reference's results."""

from __future__ import annotations

import jax

from jitney.kernels import reference, w8a8
from jitney.kernels.experts import gate
from jitney.kernels.interface import Fp8Products, RoundingKernels
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
