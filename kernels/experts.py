"""Products of rows with the experts of a mixture, all blocks at once: what they are made of, and
what they compute in plain jax.numpy.

Axes: T rows, I inputs, O outputs, F an expert's feed-forward, E embed, X experts, N blocks, B rows
of a block. A block is rows of one expert; a row stands in as many blocks as it goes through
experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


class Stack(NamedTuple):
    """The matrices of all experts, one behind the other."""

    #: [X, I, O]: bfloat16, float32, int8 or float8_e4m3fn.
    kernel: jax.Array
    #: float32 [X, O], factors of the sums, of int8 and float8_e4m3fn; else None.
    scale: jax.Array | None = None


class ExpertBlocks(NamedTuple):
    """Which rows meet which expert; int32."""

    #: [N * B]: the row at each place; T: nobody's, whose numbers are 0.
    rows: jax.Array
    #: [N]; X: nobody's, of blocks without rows.
    experts: jax.Array
    #: []: blocks that hold rows, the first ones.
    count: jax.Array

    @property
    def size(self) -> int:
        """B."""
        return self.rows.shape[0] // self.experts.shape[0]


#: Functions that open a gate, by name; both are g times the logistic function of something.
ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}


def gate(
    y: jax.Array, dtype: DTypeLike, activation: Callable[[jax.Array], jax.Array] = jax.nn.silu
) -> jax.Array:
    """Gates and what they gate, [T, 2F] -> activation(first half) * second half, [T, F] in
    `dtype`.

    Parted before they are widened: XLA for TPUs would write all of them as float32, and then part
    that.
    """
    gates, ups = (half.astype(jnp.float32) for half in jnp.split(y, 2, axis=-1))
    return (activation(gates) * ups).astype(dtype)


def experts(
    x: jax.Array, opening: Stack, closing: Stack, blocks: ExpertBlocks, activation: str
) -> jax.Array:
    """See `jitney.kernels.interface.ExpertProducts`; block after block, those without rows too."""

    def answers(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, expert = block
        given = x.at[rows].get(mode="fill", fill_value=0)
        gates, ups = jnp.split(_product(given, opening, expert), 2, axis=-1)
        inner = (ACTIVATIONS[activation](gates) * ups).astype(x.dtype)
        return _product(inner, closing, expert)

    of_blocks = jax.lax.map(answers, (blocks.rows.reshape(-1, blocks.size), blocks.experts))
    return of_blocks.reshape(-1, closing.kernel.shape[-1])


def _product(x: jax.Array, stack: Stack, expert: jax.Array) -> jax.Array:
    """x [B, I] times the matrix of an expert: float32 [B, O]."""
    w: Any = jax.lax.dynamic_index_in_dim(stack.kernel, expert, keepdims=False)
    sums = jnp.matmul(x, w.astype(x.dtype), preferred_element_type=jnp.float32)
    return sums if stack.scale is None else sums * stack.scale[expert]
