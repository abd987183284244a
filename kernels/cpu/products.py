"""Products with weights, for CPUs.

Where the CPU multiplies pairs of bfloat16 (and has no AMX), weights are arranged once, when a model
is loaded, in panels of pairs: any number of rows is multiplied with a panel as it lies, and a row's
result is the same bits in every number of rows. Elsewhere, and in float32, products of up to eight
rows read every weight once and widen it in registers. XLA packs a matrix anew in each call, which
for a handful of rows costs more than the product.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jitney.kernels import reference
from jitney.kernels.cpu import library
from jitney.kernels.interface import OneOf

#: Most rows that are multiplied with weights that are not arranged.
_MOST_ROWS = 8
#: Columns of a vector, and most vectors of a panel's rows.
_LANES, _VECTORS = 16, 6


def arrange(w: jax.Array, parts: int = 1) -> jax.Array:
    """w [I, O] -> panels [O / C, I / 2, C, 2] of C columns each, whose elements are pairs of
    neighbouring inputs.

    parts = 2: w is gates and what they gate, and a panel has C / 2 columns of each. As it is where
    pairs do not serve.
    """
    size_in, size_out = w.shape
    if (
        not library.load().arranges
        or w.dtype != jnp.bfloat16
        or size_in % 2
        or size_out % (_LANES * parts)
    ):
        return w
    vectors = panel_vectors(size_out // parts, parts)
    split = w.reshape(size_in // 2, 2, parts, -1, vectors * _LANES)
    return split.transpose(3, 0, 2, 4, 1).reshape(-1, size_in // 2, parts * vectors * _LANES, 2)


def panel_vectors(size_out: int, parts: int) -> int:
    """Vectors of a panel's rows in each of its parts, which have `size_out` columns: as many as
    divide them.
    """
    most = _VECTORS // parts
    return max(d for d in range(1, most + 1) if size_out // _LANES % d == 0)


def matmul(x: jax.Array, w: jax.Array | OneOf, dtype: Any = jnp.float32) -> jax.Array:
    """x [T, I] times w, [I, O] or arranged in panels -> [T, O], summed in float32 and rounded to
    `dtype`.
    """
    if w.ndim == 4:
        return _call_panels(x, w, dtype, gated=False)
    if isinstance(w, OneOf):
        w = w.apart()
    if x.ndim != 2 or not served(x, w) or w.shape[1] % _LANES:
        return reference.matmul(x, w, dtype)
    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), jnp.float32)
    return jax.ffi.ffi_call(library.load().target("product"), shape)(
        x.astype(jnp.float32), w
    ).astype(dtype)


def gated(x: jax.Array, w: jax.Array | OneOf) -> jax.Array:
    """x [T, I] times w, [I, 2F] or arranged in two parts -> silu(first half) * second half, [T, F]
    in x's dtype.
    """
    if w.ndim == 4:
        return _call_panels(x, w, jnp.bfloat16, gated=True)
    return reference.gate(matmul(x, w), x.dtype)


def project(x: jax.Array, table: jax.Array) -> jax.Array:
    """x [T, E] times the transpose of table [V, E] -> float32 [T, V]."""
    (rows, size), words = x.shape, table.shape[0]
    native = library.load()
    pairs = (
        native.multiplies_pairs
        and x.dtype == table.dtype == jnp.bfloat16
        and size % (2 * _LANES) == 0
    )
    any_rows = pairs and native.arranges
    if words % _LANES or size % _LANES or not (any_rows or served(x, table)):
        return reference.project(x, table)
    call = jax.ffi.ffi_call(
        native.target("project"), jax.ShapeDtypeStruct((rows, words), jnp.float32)
    )
    return call(x if pairs else x.astype(jnp.float32), table)


def served(x: jax.Array, w: jax.Array) -> bool:
    """Few rows, and weights these kernels know how to widen."""
    return 1 <= x.shape[0] <= _MOST_ROWS and w.dtype in (jnp.bfloat16, jnp.float32)


def operands(w: jax.Array | OneOf) -> tuple[jax.Array, ...]:
    """What stands for weights in a call: they themselves; many, and which of them behind all
    others.
    """
    return (w.matrices, w.number) if isinstance(w, OneOf) else (w,)


def _call_panels(x: jax.Array, w: jax.Array | OneOf, dtype: Any, *, gated: bool) -> jax.Array:
    """bfloat16 [T, I] times panels [P, I / 2, C, 2] -> [T, P * C], or half as many columns if
    gated, in dtype.
    """
    panels, _, columns, _ = w.shape
    shape = jax.ShapeDtypeStruct((x.shape[0], panels * columns // (2 if gated else 1)), dtype)
    return jax.ffi.ffi_call(library.load().target("panels"), shape)(x, *operands(w), gated=gated)
