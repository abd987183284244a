"""Proof of products in parts, and of the kernels that add the parts: compares them with the
definitions at every number of rows at which the kernel set divides a product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jitney.kernels import definitions
from jitney.kernels.int4 import matmul_int4
from jitney.kernels.interface import KernelSet, PartialProducts
from jitney.kernels.partial_sums import PartialSums
from jitney.kernels.proof_attention import decode_step, rotation_errors
from jitney.kernels.proof_products import of_each_count, random_array, random_int4, repeated
from jitney.kernels.proof_shapes import Matrix, ServedShapes, distance, rounded_distance
from jitney.kernels.w8a8 import Fp8

#: Different random weights; a prime, so that a repetition does not coincide with a part.
_WEIGHTS = 1_000_003
#: Different random rows.
_ROWS = 61


@dataclass(frozen=True)
class _Operands:
    """Random operands of a product, and their product by definition."""

    x: np.ndarray
    #: What `PartialProducts.matmul` takes after x.
    weights: tuple[Any, ...]
    #: [rows of x, O]
    expected: np.ndarray


def part_errors(kernels: KernelSet, shapes: ServedShapes) -> Iterator[float]:
    """Errors of each matrix's product in parts, of the norm that adds these to a residual, and of
    the rotation that reads them as heads.
    """
    parts = kernels.parts
    if parts is None:
        return
    for matrix in shapes.matrices:
        operands = None if matrix.gated else _random_operands(kernels, shapes, matrix)
        if operands is not None:
            products = _in_parts(parts, operands, shapes)
            for product in products:
                yield distance(_whole(product), repeated(operands.expected, product.rows))
            if matrix.size_out == shapes.hidden_size:
                yield from _norm_errors(kernels, parts, products, shapes)
            yield from _rotation_errors(parts, operands, shapes)


def _in_parts(
    parts: PartialProducts, operands: _Operands, shapes: ServedShapes
) -> list[PartialSums]:
    """The products of all numbers of rows that are divided."""

    def call_all(rows: list[Any], weights: tuple[Any, ...]) -> list[PartialSums | None]:
        return [parts.matmul(x, *weights) for x in rows]

    rows = of_each_count(operands.x, shapes.steps.product_rows)
    products = jax.jit(call_all)(rows, operands.weights)
    return [product for product in products if product is not None]


def _norm_errors(
    kernels: KernelSet, parts: PartialProducts, products: list[PartialSums], shapes: ServedShapes
) -> Iterator[float]:
    rng, eps = np.random.default_rng(8), shapes.norms.eps
    weight = random_array(rng, (shapes.hidden_size,), shapes.norms.dtype)
    x = random_array(rng, (_ROWS, shapes.hidden_size), shapes.dtype)
    in_fp8 = any(one.scheme == "fp8" for one in shapes.matrices)
    rounds = in_fp8 and kernels.rounding is not None

    def call_all(pairs: Any, weight: Any) -> list[Any]:
        results = []
        for x, product in pairs:
            results.append(parts.norm_sum(x, product, weight, eps))
            if rounds:
                total, rows = parts.rounded_norm_sum(x, product, weight, eps)
                results[-1] += total, rows.widened()
        return results

    residuals = [repeated(x, product.rows) for product in products]
    results = jax.jit(call_all)(list(zip(residuals, products, strict=True)), weight)
    for residual, product, (total, normed, *rounded) in zip(
        residuals, products, results, strict=True
    ):
        wide = residual.astype(np.float32) + _whole(product).astype(np.float32)
        expected = wide.astype(residual.dtype)
        yield distance(total, expected.astype(np.float32))
        yield distance(normed, definitions.rms_norm(expected, weight, eps))
        if rounded:
            yield distance(rounded[0], expected.astype(np.float32))
            yield rounded_distance(rounded[1], definitions.rms_norm(expected, weight, eps))


def _rotation_errors(
    parts: PartialProducts, operands: _Operands, shapes: ServedShapes
) -> Iterator[float]:
    """Errors in the decode steps with the fewest and the most seats."""
    for own in shapes.by_heads:
        heads = own.attention.n_heads + 2 * own.attention.n_kv_heads
        if operands.expected.shape[1] != heads * own.attention.head_dim:
            continue
        for seats in sorted({own.steps.decode[0], own.steps.decode[-1]}):
            x = repeated(operands.x, seats)
            product = jax.jit(parts.matmul)(x, *operands.weights)
            if product is None:
                continue
            rows = _whole(product).reshape(seats, heads, -1)
            step = decode_step(own, seats).with_heads(rows)
            rotate = partial(parts.rotate_and_write, eps=own.norms.eps)
            yield from rotation_errors(rotate, product, own, step)


def _whole(product: PartialSums) -> np.ndarray:
    """The product by definition."""
    total = np.sum(np.asarray(product.parts)[:, : product.rows], axis=0)
    for factors in (product.units, product.scale):
        total = total if factors is None else total * np.asarray(factors)
    return total.astype(product.dtype)


def _random_operands(kernels: KernelSet, shapes: ServedShapes, matrix: Matrix) -> _Operands | None:
    """None for a scheme of which products are whole."""
    rng = np.random.default_rng(matrix.size_in + matrix.size_out)
    x = random_array(rng, (_ROWS, matrix.size_in), shapes.dtype)
    size = matrix.size_in, matrix.size_out
    scale = 0.5 + rng.random(matrix.size_out, np.float32)
    match matrix.scheme:
        case "plain":
            w = np.resize(random_array(rng, (_WEIGHTS,), shapes.dtype), size)
            return _Operands(x, (w,), definitions.matmul(x, w))
        case "int8" if kernels.int8 is None:
            w = np.resize(rng.integers(-127, 128, _WEIGHTS, np.int8), size)
            return _Operands(x, (w, scale / 127), definitions.matmul(x, w) * (scale / 127))
        case "fp8" if kernels.fp8 is not None:
            w = np.resize(random_array(rng, (_WEIGHTS,), "float8_e4m3fn"), size)
            pack: Callable[..., Any] = jax.jit(kernels.fp8.pack)
            return _Operands(
                x, (Fp8(pack(w), jnp.asarray(scale)),), definitions.matmul_fp8(x, w, scale)
            )
        case "int4":
            weights = random_int4(rng, matrix)
            expected = np.asarray(jax.jit(matmul_int4)(x, weights), np.float32)
            return _Operands(x, (weights,), expected)
    return None
