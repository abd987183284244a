"""The Pallas kernel of products with group-wise int4 weights for TPUs, unpacked in registers.

Axes: M rows, I inputs, O outputs, R inputs per group, as in `jitney.kernels.int4`. 64 rows of bytes
hold a chunk of 128 inputs. Read as 16 rows of 32-bit words (byte q of row r is row 4r + q), a shift
and two masks turn them into 32 rows of bfloat16, twice for the low and twice for the high nibbles:
or-ed into the bits of 128, whose last bit is worth 1, a nibble n becomes 128 + n, unconverted.
This permutes a chunk's inputs; `_in_chunk_order` permutes x alike. The 128 and the zero points are
subtracted by one small product with the groups' sums.
"""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from jitney.kernels import int4
from jitney.kernels.int4 import Int4
from jitney.kernels.pallas_tpu.interpreting import Interpret

#: Inputs of a chunk, one per lane of a vector register; number of byte rows that hold them.
_CHUNK, _BYTES = 128, 64
#: Outputs of a block, and the most rows and bytes of x in one.
_OUTPUTS, _ROWS, _X_BYTES = 512, 512, 16 << 20
#: Most VMEM of the kernel: x once, weights and results twice.
_VMEM = 56 << 20
#: bfloat16 128.0, twice in a word.
_OF_128 = 0x43004300


