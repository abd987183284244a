"""The Pallas kernels of the products with a mixture's experts for TPUs: all blocks of a step in one
call each for what opens the experts' feed-forwards and for what closes them.

Axes as in `jitney.kernels.experts`. A program is one block of rows and one block of outputs, and
blocks of rows follow each other: which expert's weights come next is read from scalar memory while
the last ones are multiplied, and neighbouring blocks of one expert have its weights brought once.
Blocks without rows name the last one that has some, so nothing is brought for them.

XLA gathers the rows: in bfloat16 two rows share each line of a TPU's memory, so that a kernel
cannot take one of them by its number.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jitney.kernels.experts import ACTIVATIONS, Blocks, Stack

#: Columns of a block of outputs are a multiple of this where they are not all.
_LANES = 128
#: Bytes of weights in one program at most, unless a block of 128 columns has more: they are in VMEM
#: twice, and 8-bit ones once more as they are widened.
_WEIGHTS = 8 << 20
#: VMEM the kernel may take.
_VMEM = 56 << 20


def experts(
    x: jax.Array,
    opening: Stack,
    closing: Stack,
    blocks: Blocks,
    activation: str,
    interpret: Any = False,
) -> jax.Array:
    """See `jitney.kernels.interface.ExpertProducts`."""
    rows = x.at[blocks.rows].get(mode="fill", fill_value=0)
    inner = opening.kernel.shape[-1] // 2
    open_gates = partial(_open, ACTIVATIONS[activation])
    halves = 2 if inner % _LANES == 0 else 1
    opened = _call(
        "open_experts", open_gates, rows, opening, blocks, (inner, halves, x.dtype), interpret
    )
    out = closing.kernel.shape[-1], 1, jnp.float32
    return _call("close_experts", _close, opened, closing, blocks, out, interpret)


def _call(
    name: str,
    combine: Any,
    x: jax.Array,
    stack: Stack,
    blocks: Blocks,
    out: tuple[int, int, Any],
    interpret: Any,
) -> jax.Array:
    """x [N * B, I] times its blocks' experts -> what `combine` makes of the products, [N * B, O].

    out: O, in how many halves of O columns each a matrix is read, and the dtype. A matrix that is
    not read in blocks of O columns is read whole.
    """
    size_out, halves, dtype = out
    size_in, columns = stack.kernel.shape[1:]
    n_blocks, block = blocks.experts.shape[0], blocks.size
    whole = columns != halves * size_out
    width = size_out
    if not whole:
        width = _block_columns(size_out, size_in * halves * stack.kernel.dtype.itemsize)
    tiles = size_out // width
    of_rows = pl.BlockSpec((block, size_in), lambda tile, at, experts, count: (_at(at, count), 0))
    operands: list[jax.Array] = [x]
    specs = [of_rows]
    arrays = [stack.kernel]
    if stack.scale is not None:
        arrays.append(stack.scale[:, None, :])
    for array in arrays:
        shape = 1, array.shape[1], columns if whole else width
        for half in range(halves):
            operands.append(array)
            specs.append(pl.BlockSpec(shape, partial(_of_expert, half * tiles)))
    call = pl.pallas_call(
        partial(_kernel, combine, halves),
        name=name,
        interpret=interpret,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(tiles, n_blocks),
            in_specs=specs,
            out_specs=pl.BlockSpec(
                (block, width), lambda tile, at, experts, count: (_at(at, count), tile)
            ),
        ),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], size_out), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=_VMEM
        ),
    )
    return call(blocks.experts, blocks.count.reshape(1), *operands)


def _block_columns(size_out: int, column_bytes: int) -> int:
    """Columns of a block: all, or as many whole vectors as divide them and fit."""
    if size_out % _LANES or size_out * column_bytes <= _WEIGHTS:
        return size_out
    vectors = size_out // _LANES
    most = max(1, _WEIGHTS // (column_bytes * _LANES))
    return _LANES * max(n for n in range(1, most + 1) if vectors % n == 0)


def _at(at: Any, count: Any) -> Any:
    """The block of rows that a program looks at: its own, or the last one that holds rows."""
    return jnp.minimum(at, jnp.maximum(count[0] - 1, 0))


def _of_expert(first: int, tile: Any, at: Any, experts: Any, count: Any) -> tuple[Any, int, Any]:
    return experts[_at(at, count)], 0, first + tile


def _kernel(
    combine: Any, halves: int, experts: Any, count: Any, x: Any, *refs: Any
) -> None:
    """A block of rows and outputs. refs: the matrix's halves, their scales if there are any, the
    result.
    """
    *given, out = refs
    matrices, scales = given[:halves], given[halves:]

    @pl.when(pl.program_id(1) < count[0])
    def _multiply() -> None:
        sums = [_product(x[...], matrix[0]) for matrix in matrices]
        scaled = [one * scale[0] for one, scale in zip(sums, scales, strict=True)] if scales else sums
        out[...] = combine(scaled).astype(out.dtype)


def _product(rows: jax.Array, weights: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    return jnp.dot(
        rows,
        weights.astype(rows.dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _open(activation: Any, sums: Sequence[jax.Array]) -> jax.Array:
    """Gates and ups, each by itself or side by side -> what goes on."""
    gates, ups = sums if len(sums) == 2 else jnp.split(sums[0], 2, axis=-1)
    return activation(gates) * ups


def _close(sums: Sequence[jax.Array]) -> jax.Array:
    return sums[0]
