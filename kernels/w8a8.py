"""Products of rows rounded to int8 or fp8 (e4m3) with weights in the same format.

Axes: T rows, I inputs, O outputs. Row t of x is quantised in each product with scale s[t], by which
its largest magnitude becomes 127 in int8 or 448 in fp8. Output o has scale[o]. So y[t, o] = s[t] *
scale[o] * (sum of products of codes): both scales are applied after the sum. s[t] depends on row t
alone, so that a row's result does not depend on other rows.

Sums of int8 codes are exact in every order; those of fp8 are in float32. `matmul_fp8` is for NVIDIA
GPUs with fp8 products, from compute capability 8.9 on: XLA uses both operands unconverted, in
cuBLASLt's fp8 product or a Triton one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

#: Lower bound of a row's largest magnitude.
LEAST = 1e-30
#: Largest int8 code.
_GREATEST_INT8 = 127.0
#: The fp8 dtype and its largest number.
FP8, GREATEST_FP8 = jnp.float8_e4m3fn, 448.0


class Int8(NamedTuple):
    """Weights [I, O] with a scale for each output."""

    #: int8 [I, O], or packed by `Int8Products.pack`, or a `OneOf` of packed matrices.
    kernel: jax.Array
    #: float32 [O].
    scale: jax.Array


class Fp8(NamedTuple):
    """Weights [I, O] with a scale for each output."""

    #: float8_e4m3fn [I, O], or packed by `Fp8Products.pack`.
    kernel: jax.Array
    #: float32 [O].
    scale: jax.Array


@dataclass(frozen=True)
class RoundedRows:
    """Rows [T, I] that a kernel has rounded as `round_to_fp8` does, so that a product need not."""

    #: float8_e4m3fn [T, I]; more rows of undefined numbers may follow.
    codes: jax.Array
    #: Scales, float32 [T, 1].
    units: jax.Array
    #: Of the rows before they were rounded.
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.units), self.codes.shape[1]

    def widened(self) -> jax.Array:
        """The rows as float32 [T, I]."""
        return self.codes[: len(self.units)].astype(jnp.float32) * self.units


def round_to_int8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [T, I] -> (integers from -127 to 127 in x's dtype [T, I], scales float32 [T, 1]).

    The scale of a row with a non-finite number is NaN, and so is its product.
    """
    wide = x.astype(jnp.float32)
    most = _greatest_of_rows(wide)
    codes = jnp.rint(wide * (_GREATEST_INT8 / most))
    return codes.astype(x.dtype), most / _GREATEST_INT8


def round_to_fp8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [T, I] -> (float8_e4m3fn [T, I], scales float32 [T, 1]).

    The scale of a row with a non-finite number is NaN, and so is its product.
    """
    wide = x.astype(jnp.float32)
    most = _greatest_of_rows(wide)
    codes = wide * (GREATEST_FP8 / most)
    # Multiplied by the inverse: XLA's scalar and vector divisions differ in the last bit.
    return codes.astype(FP8), most * (1 / GREATEST_FP8)


def pack_fp8(w: jax.Array, parts: int = 1) -> jax.Array:
    """w [I, O] -> [1, O, I].

    fp8 units need operands with contiguous inputs; from [I, O] XLA would make a transposed copy in
    every step. The first axis marks a packed matrix.
    """
    del parts  # this format has no gated product
    return w.T[None]


def matmul_fp8(
    x: jax.Array | RoundedRows,
    w: Fp8,
    dtype: DTypeLike = jnp.float32,
    *,
    rounded: Callable[[jax.Array], tuple[jax.Array, jax.Array]] = round_to_fp8,
) -> jax.Array:
    """x [T, I], its rows rounded to fp8, times w, packed by `pack_fp8` -> [T, O] in `dtype`.
    rounded: a function like `round_to_fp8`; its codes may have more rows, which are left out.
    """
    codes, units = codes_of(x, rounded)
    sums = sums_of_codes(codes, w, dtype)[: len(units)].astype(jnp.float32)
    return (sums * units * w.scale).astype(dtype)


def codes_of(
    x: jax.Array | RoundedRows,
    rounded: Callable[[jax.Array], tuple[jax.Array, jax.Array]] = round_to_fp8,
) -> tuple[jax.Array, jax.Array]:
    """Codes and units of rows, which `rounded` makes of them if they are not rounded yet."""
    return (x.codes, x.units) if isinstance(x, RoundedRows) else rounded(x)


def sums_of_codes(codes: jax.Array, w: Fp8, dtype: DTypeLike) -> jax.Array:
    """codes float8_e4m3fn [T, I] times w, packed by `pack_fp8`, without scales -> [T, O] in
    bfloat16 if that is `dtype`, else in float32.

    The sums are written to memory. float16 would overflow, since they reach I * 448 * 448. Without
    HIGHEST, an H100 adds fp8 products with 14 bits.
    """
    return jax.lax.dot_general(
        codes,
        w.kernel[0],
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32,
    )


def _greatest_of_rows(x: jax.Array) -> jax.Array:
    """x float32 [T, I] -> the greatest magnitude of each row, float32 [T, 1]; NaN for a row with a
    non-finite number.
    """
    most = jnp.max(jnp.abs(x), axis=1, keepdims=True)
    return jnp.where(jnp.isfinite(most), jnp.maximum(most, LEAST), jnp.nan)
