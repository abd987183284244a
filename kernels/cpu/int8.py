"""Products of rows rounded to int8 with weights in int8, for CPUs: `native/int8.cc`.

Weights are laid out once, when a model is loaded, in panels whose elements are four neighbouring
inputs of a column, or eight where the CPU has ARM's I8MM. One instruction multiplies them there,
and where the CPU has VNNI; elsewhere they are taken apart on their way. It wants one operand
without a sign, so weights are stored 128 greater, and what that adds to a sum, 128 times the sum of
the row's codes, is taken off again.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jitney.kernels import reference
from jitney.kernels.cpu import library
from jitney.kernels.cpu.products import counted, in_panels, operands
from jitney.kernels.int8 import Int8
from jitney.kernels.interface import OneOf

#: Rows of so many inputs are rounded at once, and are whole ones.
_LANES = 16
_FLOATS = (jnp.bfloat16, jnp.float32)


def arrange(w: jax.Array, parts: int = 1) -> jax.Array:
    """int8 w [I, O] -> panels int8 [O / C, I / B, C, B] of C columns each, B neighbouring inputs
    side by side, 128 greater as uint8.

    parts = 2: w is gates and what they gate, and a panel has C / 2 columns of each. As it is where
    inputs or outputs are no whole vectors.
    """
    if w.shape[0] % _LANES:
        return w
    panels = in_panels(w, parts, library.load().layout.int8)
    return w if panels is w else _shifted(panels)


def _shifted(w: jax.Array) -> jax.Array:
    """The bits of w + 128 as uint8, still named int8: the sign bit turned over."""
    return w ^ jnp.int8(-128)


def matmul(
    x: jax.Array, w: Int8, dtype: DTypeLike = jnp.float32, *, count: jax.Array | None = None
) -> jax.Array:
    """See `jitney.kernels.interface.Int8Products`, and `KernelSet.leaves_out_padding` there."""
    if not _served(x, w):
        return reference.matmul_int8(x, _apart(w), dtype)
    return _call(x, w, dtype, count, gated=False)


def gated(x: jax.Array, w: Int8, *, count: jax.Array | None = None) -> jax.Array:
    """See `jitney.kernels.interface.Int8Products`, and `KernelSet.leaves_out_padding` there."""
    if not _served(x, w):
        return reference.gated_int8(x, _apart(w))
    return _call(x, w, x.dtype, count, gated=True)


def _apart(w: Int8) -> Int8:
    """With an array for a matrix among many."""
    if isinstance(w.kernel, OneOf):
        return Int8(w.kernel.apart(), w.scale)
    return w


def _served(x: jax.Array, w: Int8) -> bool:
    return w.kernel.ndim == 4 and x.dtype in _FLOATS


def _call(
    x: jax.Array, w: Int8, dtype: DTypeLike, count: jax.Array | None, *, gated: bool
) -> jax.Array:
    columns = w.scale.shape[0] // (2 if gated else 1)
    shape = jax.ShapeDtypeStruct((x.shape[0], columns), dtype)
    call = jax.ffi.ffi_call(library.load().target("int8_panels"), shape)
    weights, *which = operands(w.kernel)
    return call(x, weights, w.scale, counted(x, count), *which, gated=gated)
