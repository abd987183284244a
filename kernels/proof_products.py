"""Proof of the norms, the products with weights and with experts, the output head and the sampling
cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jitney.kernels import definitions
from jitney.kernels.expert_cases import ExpertCase, case_errors
from jitney.kernels.fp8 import Fp8
from jitney.kernels.int4 import Int4, matmul_int4
from jitney.kernels.int8 import Int8
from jitney.kernels.interface import KernelSet
from jitney.kernels.proof_shapes import Matrix, ServedShapes, distance

#: Most columns of a matrix and rows of a table, but for a remainder (`narrowed`): sixty vectors of
#: 16, since tiles are chosen by divisors of up to six.
_COLUMNS = 960
#: (top-k, top-p) at which the cut is compared; a k beyond the vocabulary is all of it.
_CUTS = ((1, 1.0), (50, 1.0), (0, 0.9), (0, 0.1), (40, 0.8), (1 << 30, 0.5), (2000, 0.999))


def norm_errors(kernels: KernelSet, shapes: ServedShapes) -> Iterator[float]:
    """Rows of the hidden size at every row count, and heads where they are normed."""
    cases = [(rows, shapes.hidden_size) for rows in shapes.product_rows]
    if shapes.qk_norm:
        cases.append((shapes.decode[-1] * shapes.n_heads, shapes.head_dim))
    rng = np.random.default_rng(5)
    inputs = []
    for rows, size in cases:
        x = _random_array(rng, (rows, size), shapes.dtype)
        inputs.append((x, _random_array(rng, (size,), shapes.norm_weights)))

    def call_all(inputs: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
        return [kernels.rms_norm(x, weight, shapes.eps) for x, weight in inputs]

    for got, (x, weight) in zip(jax.jit(call_all)(inputs), inputs, strict=True):
        yield distance(got, definitions.rms_norm(x, weight, shapes.eps))
    yield from _sum_errors(kernels, shapes, inputs[: len(shapes.product_rows)])


def _sum_errors(
    kernels: KernelSet, shapes: ServedShapes, inputs: list[tuple[np.ndarray, np.ndarray]]
) -> Iterator[float]:
    """Rows of the hidden size, each added to the same in another order, and the norm of that."""

    def call_all(inputs: list[tuple[jax.Array, jax.Array]]) -> list[tuple[jax.Array, jax.Array]]:
        return [kernels.norm_sum(x, x[:, ::-1], weight, shapes.eps) for x, weight in inputs]

    for (total, got), (x, weight) in zip(jax.jit(call_all)(inputs), inputs, strict=True):
        wanted = (x.astype(np.float32) + x[:, ::-1].astype(np.float32)).astype(x.dtype)
        yield distance(total, wanted)
        yield distance(got, definitions.rms_norm(wanted, weight, shapes.eps))


def product_errors(kernels: KernelSet, shapes: ServedShapes) -> Iterator[float]:
    """Every matrix of a layer but those that have a product of their own, at every row count."""
    for matrix in shapes.matrices:
        if _has_its_own(kernels, matrix):
            continue
        x, w = _random_product(shapes, matrix)
        products = jax.jit(partial(_products_of, kernels, shapes, matrix))(x, w)
        define = definitions.gated if _gated_plain(matrix) else definitions.matmul
        wanted = define(x, w)
        for got in products:
            yield distance(got, wanted[: len(got)])


def _products_of(
    kernels: KernelSet, shapes: ServedShapes, matrix: Matrix, x: jax.Array, w: jax.Array
) -> list[jax.Array]:
    """The products of the first rows of x [T, I] with w [I, O], one for each row count."""
    product = kernels.gated if _gated_plain(matrix) else kernels.matmul
    if kernels.arrange is not None and matrix.scheme == "plain":
        w = kernels.arrange(w, _parts(matrix))
    return [product(x[:rows], w) for rows in shapes.product_rows]


def _gated_plain(matrix: Matrix) -> bool:
    """Whether its product is `KernelSet.gated`, which is for floats."""
    return matrix.gated and matrix.scheme == "plain"


def _parts(matrix: Matrix) -> int:
    return 2 if matrix.gated else 1


def _has_its_own(kernels: KernelSet, matrix: Matrix) -> bool:
    """Whether its product is none of `KernelSet.matmul` and `gated`."""
    return matrix.scheme == "int4" or _is_int8(kernels, matrix) or _is_fp8(kernels, matrix)


def _is_fp8(kernels: KernelSet, matrix: Matrix) -> bool:
    """Whether its product is one of `KernelSet.fp8`."""
    return kernels.fp8 is not None and matrix.scheme == "fp8"


def _is_int8(kernels: KernelSet, matrix: Matrix) -> bool:
    """Whether its product is one of `KernelSet.int8`."""
    return kernels.int8 is not None and matrix.scheme == "int8"


def int8_errors(kernels: KernelSet, shapes: ServedShapes) -> Iterator[float]:
    """Matrices in int8 whose products round rows to int8, at every row count."""
    for matrix in shapes.matrices:
        if not _is_int8(kernels, matrix):
            continue
        x, w = _random_product(shapes, matrix)
        rng = np.random.default_rng(19)
        # Gates of a size that a gate bends, neither all open nor all shut.
        scale = (0.5 + rng.random(w.shape[1], np.float32)) / matrix.size_in
        products = jax.jit(partial(_int8_products_of, kernels, shapes, matrix))(x, w, scale)
        define = definitions.gated_int8 if matrix.gated else definitions.matmul_int8
        wanted = define(x, w, scale)
        for got in products:
            yield distance(got, wanted[: len(got)])


def _int8_products_of(
    kernels: KernelSet,
    shapes: ServedShapes,
    matrix: Matrix,
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array,
) -> list[jax.Array]:
    """The products of the first rows of x [T, I] with w [I, O], one for each row count."""
    assert kernels.int8 is not None
    weights = Int8(kernels.int8.arrange(w, _parts(matrix)), scale)
    product = kernels.int8.gated if matrix.gated else kernels.int8.matmul
    return [product(x[:rows], weights) for rows in shapes.product_rows]


def fp8_errors(kernels: KernelSet, shapes: ServedShapes) -> Iterator[float]:
    """Matrices in fp8 whose products round rows to fp8, at every row count."""
    for matrix in shapes.matrices:
        if not _is_fp8(kernels, matrix):
            continue
        x, w = _random_product(shapes, matrix)
        scale = 0.5 + np.random.default_rng(23).random(w.shape[1], np.float32)
        products = jax.jit(partial(_fp8_products_of, kernels, shapes))(x, w, scale)
        wanted = definitions.matmul_fp8(x, w, scale)
        for got in products:
            yield distance(got, wanted[: len(got)])


def _fp8_products_of(
    kernels: KernelSet, shapes: ServedShapes, x: jax.Array, w: jax.Array, scale: jax.Array
) -> list[jax.Array]:
    """The products of the first rows of x [T, I] with w [I, O], one for each row count."""
    assert kernels.fp8 is not None
    weights = Fp8(kernels.fp8.arrange(w), scale)
    return [kernels.fp8.matmul(x[:rows], weights, x.dtype) for rows in shapes.product_rows]


def head_errors(kernels: KernelSet, shapes: ServedShapes) -> Iterator[float]:
    """The head, where it is the embedding: at every row count."""
    if not shapes.table:
        return
    rng = np.random.default_rng(11)
    x = _random_array(rng, (shapes.product_rows[-1], shapes.hidden_size), shapes.dtype)
    table = _random_array(rng, (narrowed(shapes.table, _COLUMNS), shapes.hidden_size), shapes.dtype)

    def call_all(x: jax.Array, table: jax.Array) -> list[jax.Array]:
        return [kernels.project(x[:rows], table) for rows in shapes.product_rows]

    wanted = definitions.matmul(x, table.T)
    for got in jax.jit(call_all)(x, table):
        yield distance(got, wanted[: len(got)])


def int4_errors(kernels: KernelSet, shapes: ServedShapes) -> Iterator[float]:
    """Matrices in 4 bits, with zero points, at every row count; against the reference's product."""
    rng = np.random.default_rng(13)

    def call_all(x: jax.Array, weights: Int4) -> list[jax.Array]:
        return [kernels.matmul_int4(x[:rows], weights) for rows in shapes.product_rows]

    for matrix in shapes.matrices:
        if matrix.scheme != "int4":
            continue
        weights = _random_int4(rng, matrix)
        x = _random_array(rng, (shapes.product_rows[-1], matrix.size_in), shapes.dtype)
        wanted = np.asarray(jax.jit(matmul_int4)(x, weights), np.float32)
        for got in jax.jit(call_all)(x, weights):
            yield distance(got, wanted[: len(got)])


