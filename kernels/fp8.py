"""Products of rows that are rounded to fp8 (e4m3) with weights in fp8: what they are made of.

Axes: T rows, I inputs, O outputs. Row t of x stands in units of s[t], 1/448 of the greatest
magnitude in that row, found anew in every product; output o has weights in units of scale[o]. So
y[t, o] = s[t] * scale[o] * (a sum of products of fp8 numbers, added in float32). A row's units
depend on that row alone: it stands for the same numbers alone and among others.

`matmul` is for NVIDIA GPUs that multiply fp8 themselves, from compute capability 8.9 on: XLA takes
both operands as they are, in cuBLASLt's fp8 product or in a Triton one.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jitney.kernels.row_units import greatest_of_rows

#: What rows and weights are rounded to.
_DTYPE = jnp.float8_e4m3fn
#: Its greatest number.
_GREATEST = 448.0


class Fp8(NamedTuple):
    """Weights [I, O] with a scale for each output."""

    #: float8_e4m3fn [I, O], or as `Fp8Products.arrange` laid it out.
    kernel: jax.Array
    #: float32 [O].
    scale: jax.Array


def round_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [T, I] -> (float8_e4m3fn [T, I], units float32 [T, 1]).

    The units of a row with a number that is not finite are NaN, and so is its product.
    """
    wide = x.astype(jnp.float32)
    most = greatest_of_rows(wide)
    codes = wide * (_GREATEST / most)
    # Not divided: XLA divides one number otherwise than eight, in the last bit.
    return codes.astype(_DTYPE), most * (1 / _GREATEST)


def arrange(w: jax.Array, parts: int = 1) -> jax.Array:
    """w [I, O] -> [1, O, I].

    fp8 units take operands whose inputs are neighbours; of [I, O] XLA would write a transposed copy
    in every step. The first axis tells it from a matrix that is not laid out.
    """
    del parts  # gates are not multiplied at once
    return w.T[None]


def matmul(x: jax.Array, w: Fp8, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """x [T, I], its rows rounded to fp8, times w, laid out by `arrange` -> [T, O] in `dtype`.

    The sums go through memory, so in bfloat16 if that is what is asked for. float16 would not hold
    them: they reach I * 448 * 448. HIGHEST: an H100 adds fp8 products with 14 bits otherwise.
    """
    codes, units = round_rows(x)
    sums = jax.lax.dot_general(
        codes,
        w.kernel[0],
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32,
    )
    return (sums.astype(jnp.float32) * units * w.scale).astype(dtype)
