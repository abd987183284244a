"""Mixtures on which the products with experts are compared with their definition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from jitney.kernels import definitions
from jitney.kernels.experts import UNGATED, ExpertBlocks, Stack
from jitney.kernels.interface import ExpertProducts
from jitney.kernels.proof_shapes import distance

#: Number of empty blocks after the blocks with rows.
_EMPTY = 3


@dataclass(frozen=True)
class ExpertCase:
    """One step of a layer with experts. The first expert has no rows, the second one all, the third
    one only the last row; the rows of the other experts are random.
    """

    size: int = 64  # E
    inner: int = 48  # F
    rows: int = 21  # T
    block: int = 16  # B
    n_experts: int = 5  # X
    schemes: tuple[str, str] = ("plain", "plain")  # of the opening and the closing matrices
    activation: str = "silu"
    dtype: str = "float32"  # of the activations
    biased: bool = False  # the products have biases
    empty: bool = False  # no row is routed

    def errors(self, experts: ExpertProducts) -> Iterator[float]:
        """Errors of the products, without those of padding rows."""
        inputs = _make_inputs(self)
        actual = jax.jit(experts, static_argnums=4)(
            inputs.x, inputs.opening, inputs.closing, inputs.blocks, self.activation
        )
        expected = definitions.experts(
            inputs.x, inputs.opening, inputs.closing, inputs.blocks, self.activation
        )
        yield distance(np.asarray(actual)[inputs.real], expected[inputs.real])


#: Cases of tests and the device bench: sizes that are not multiples of tiles, all activations and
#: formats of weights, blocks of few and of many rows.
CASES = {
    "plain": ExpertCase(),
    "one row": ExpertCase(rows=1),
    "blocks of 32": ExpertCase(block=32, rows=70, size=96, inner=80),
    "blocks of 128": ExpertCase(block=128, rows=150, n_experts=4),
    "columns of several tiles": ExpertCase(size=200, inner=320, rows=9),
    "gelu": ExpertCase(activation="gelu_tanh"),
    "int8": ExpertCase(schemes=("int8", "int8"), size=128, inner=96),
    "fp8": ExpertCase(schemes=("fp8", "fp8"), size=128, inner=96),
    "fp8 and plain, gelu": ExpertCase(schemes=("fp8", "plain"), activation="gelu_tanh"),
    "mxfp4": ExpertCase(schemes=("mxfp4", "mxfp4"), size=128, inner=96),
    "mxfp4, biases, clamped, several tiles": ExpertCase(
        schemes=("mxfp4", "mxfp4"),
        size=352,
        inner=224,
        rows=70,
        block=32,
        activation="clamped_silu",
        biased=True,
    ),
    "biases, clamped": ExpertCase(activation="clamped_silu", biased=True),
    "without gates": ExpertCase(activation="relu2", size=96, inner=80),
    "fp8, without gates": ExpertCase(activation="relu2", schemes=("fp8", "fp8"), size=128),
    "no rows": ExpertCase(empty=True),
}


@dataclass(frozen=True)
class _ExpertInputs:
    """Random arrays of a case."""

    x: np.ndarray  # [T, E]
    opening: Stack
    closing: Stack
    blocks: ExpertBlocks

    @property
    def real(self) -> np.ndarray:
        """The places in blocks that hold rows, not padding."""
        return np.flatnonzero(self.blocks.rows < len(self.x))


def _make_inputs(case: ExpertCase) -> _ExpertInputs:
    """The arrays, in numpy."""
    rng = np.random.default_rng(case.size + case.inner + case.rows)
    x = _uniform(rng, (case.rows, case.size), case.dtype)
    columns = case.inner if case.activation in UNGATED else 2 * case.inner
    opening = _stack(rng, case, case.schemes[0], (case.size, columns))
    closing = _stack(rng, case, case.schemes[1], (case.inner, case.size))
    return _ExpertInputs(x, opening, closing, _blocks(rng, case))


def _uniform(rng: np.random.Generator, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    return (2 * rng.random(shape, np.float32) - 1).astype(jnp.dtype(dtype))


def _stack(
    rng: np.random.Generator, case: ExpertCase, scheme: str, sizes: tuple[int, int]
) -> Stack:
    """Random matrices whose products lie where gates are neither all open nor all closed; with a
    clamped activation, some lie beyond the clamp.
    """
    stack = _unbiased(rng, case, scheme, sizes)
    if not case.biased:
        return stack
    bias = _uniform(rng, (case.n_experts, sizes[1]), case.dtype)
    return stack._replace(bias=bias)


def _unbiased(
    rng: np.random.Generator, case: ExpertCase, scheme: str, sizes: tuple[int, int]
) -> Stack:
    shape = case.n_experts, *sizes
    spread = (8 if case.activation == "clamped_silu" else 2) * sizes[0] ** -0.5
    if scheme == "plain":
        return Stack((spread * _uniform(rng, shape, "float32")).astype(jnp.dtype(case.dtype)))  # pyright: ignore[reportArgumentType]
    if scheme == "mxfp4":
        return Stack(*random_mxfp4(rng, shape, spread))
    scale = spread * (0.5 + rng.random((case.n_experts, sizes[1]), np.float32))
    if scheme == "int8":
        codes, steps = rng.integers(-127, 128, shape, np.int8), 127
    else:
        codes, steps = _uniform(rng, shape, ml_dtypes.float8_e4m3fn), 1
    return Stack(codes, scale / np.float32(steps))  # pyright: ignore[reportArgumentType]


def random_mxfp4(
    rng: np.random.Generator, shape: tuple[int, int, int], spread: float
) -> tuple[Any, Any]:
    """Matrices [X, I, O] in MXFP4, of magnitudes about `spread`: codes uint8 [X, I // 2, O] and
    scales uint8 [X, I // 32, O].
    """
    n_experts, size_in, size_out = shape
    codes = rng.integers(0, 256, (n_experts, size_in // 2, size_out), np.uint8)
    exponent = 127 + round(np.log2(spread / 6))
    scales = rng.integers(exponent - 1, exponent + 2, (n_experts, size_in // 32, size_out))
    return codes, scales.astype(np.uint8)


def _blocks(rng: np.random.Generator, case: ExpertCase) -> ExpertBlocks:
    going = rng.random((case.rows, case.n_experts)) < 0.4
    going[:, :3] = False
    going[:, 1] = True
    going[-1, 2] = True
    if case.empty:
        going[:] = False
    rows, owners = [], []
    for expert in range(case.n_experts):
        own = np.flatnonzero(going[:, expert])
        for first in range(0, len(own), case.block):
            block = np.full(case.block, case.rows)
            part = own[first : first + case.block]
            block[: len(part)] = part
            rows.append(block)
            owners.append(expert)
    count = len(owners)
    rows += [np.full(case.block, case.rows)] * _EMPTY
    owners += [case.n_experts] * _EMPTY
    arrays = np.concatenate(rows), np.array(owners), np.array(count)
    return ExpertBlocks(*(array.astype(np.int32) for array in arrays))  # pyright: ignore[reportArgumentType]