def matmul_int4(
    x: jax.Array, weights: Int4, dtype: DTypeLike = jnp.float32, interpret: Interpret = False
) -> jax.Array:
    """See `jitney.kernels.interface.KernelSet.matmul_int4`; weights with a partial chunk of inputs
    are unpacked in memory first.

    Products are of integers, scaled once per group in float32.
    """
    if weights.shape[0] % _CHUNK:
        return int4.matmul_int4(x, weights, dtype)
    n_rows, size_in = x.shape
    size_out = weights.shape[1]
    groups = weights.scales.shape[0]
    rows = _block_rows(n_rows, size_in * x.dtype.itemsize)
    outputs = min(_OUTPUTS, size_out)
    sums = jnp.sum(x.astype(jnp.float32).reshape(n_rows, groups, -1), axis=2)
    operands = [_in_chunk_order(x, weights.group_size), weights.packed, _bits(weights.scales), sums]
    of_rows = partial(pl.BlockSpec, index_map=lambda m, n: (m, 0))
    of_outputs = partial(pl.BlockSpec, index_map=lambda m, n: (0, n))
    once = pl.Buffered(1)
    specs = [
        of_rows((rows, size_in), pipeline_mode=once),
        of_outputs((size_in // 2, outputs)),
        of_outputs((groups, outputs)),
        of_rows((rows, groups), pipeline_mode=once),
    ]
    if weights.zeros is not None:
        operands.append(weights.zeros)
        specs.append(of_outputs((groups, outputs)))
    call = pl.pallas_call(
        partial(_kernel, weights.scales.dtype),
        name="matmul_int4",
        interpret=interpret,
        grid=(pl.cdiv(n_rows, rows), pl.cdiv(size_out, outputs)),
        in_specs=specs,
        out_specs=pl.BlockSpec((rows, outputs), lambda m, n: (m, n)),
        out_shape=jax.ShapeDtypeStruct((n_rows, size_out), jnp.float32),
        scratch_shapes=[pltpu.VMEM((groups, outputs), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=_VMEM
        ),
    )
    return call(*operands).astype(dtype)


def _block_rows(n_rows: int, row_bytes: int) -> int:
    """Rows of a block: all, or as many whole tiles as fit."""
    most = min(_ROWS, _X_BYTES // row_bytes // 16 * 16)
    return min(n_rows, most)


def _bits(scales: jax.Array) -> jax.Array:
    """The bits of float16, which a TPU's vector unit does not support; others unchanged."""
    if scales.dtype == jnp.float16:
        return lax.bitcast_convert_type(scales, jnp.uint16)
    return scales


@cache
def _chunk_order(group: int) -> np.ndarray:
    """The index in the model's order of each input of a chunk, in the kernel's order."""
    place = np.arange(_CHUNK)
    part, row, second = place // 32, place % 32 // 2, place % 2
    byte = 4 * row + 2 * second + part // 2
    half = group // 2
    return byte // half * group + part % 2 * half + byte % half


def _in_chunk_order(x: jax.Array, group: int) -> jax.Array:
    """x [M, I] with the inputs of each chunk in the order of unpacked nibbles.

    A product with a matrix of zeros and ones: exact, and faster than a gather of lanes.
    """
    swap = np.zeros((_CHUNK, _CHUNK), np.float32)
    swap[_chunk_order(group), np.arange(_CHUNK)] = 1
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    chunks = x.reshape(x.shape[0], -1, _CHUNK)
    moved = jnp.einsum("mci,io->mco", chunks, jnp.asarray(swap, x.dtype), precision=precision)
    return moved.reshape(x.shape)


def _kernel(
    scale_type: DTypeLike,
    x: jax.Ref,
    packed: jax.Ref,
    scales: jax.Ref,
    sums: jax.Ref,
    *refs: jax.Ref,
) -> None:
    """Compute a block of results. refs: [zeros], the result, scratch for the scales as float32."""
    *zeros, out, steps = refs
    steps[...] = _widened_scales(scales[...], scale_type)
    groups = steps.shape[0]
    per_chunk = _CHUNK * groups // x.shape[1]
    lows = _lows(zeros[0][...]) if zeros else float(-128 - Int4.middle)
    correction = jnp.dot(
        sums[...],
        steps[...] * lows,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    out[...] = correction

    def add(chunk: jax.Array, _: None) -> None:
        first = pl.multiple_of(chunk * _CHUNK, _CHUNK)
        rows = x[:, pl.ds(first, _CHUNK)]
        byte = pl.multiple_of(chunk * _BYTES, _BYTES)
        weights = _unpacked(packed[pl.ds(byte, _BYTES)]).astype(rows.dtype)
        for group in range(per_chunk):
            own = rows if per_chunk == 1 else _of_group(rows, group, per_chunk)
            scale = steps[pl.ds(chunk * per_chunk + group, 1)]
            out[...] += _product(own, weights) * scale

    lax.fori_loop(0, x.shape[1] // _CHUNK, add, None)


def _product(rows: jax.Array, weights: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    return jnp.dot(rows, weights, precision=precision, preferred_element_type=jnp.float32)


def _unpacked(packed: jax.Array) -> jax.Array:
    """uint8 [64, O] -> 128 + each nibble, bfloat16 [128, O], in the order of `_chunk_order`."""
    words = pltpu.bitcast(packed, jnp.int32)  # [16, O]
    parts = [
        pltpu.bitcast((words >> shift) & 0x000F000F | _OF_128, jnp.bfloat16)
        for shift in (0, 4, 8, 12)
    ]
    return jnp.concatenate(parts, axis=0)


def _of_group(rows: jax.Array, group: int, per_chunk: int) -> jax.Array:
    """rows [M, 128] in the kernel's order, with zeros for the inputs of other groups."""
    place = lax.broadcasted_iota(jnp.int32, rows.shape, 1)
    word = (place & 31) >> 1
    return jnp.where(lax.div(word, 16 // per_chunk) == group, rows, jnp.zeros_like(rows))


def _lows(zeros: jax.Array) -> jax.Array:
    """The amount to subtract for zero points, uint8, and the 128 of each nibble, float32."""
    return -128.0 - zeros.astype(jnp.int32).astype(jnp.float32)


def _widened_scales(scales: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Scales as float32; float16 scales are given as bits."""
    if dtype != jnp.float16:
        return scales.astype(jnp.float32)
    bits = scales.astype(jnp.int32)
    exponent = (bits >> 10) & 31
    fraction = (bits & 0x3FF) | jnp.where(exponent > 0, 0x400, 0)
    power = (jnp.maximum(exponent, 1) - 25 + 127) << 23  # value of the fraction's last bit
    size = fraction.astype(jnp.float32) * lax.bitcast_convert_type(power, jnp.float32)
    return jnp.where(bits >> 15 == 0, size, -size)