def expert_errors(kernels: KernelSet, shapes: ServedShapes) -> Iterator[float]:
    """Mixtures that are multiplied all blocks at once, in blocks of every number of rows; of their
    experts four, and of an expert's feed-forward at most some thousand columns.
    """
    for mixture in shapes.mixtures:
        if kernels.experts is None or "int4" in mixture.schemes:
            continue
        for block in shapes.blocks:
            case = ExpertCase(
                size=shapes.hidden_size,
                inner=narrowed(mixture.inner, _COLUMNS),
                rows=block + 3,
                block=block,
                n_experts=4,
                schemes=mixture.schemes,
                activation=mixture.activation,
                dtype=shapes.dtype,
            )
            yield from case_errors(kernels.experts, case)


def _random_int4(rng: np.random.Generator, matrix: Matrix) -> Int4:
    """The matrix with at most some thousand outputs."""
    size_out = narrowed(matrix.size_out, _COLUMNS)
    groups = matrix.size_in // matrix.group
    packed = rng.integers(0, 256, (matrix.size_in // 2, size_out), np.uint8)
    scales = (rng.random((groups, size_out), np.float32) + 0.5).astype(np.float16)
    zeros = rng.integers(0, 16, (groups, size_out), np.uint8)
    return Int4(jnp.asarray(packed), jnp.asarray(scales), jnp.asarray(zeros))


def _random_product(shapes: ServedShapes, matrix: Matrix) -> tuple[np.ndarray, np.ndarray]:
    """x [rows, I] and a matrix [I, O] of that scheme, O at most some two thousand."""
    rng = np.random.default_rng(matrix.size_in + matrix.size_out)
    x = _random_array(rng, (shapes.product_rows[-1], matrix.size_in), shapes.dtype)
    size_out = narrowed(matrix.size_out, _COLUMNS * (2 if matrix.gated else 1))
    match matrix.scheme:
        case "int8":
            return x, rng.integers(-127, 128, (matrix.size_in, size_out), np.int8)
        case "fp8":
            return x, _random_array(rng, (matrix.size_in, size_out), "float8_e4m3fn")
    return x, _random_array(rng, (matrix.size_in, size_out), shapes.dtype)


def _random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return (2 * rng.random(shape, np.float32) - 1).astype(jnp.dtype(dtype))


def narrowed(size: int, columns: int) -> int:
    """A size under twice `columns` with the same remainder, so that tiles are chosen alike."""
    return min(size, columns + size % columns)


def cut_errors(kernels: KernelSet, shapes: ServedShapes) -> Iterator[float]:
    """Top-k and top-p in several sizes: how much more or less probability is kept than should
    be.
    """
    if kernels.threshold is None:
        return
    size = shapes.vocab_size
    top_k = np.array([min(k, size) for k, _ in _CUTS], np.int32)
    top_p = np.array([p for _, p in _CUTS], np.float32)
    logits = 3 * np.random.default_rng(17).standard_normal((len(_CUTS), size), np.float32)
    logits -= logits.max(axis=-1, keepdims=True)
    floors = np.asarray(jax.jit(kernels.threshold)(logits, top_k, top_p))
    for row, k, p, floor in zip(logits, top_k, top_p, floors, strict=True):
        weights = np.exp(row.astype(np.float64))
        kept = weights[row >= floor].sum() / weights.sum()
        yield abs(float(kept) - definitions.kept_mass(row, int(k), float(p)))
