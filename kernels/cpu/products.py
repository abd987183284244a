"""Products with weights, for CPUs.

If the CPU multiplies pairs of bfloat16, weights are packed once, when a model is loaded, in panels
of pairs: any number of rows is multiplied with a panel as stored, and a row's result has the same
bits for every number of rows. Otherwise, and in float32, weights are not packed and are widened in
registers; up to how many rows this is faster than XLA's own product depends on the CPU
(docs/decisions, 0107).

Products of rows rounded to int8 with int8 weights (`native/int8.cc`): weights are packed once, when
a model is loaded, in panels whose elements are four neighbouring inputs of a column, or eight if
the CPU has ARM's I8MM. One instruction multiplies an element with I8MM or VNNI; other CPUs unpack
the weights during the product. The instruction needs one unsigned operand, so weights are stored
plus 128, and 128 times the sum of the row's codes is subtracted.

Products with MXFP4 weights (`native/mxfp4.cc`): weights are packed once in panels of bytes, and
widened during the product, some thousand at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jitney.kernels import reference
from jitney.kernels.cpu import library
from jitney.kernels.experts import gate
from jitney.kernels.interface import Int8Products, Mxfp4Products, OneOf
from jitney.kernels.mxfp4 import Mxfp4, matmul_mxfp4
from jitney.kernels.w8a8 import Int8

#: Default of the most rows that these kernels multiply with unpacked weights: XLA packs such a
#: matrix in each call, which costs more than the product for so few rows.
USUAL_ROWS = 8
#: Numbers in the widest vector; rows are rounded to int8 by as many inputs at once.
_LANES = 16


def pack(w: jax.Array, parts: int = 1) -> jax.Array:
    """w [I, O] -> panels [O / C, I / B, C, B] of C columns each, B neighbouring inputs side by
    side.

    parts = 2: w is gates and ups, and a panel has C / 2 columns of each. w is returned unchanged if
    the CPU does not multiply such elements.
    """
    native = library.load()
    if not native.packs or w.dtype != jnp.bfloat16:
        return w
    return _in_panels(w, parts, native.layout.bfloat16)


def _in_panels(w: jax.Array, parts: int, beside: int) -> jax.Array:
    """Like `pack`, with elements of `beside` inputs; returns w unchanged if its inputs are not a
    multiple of an element, or its columns not a multiple of a vector.
    """
    size_in, size_out = w.shape
    if size_in % beside or size_out % (_LANES * parts):
        return w
    columns = _LANES * _panel_vectors(size_out // parts, parts)
    split = w.reshape(size_in // beside, beside, parts, -1, columns)
    return split.transpose(3, 0, 2, 4, 1).reshape(-1, size_in // beside, parts * columns, beside)


def _panel_vectors(size_out: int, parts: int) -> int:
    """Number of vectors in a panel's row, for each part of `size_out` columns: the greatest number
    that divides the part.
    """
    most = library.load().layout.columns // _LANES // parts
    return max(d for d in range(1, most + 1) if size_out // _LANES % d == 0)


@dataclass(frozen=True)
class _Products:
    """Products with weights and with the table of the output head."""

    #: Most rows for these kernels with unpacked weights; XLA multiplies more.
    most_rows: int

    def matmul(
        self,
        x: jax.Array,
        w: jax.Array | OneOf,
        dtype: DTypeLike = jnp.float32,
        *,
        count: jax.Array | None = None,
    ) -> jax.Array:
        """x [T, I] times w, [I, O] or packed in panels -> [T, O], summed in float32 and rounded
        to `dtype`. count: see `jitney.kernels.interface.KernelSet.leaves_out_padding`.
        """
        if w.ndim == 4:
            return _call_panels(x, w, dtype, count, gated=False)
        if isinstance(w, OneOf):
            w = w.apart()
        if x.ndim != 2 or not self._are_ours(x, w) or w.shape[1] % _LANES:
            return reference.matmul(x, w, dtype)
        shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), jnp.float32)
        call = jax.ffi.ffi_call(library.load().target("product"), shape)
        return call(x.astype(jnp.float32), w, _counted(x, count)).astype(dtype)

    def gated(
        self, x: jax.Array, w: jax.Array | OneOf, *, count: jax.Array | None = None
    ) -> jax.Array:
        """x [T, I] times w, [I, 2F] or packed in two parts -> silu(first half) * second half,
        [T, F] in x's dtype. count: as in `matmul`.
        """
        if w.ndim == 4:
            return _call_panels(x, w, jnp.bfloat16, count, gated=True)
        return gate(self.matmul(x, w, count=count), x.dtype)

    def project(self, x: jax.Array, table: jax.Array) -> jax.Array:
        """x [T, E] times the transpose of table [V, E] -> float32 [T, V]."""
        (rows, size), words = x.shape, table.shape[0]
        native = library.load()
        pairs = (
            native.multiplies_pairs
            and x.dtype == table.dtype == jnp.bfloat16
            and size % (2 * _LANES) == 0
        )
        any_rows = pairs and native.packs
        if words % _LANES or size % _LANES or not (any_rows or self._are_ours(x, table)):
            return reference.project(x, table)
        call = jax.ffi.ffi_call(
            native.target("project"), jax.ShapeDtypeStruct((rows, words), jnp.float32)
        )
        return call(x if pairs else x.astype(jnp.float32), table)

    def _are_ours(self, x: jax.Array, w: jax.Array) -> bool:
        """Whether these kernels compute the product: few rows and a supported dtype of weights."""
        return 1 <= x.shape[0] <= self.most_rows and w.dtype in (jnp.bfloat16, jnp.float32)


@cache
def up_to(most_rows: int) -> _Products:
    """The products for up to `most_rows` rows. Cached: bound methods of equal objects are not
    equal, so a second object would compile a step's layers again.
    """
    return _Products(most_rows)


def _operands(w: jax.Array | OneOf) -> tuple[jax.Array, ...]:
    """The arguments of a call for these weights: the matrix, or the stack and an index."""
    return (w.matrices, w.number) if isinstance(w, OneOf) else (w,)


def _counted(x: jax.Array, count: jax.Array | None) -> jax.Array:
    """The number of x's first rows that are multiplied, int32; all rows if count is None."""
    return jnp.int32(x.shape[0]) if count is None else count


