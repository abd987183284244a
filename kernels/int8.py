"""Products of rows that are rounded to int8 with weights in int8: what they are made of.

Axes: T rows, I inputs, O outputs, F half of them. Row t of x stands as whole steps of s[t], 1/127
of the greatest magnitude in that row, found anew in every product; output o has weights in steps of
scale[o]. So y[t, o] = s[t] * scale[o] * (a sum of products of whole numbers, which is exact): a row
has the same result alone and among others, and in every order of adding up. Both kinds of step come
after the sum.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jitney.kernels.row_units import greatest_of_rows

#: The greatest code of a row.
_GREATEST = 127.0


class Int8(NamedTuple):
    """Weights [I, O] with a scale for each output."""

    #: int8 [I, O], or as `Int8Products.arrange` laid it out, or a `OneOf` of such.
    kernel: jax.Array
    #: float32 [O].
    scale: jax.Array


def round_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [T, I] -> (whole numbers from -127 to 127 in x's dtype [T, I], steps float32 [T, 1]).

    The steps of a row with a number that is not finite are NaN, and so is its product.
    """
    wide = x.astype(jnp.float32)
    most = greatest_of_rows(wide)
    codes = jnp.rint(wide * (_GREATEST / most))
    return codes.astype(x.dtype), most / _GREATEST
