"""Products of rows with the experts of a mixture, all blocks at once: the data types, and the
reference in plain jax.numpy.

Axes: T rows, I inputs, O outputs, F an expert's feed-forward size, E hidden size, X experts, N
blocks, B rows of a block. A block is a group of rows of one expert; a row is in one block of each
of its experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jitney.kernels.mxfp4 import Mxfp4, matmul_mxfp4


class Stack(NamedTuple):
    """The stacked matrices of all experts."""

    #: [X, I, O]: bfloat16, float32, int8 or float8_e4m3fn; or uint8 [X, I // 2, O]: MXFP4 in the
    #: format of `jitney.kernels.mxfp4`.
    kernel: jax.Array
    #: float32 [X, O]: factors of the sums, for int8 and float8_e4m3fn; uint8 [X, I // 32, O] for
    #: MXFP4; else None.
    scale: jax.Array | None = None
    #: [X, O]: added to the sums after `scale`; or None.
    bias: jax.Array | None = None

    @property
    def is_mxfp4(self) -> bool:
        return self.kernel.dtype == jnp.uint8


class ExpertBlocks(NamedTuple):
    """The assignment of rows to experts, in blocks; int32."""

    #: [N * B]: the row at each place of the blocks; T: padding, read as zeros.
    rows: jax.Array
    #: [N]: the expert of each block; X: the block has no rows.
    experts: jax.Array
    #: []: number of blocks with rows, which come first.
    count: jax.Array

    @property
    def size(self) -> int:
        """B."""
        return self.rows.shape[0] // self.experts.shape[0]


#: gpt-oss's activation: bound of gates and ups; factor of a gate inside the sigmoid.
CLAMP, CLAMPED_SLOPE = 7.0, 1.702


def _clamped_silu(gates: jax.Array, ups: jax.Array) -> jax.Array:
    gates = jnp.minimum(gates, CLAMP)
    return gates * jax.nn.sigmoid(CLAMPED_SLOPE * gates) * (jnp.clip(ups, -CLAMP, CLAMP) + 1)


#: Activation -> function of gates and ups; each multiplies a gate with a sigmoid.
ACTIVATIONS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "silu": lambda gates, ups: jax.nn.silu(gates) * ups,
    "gelu_tanh": lambda gates, ups: jax.nn.gelu(gates, approximate=True) * ups,
    "clamped_silu": _clamped_silu,
}


#: Activation of feed-forwards without gates -> function of the opening product.
UNGATED: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu2": lambda ups: jnp.square(jax.nn.relu(ups)),
}


def opened_size(columns: int, activation: str) -> int:
    """F from the number of outputs of the opening product, half of which are gates if the
    activation has gates.
    """
    return columns if activation in UNGATED else columns // 2


def gate(y: jax.Array, dtype: DTypeLike, activation: str = "silu") -> jax.Array:
    """y [T, 2F], gates then ups -> the activation's result, [T, F] in `dtype`; y is [T, F] for an
    activation without gates.

    The halves are split before widening: XLA for TPUs would otherwise write both as float32 first.
    """
    if activation in UNGATED:
        return UNGATED[activation](y.astype(jnp.float32)).astype(dtype)
    gates, ups = (half.astype(jnp.float32) for half in jnp.split(y, 2, axis=-1))
    return ACTIVATIONS[activation](gates, ups).astype(dtype)


def experts(
    x: jax.Array, opening: Stack, closing: Stack, blocks: ExpertBlocks, activation: str
) -> jax.Array:
    """See `jitney.kernels.interface.ExpertProducts`; computes all blocks one after another, also
    those without rows.
    """

    def answers(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, expert = block
        rows_of_expert = x.at[rows].get(mode="fill", fill_value=0)
        inner = gate(_product(rows_of_expert, opening, expert), x.dtype, activation)
        return _product(inner, closing, expert)

    of_blocks = jax.lax.map(answers, (blocks.rows.reshape(-1, blocks.size), blocks.experts))
    return of_blocks.reshape(-1, closing.kernel.shape[-1])


def _product(x: jax.Array, stack: Stack, expert: jax.Array) -> jax.Array:
    """x [B, I] times the matrix of an expert: float32 [B, O]."""
    own: Any = jax.tree.map(partial(_one_of, number=expert), stack)
    if stack.is_mxfp4:
        sums = matmul_mxfp4(x, Mxfp4(own.kernel, own.scale))
    else:
        sums = jnp.matmul(x, own.kernel.astype(x.dtype), preferred_element_type=jnp.float32)
        if own.scale is not None:
            sums = sums * own.scale
    return sums if own.bias is None else sums + own.bias.astype(jnp.float32)


def _one_of(arrays: jax.Array, *, number: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(arrays, number, keepdims=False)