def _call_panels(
    x: jax.Array, w: jax.Array | OneOf, dtype: DTypeLike, count: jax.Array | None, *, gated: bool
) -> jax.Array:
    """bfloat16 [T, I] times panels [P, I / B, C, B] -> [T, P * C], or half as many columns if
    gated, in dtype.
    """
    panels, _, columns, _ = w.shape
    shape = jax.ShapeDtypeStruct((x.shape[0], panels * columns // (2 if gated else 1)), dtype)
    call = jax.ffi.ffi_call(library.load().target("panels"), shape)
    weights, *which = _operands(w)
    return call(x, weights, _counted(x, count), *which, gated=gated)


def _pack_int8(w: jax.Array, parts: int = 1) -> jax.Array:
    """int8 w [I, O] -> panels int8 [O / C, I / B, C, B] of C columns each, B neighbouring inputs
    side by side; the bits are those of w + 128 as uint8.

    parts = 2: w is gates and ups, and a panel has C / 2 columns of each. w is returned unchanged if
    its inputs or outputs are not a multiple of a vector.
    """
    if w.shape[0] % _LANES:
        return w
    panels = _in_panels(w, parts, library.load().layout.int8)
    return w if panels is w else _shifted(panels)


def _shifted(w: jax.Array) -> jax.Array:
    """The bits of w + 128 as uint8, in dtype int8: w with the sign bit flipped."""
    return w ^ jnp.int8(-128)


def _matmul_int8(
    x: jax.Array, w: Int8, dtype: DTypeLike = jnp.float32, *, count: jax.Array | None = None
) -> jax.Array:
    """See `jitney.kernels.interface.Int8Products`, and `KernelSet.leaves_out_padding` there."""
    if not _int8_served(x, w):
        return reference.matmul_int8(x, _apart(w), dtype)
    return _call_int8(x, w, dtype, count, gated=False)


def _gated_int8(x: jax.Array, w: Int8, *, count: jax.Array | None = None) -> jax.Array:
    """See `jitney.kernels.interface.Int8Products`, and `KernelSet.leaves_out_padding` there."""
    if not _int8_served(x, w):
        return reference.gated_int8(x, _apart(w))
    return _call_int8(x, w, x.dtype, count, gated=True)


def _apart(w: Int8) -> Int8:
    """The weights, with a copy in place of a `OneOf`."""
    if isinstance(w.kernel, OneOf):
        return Int8(w.kernel.apart(), w.scale)
    return w


def _int8_served(x: jax.Array, w: Int8) -> bool:
    return w.kernel.ndim == 4 and x.dtype in (jnp.bfloat16, jnp.float32)


def _call_int8(
    x: jax.Array, w: Int8, dtype: DTypeLike, count: jax.Array | None, *, gated: bool
) -> jax.Array:
    columns = w.scale.shape[0] // (2 if gated else 1)
    shape = jax.ShapeDtypeStruct((x.shape[0], columns), dtype)
    call = jax.ffi.ffi_call(library.load().target("int8_panels"), shape)
    weights, *which = _operands(w.kernel)
    return call(x, weights, w.scale, _counted(x, count), *which, gated=gated)


#: Packing and both products for rows rounded to int8.
INT8 = Int8Products(_pack_int8, _matmul_int8, _gated_int8)


def _pack_mxfp4(w: Mxfp4, parts: int = 1) -> Mxfp4:
    """Pack into P panels of C columns: codes uint8 [P, I / 32, 16, C] of two neighbouring inputs
    each, scales uint8 [P, I / 32, 1, C]. Unchanged if outputs are not a multiple of a vector.
    """
    del parts  # this format has no gated product
    blocks, size_out = w.scales.shape
    if size_out % _LANES:
        return w
    columns = _LANES * _panel_vectors(size_out, 1)
    halves = w.packed.reshape(blocks, -1, size_out)
    codes = jnp.concatenate([halves & 15, halves >> 4], axis=1)
    pairs = codes.reshape(blocks, -1, 2, size_out)
    packed = pairs[:, :, 0] | pairs[:, :, 1] << 4

    def in_panels(rows: jax.Array) -> jax.Array:
        return rows.reshape(blocks, -1, size_out // columns, columns).transpose(2, 0, 1, 3)

    return Mxfp4(in_panels(packed), in_panels(w.scales))


def _matmul_mxfp4(
    x: jax.Array, w: Mxfp4, dtype: DTypeLike = jnp.float32, *, count: jax.Array | None = None
) -> jax.Array:
    """See `jitney.kernels.interface.Mxfp4Products`, and `KernelSet.leaves_out_padding` there."""
    if w.packed.ndim != 4:
        parts = [part.apart() if isinstance(part, OneOf) else part for part in w]
        return matmul_mxfp4(x, Mxfp4(*parts), dtype)
    native = library.load()
    if x.dtype != jnp.bfloat16 or not native.multiplies_pairs:
        x = x.astype(jnp.float32)
    panels, _, _, columns = w.packed.shape
    shape = jax.ShapeDtypeStruct((x.shape[0], panels * columns), jnp.float32)
    call = jax.ffi.ffi_call(native.target("mxfp4_panels"), shape)
    packed, *which = _operands(w.packed)
    scales, *_ = _operands(w.scales)
    return call(x, packed, scales, _counted(x, count), *which).astype(dtype)


#: Packing and the product for MXFP4 weights.
MXFP4 = Mxfp4Products(_pack_mxfp4, _matmul_mxfp4)
