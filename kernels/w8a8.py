"""Products of rows that are rounded to int8 or to fp8 (e4m3) with weights in the same: what they
are made of.

Axes: T rows, I inputs, O outputs. Row t of x stands in units of s[t], found anew in every product:
the greatest magnitude in that row is 127 whole units of int8, or 448 of fp8. Output o has weights
in units of scale[o]. So y[t, o] = s[t] * scale[o] * (a sum of products of the codes), and both
kinds of unit come after the sum. A row's units depend on that row alone: it stands for the same
numbers alone and among others.

Sums of int8 codes are exact: a row has the same result alone and among others, and in every order
of adding up. Those of fp8 are added in float32. `matmul_fp8` is for NVIDIA GPUs that multiply fp8
themselves, from compute capability 8.9 on: XLA takes both operands as they are, in cuBLASLt's fp8
product or in a Triton one.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

#: Rows whose numbers are all smaller are multiplied as if they had one as great.
_LEAST = 1e-30
#: The greatest code of a row in int8.
_GREATEST_INT8 = 127.0
#: What rows and weights are rounded to in fp8, and its greatest number.
_FP8, _GREATEST_FP8 = jnp.float8_e4m3fn, 448.0


class Int8(NamedTuple):
    """Weights [I, O] with a scale for each output."""

    #: int8 [I, O], or as `Int8Products.pack` laid it out, or a `OneOf` of such.
    kernel: jax.Array
    #: float32 [O].
    scale: jax.Array


class Fp8(NamedTuple):
    """Weights [I, O] with a scale for each output."""

    #: float8_e4m3fn [I, O], or as `Fp8Products.pack` laid it out.
    kernel: jax.Array
    #: float32 [O].
    scale: jax.Array


def round_to_int8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [T, I] -> (whole numbers from -127 to 127 in x's dtype [T, I], steps float32 [T, 1]).

    The steps of a row with a number that is not finite are NaN, and so is its product.
    """
    wide = x.astype(jnp.float32)
    most = _greatest_of_rows(wide)
    codes = jnp.rint(wide * (_GREATEST_INT8 / most))
    return codes.astype(x.dtype), most / _GREATEST_INT8


def round_to_fp8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [T, I] -> (float8_e4m3fn [T, I], units float32 [T, 1]).

    The units of a row with a number that is not finite are NaN, and so is its product.
    """
    wide = x.astype(jnp.float32)
    most = _greatest_of_rows(wide)
    codes = wide * (_GREATEST_FP8 / most)
    # Not divided: XLA divides one number otherwise than eight, in the last bit.
    return codes.astype(_FP8), most * (1 / _GREATEST_FP8)


def pack_fp8(w: jax.Array, parts: int = 1) -> jax.Array:
    """w [I, O] -> [1, O, I].

    fp8 units take operands whose inputs are neighbours; of [I, O] XLA would write a transposed copy
    in every step. The first axis tells it from a matrix that is not laid out.
    """
    del parts  # gates are not multiplied at once
    return w.T[None]


def matmul_fp8(x: jax.Array, w: Fp8, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """x [T, I], its rows rounded to fp8, times w, laid out by `pack_fp8` -> [T, O] in `dtype`.

    The sums go through memory, so in bfloat16 if that is what is asked for. float16 would not hold
    them: they reach I * 448 * 448. HIGHEST: an H100 adds fp8 products with 14 bits otherwise.
    """
    codes, units = round_to_fp8(x)
    sums = jax.lax.dot_general(
        codes,
        w.kernel[0],
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32,
    )
    return (sums.astype(jnp.float32) * units * w.scale).astype(dtype)


def _greatest_of_rows(x: jax.Array) -> jax.Array:
    """x float32 [T, I] -> the greatest magnitude of each row, float32 [T, 1]; NaN of a row with a
    number that is not finite.
    """
    most = jnp.max(jnp.abs(x), axis=1, keepdims=True)
    return jnp.where(jnp.isfinite(most), jnp.maximum(most, _LEAST), jnp.nan)
