"""Products of rows rounded to int8 with weights in int8, for CPUs: `native/int8.cc`.

Weights are laid out once, when a model is loaded, in panels of quads, whatever the instruction set:
four neighbouring inputs of a column in 32 bits. One instruction multiplies quads where the CPU has
VNNI; elsewhere they are taken apart on their way. It wants one operand without a sign, so weights
are stored 128 greater, and what that adds to a sum, 128 times the sum of the row's codes, is
taken off again.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jitney.kernels import reference
from jitney.kernels.cpu import library
from jitney.kernels.cpu.products import operands, panel_vectors
from jitney.kernels.int8 import Int8
from jitney.kernels.interface import OneOf

#: Columns of the widest vector; inputs are whole ones too.
_LANES = 16
#: Neighbouring inputs in 32 bits.
_QUAD = 4
_FLOATS = (jnp.bfloat16, jnp.float32)


def arrange(w: jax.Array, parts: int = 1) -> jax.Array:
    """int8 w [I, O] -> panels int8 [O / C, I / 4, C, 4] of C columns each, 128 greater as uint8.

    parts = 2: w is gates and what they gate, and a panel has C / 2 columns of each. As it is where
    inputs or outputs are no whole vectors.
    """
    size_in, size_out = w.shape
    if size_in % _LANES or size_out % (_LANES * parts):
        return w
    columns = _LANES * panel_vectors(size_out // parts, parts)
    split = _shifted(w).reshape(size_in // _QUAD, _QUAD, parts, -1, columns)
    return split.transpose(3, 0, 2, 4, 1).reshape(-1, size_in // _QUAD, parts * columns, _QUAD)


def _shifted(w: jax.Array) -> jax.Array:
    """The bits of w + 128 as uint8, still named int8: the sign bit turned over."""
    return w ^ jnp.int8(-128)


def matmul(x: jax.Array, w: Int8, dtype: Any = jnp.float32) -> jax.Array:
    """See `jitney.kernels.interface.Int8Products`."""
    if not _served(x, w):
        return reference.matmul_int8(x, _apart(w), dtype)
    return _call(x, w, dtype, gated=False)


def gated(x: jax.Array, w: Int8) -> jax.Array:
    """See `jitney.kernels.interface.Int8Products`."""
    if not _served(x, w):
        return reference.gated_int8(x, _apart(w))
    return _call(x, w, x.dtype, gated=True)


def _apart(w: Int8) -> Int8:
    """With an array for a matrix among many."""
    if isinstance(w.kernel, OneOf):
        return Int8(w.kernel.apart(), w.scale)
    return w


def _served(x: jax.Array, w: Int8) -> bool:
    return w.kernel.ndim == 4 and x.dtype in _FLOATS


def _call(x: jax.Array, w: Int8, dtype: Any, *, gated: bool) -> jax.Array:
    columns = w.scale.shape[0] // (2 if gated else 1)
    shape = jax.ShapeDtypeStruct((x.shape[0], columns), dtype)
    call = jax.ffi.ffi_call(library.load().target("int8_panels"), shape)
    weights, *which = operands(w.kernel)
    return call(x, weights, w.scale, *which, gated=gated)
