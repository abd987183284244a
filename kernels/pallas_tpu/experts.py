"""The Pallas kernels of the products with a mixture's experts for TPUs: one call for the opening
and one for the closing products of all blocks of a step.

Axes as in `jitney.kernels.experts`. A program computes one block of rows and one block of outputs,
and iterates over blocks of rows first: it reads the number of the next expert from scalar memory
while it multiplies with the previous one, and copies an expert's weights once for neighbouring
blocks. Blocks without rows refer to the last block with rows, so nothing is copied for them.

A TPU stores an array in the order that pads vectors of 128 least: matrices whose columns are not
whole vectors, such as Qwen3-30B-A3B's gates and ups on each of eight devices, are stored
transposed. The kernel multiplies them as stored.

Experts in MXFP4 are widened 128 inputs at a time; each byte gives a row in each half of a block.
Weights are small floats whose bits are moved into those of float32.

XLA gathers the rows: in bfloat16 two rows share each line of a TPU's memory, so that a kernel
cannot copy one of them by its index.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from jitney.kernels.experts import ACTIVATIONS, UNGATED, ExpertBlocks, Stack, opened_size
from jitney.kernels.mxfp4 import Mxfp4, powers
from jitney.kernels.pallas_tpu.interpreting import Interpret

#: A number of a program in its grid, or of a block.
type _Index = jax.Array | int
#: Columns of a block of outputs are a multiple of this, unless the block has all columns.
_LANES = 128
#: Most bytes of weights in one program, unless a block of 128 columns has more: they are in VMEM
#: twice, and 8-bit weights once more after widening.
_WEIGHTS = 8 << 20
#: Most VMEM of the kernel, in bytes.
_VMEM = 56 << 20
#: Inputs of an MXFP4 block that are in the lower halves of bytes; the rest are in the upper halves.
_HALF = Mxfp4.block // 2


def experts(
    x: jax.Array,
    opening: Stack,
    closing: Stack,
    blocks: ExpertBlocks,
    activation: str,
    interpret: Interpret = False,
) -> jax.Array:
    """See `jitney.kernels.interface.ExpertProducts`."""
    # A row of zeros for padding: filling in zeros after the gather would take another pass.
    rows = jnp.pad(x, ((0, 1), (0, 0))).at[blocks.rows].get(mode="promise_in_bounds")
    columns = opening.kernel.shape[-1]
    inner = opened_size(columns, activation)
    open_gates = partial(_open, activation)
    opened = _call(
        "open_experts",
        open_gates,
        rows,
        opening,
        blocks,
        (inner, columns // inner, x.dtype),
        interpret,
    )
    out = closing.kernel.shape[-1], 1, jnp.float32
    return _call("close_experts", _close, opened, closing, blocks, out, interpret)


def _call(
    name: str,
    combine: Callable[..., jax.Array],
    x: jax.Array,
    stack: Stack,
    blocks: ExpertBlocks,
    out: tuple[int, int, DTypeLike],
    interpret: Interpret,
) -> jax.Array:
    """x [N * B, I] times its blocks' experts -> `combine` of the products, [N * B, O].

    out: O, the number of matrices [I, O] side by side in a matrix of the stack, and the dtype.
    """
    size_out, matrices, dtype = out
    size_in = x.shape[1]
    n_experts, n_blocks, block = len(stack.kernel), blocks.experts.shape[0], blocks.size
    turned = stack.kernel.shape[2] % _LANES > 0 and not stack.is_mxfp4
    joined = matrices > 1 and size_out % _LANES > 0 and not turned
    stored = stack.kernel.shape[1]  # rows
    if joined:
        width, tiles, parts = size_out, 1, 1
    else:
        width = _block_columns(size_out, stored * matrices * stack.kernel.dtype.itemsize)
        tiles, parts = size_out // width, matrices
    of_rows = pl.BlockSpec((block, size_in), lambda tile, at, experts, count: (_at(at, count), 0))
    operands, specs = [x], [of_rows]
    read = matrices // parts * width

    def add_matrices(arrays: jax.Array) -> None:
        if not interpret:  # else XLA copies all experts' weights into VMEM first if they fit
            arrays = pltpu.with_memory_space_constraint(arrays, pltpu.HBM)
        for part in range(parts):
            operands.append(arrays)
            rows = arrays.shape[2 if turned else 1]
            specs.append(_spec(n_experts, rows, read, part * tiles, turned=turned))

    def add_rows(arrays: jax.Array) -> None:
        for part in jnp.split(arrays[:, None].astype(jnp.float32), parts, axis=2):
            operands.append(part)
            specs.append(_spec(n_experts, 1, read, 0, turned=False))

    scratch = []
    add_matrices(stack.kernel.swapaxes(1, 2) if turned else stack.kernel)
    if stack.is_mxfp4 and stack.scale is not None:
        add_matrices(stack.scale)
        scratch = [(stack.scale.shape[1], read), (block, read)]
    elif stack.scale is not None:
        add_rows(stack.scale)
    if stack.bias is not None:
        add_rows(stack.bias)
    fixed = _Fixed(
        combine, parts, turned, stack.is_mxfp4, stack.scale is not None, stack.bias is not None
    )
    call = pl.pallas_call(
        partial(_kernel, fixed),
        name=name,
        interpret=interpret,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(tiles, n_blocks),
            in_specs=specs,
            out_specs=pl.BlockSpec(
                (block, width), lambda tile, at, experts, count: (_at(at, count), tile)
            ),
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], size_out), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=_VMEM
        ),
    )
    return call(blocks.experts, blocks.count.reshape(1), *operands)


def _spec(n_experts: int, size_in: int, width: int, first: int, *, turned: bool) -> pl.BlockSpec:
    """The block spec of `width` columns of a program's expert; first: the index of the first
    program's block of columns.
    """

    def place(tile: _Index, at: _Index, experts: jax.Ref, count: jax.Ref) -> tuple[_Index, ...]:
        # Clipped: if no block has rows, the first block refers to no expert.
        expert = jnp.minimum(experts[_at(at, count)], n_experts - 1)
        return (expert, first + tile, 0) if turned else (expert, 0, first + tile)

    return pl.BlockSpec((1, width, size_in) if turned else (1, size_in, width), place)


def _block_columns(size_out: int, column_bytes: int) -> int:
    """Columns of a block: all, or the most whole vectors that divide them and fit."""
    if size_out % _LANES or size_out * column_bytes <= _WEIGHTS:
        return size_out
    vectors = size_out // _LANES
    most = max(1, _WEIGHTS // (column_bytes * _LANES))
    return _LANES * max(n for n in range(1, most + 1) if vectors % n == 0)


def _at(at: _Index, count: jax.Ref) -> jax.Array:
    """The block of rows that a program reads: its own, or the last block that has rows."""
    return jnp.minimum(at, jnp.maximum(count[0] - 1, 0))


class _Fixed(NamedTuple):
    """Constants of a compiled kernel."""

    #: Function from the products to the result.
    combine: Callable[..., jax.Array]
    #: Number of matrices that a program reads.
    parts: int
    #: Whether the matrices are transposed, [O, I].
    turned: bool
    mxfp4: bool
    scaled: bool
    biased: bool


def _kernel(fixed: _Fixed, experts: jax.Ref, count: jax.Ref, x: jax.Ref, *refs: jax.Ref) -> None:
    """Compute a block of rows and outputs. refs: the matrices, their scales and their biases if
    any, the result; for MXFP4 also scratch for scales and sums in float32.
    """
    waiting = list(refs)

    def take(are_there: bool) -> list[jax.Ref]:
        return [waiting.pop(0) for _ in range(fixed.parts if are_there else 0)]

    matrices, scales, biases = take(True), take(fixed.scaled), take(fixed.biased)
    out, *scratch = waiting

    @pl.when(pl.program_id(1) < count[0])
    def _multiply() -> None:
        if fixed.mxfp4:
            pairs = zip(matrices, scales, strict=True)
            sums = [_product_mxfp4(x, *pair, *scratch) for pair in pairs]
        else:
            sums = [_product(x[...], matrix[0], fixed.turned) for matrix in matrices]
            if scales:
                sums = [one * scale[0] for one, scale in zip(sums, scales, strict=True)]
        if biases:
            sums = [one + bias[0] for one, bias in zip(sums, biases, strict=True)]
        out[...] = fixed.combine(*sums).astype(out.dtype)


def _product_mxfp4(
    x: jax.Ref, packed: jax.Ref, scales: jax.Ref, steps: jax.Ref, sums: jax.Ref
) -> jax.Array:
    """x [B, I] times MXFP4 [1, I // 2, W] with scales [1, I // 32 or more, W], 128 inputs at a
    time, then the remainder.
    """
    size_in = x.shape[1]
    steps[...] = powers(scales[0])
    sums[...] = jnp.zeros(sums.shape, jnp.float32)

    def add(chunk: jax.Array | int, inputs: int) -> None:
        rows = x[:, pl.ds(_multiple(chunk, _LANES), inputs)]
        codes = packed[0, pl.ds(_multiple(chunk, _LANES // 2), inputs // 2)].astype(jnp.int32)
        blocks = []
        for block in range(inputs // Mxfp4.block):
            step = steps[pl.ds(chunk * (_LANES // Mxfp4.block) + block, 1)]
            own = codes[block * _HALF : (block + 1) * _HALF]
            blocks += [(_small_floats(half) * step).astype(x.dtype) for half in (own, own >> 4)]
        sums[...] += _product(rows, jnp.concatenate(blocks, axis=0), False)

    whole = size_in // _LANES
    if whole:
        lax.fori_loop(0, whole, lambda chunk, _: add(chunk, _LANES), None)
    if size_in % _LANES:
        add(whole, size_in % _LANES)
    return sums[...]


def _multiple(number: _Index, size: int) -> _Index:
    """number * size, with a hint to the compiler that it is a multiple of size."""
    return number * size if isinstance(number, int) else pl.multiple_of(number * size, size)


def _small_floats(codes: jax.Array) -> jax.Array:
    """The lowest four bits of int32, read as e2m1, in float32: moves exponent and fraction to their
    positions, except for 0 and 0.5.
    """
    size = codes & 7
    usual = lax.bitcast_convert_type((size << 22) + (126 << 23), jnp.float32)
    found = jnp.where(size < 2, 0.5 * size.astype(jnp.float32), usual)
    return jnp.where((codes & 8) == 0, found, -found)


def _product(rows: jax.Array, weights: jax.Array, turned: bool) -> jax.Array:
    return lax.dot_general(
        rows,
        weights.astype(rows.dtype),
        (((1,), (1 if turned else 0,)), ((), ())),
        precision=lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _open(activation: str, gates: jax.Array, *ups: jax.Array) -> jax.Array:
    """Apply the activation to gates and ups, which may be one array, or to ups alone."""
    if activation in UNGATED:
        return UNGATED[activation](gates)
    if not ups:
        return ACTIVATIONS[activation](*jnp.split(gates, 2, axis=1))
    return ACTIVATIONS[activation](gates, *ups)


def _close(sums: jax.Array) -> jax.Array:
    return sums
