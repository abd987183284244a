"""Proof of the norms, the products with weights and with experts, the output head and the sampling
cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jitney.kernels import definitions
from jitney.kernels.expert_cases import ExpertCase, random_mxfp4
from jitney.kernels.experts import UNGATED
from jitney.kernels.int4 import Int4, matmul_int4
from jitney.kernels.interface import (
    ExpertProducts,
    Fp8Products,
    KernelSet,
    OneOf,
    RoundingKernels,
)
from jitney.kernels.mxfp4 import Mxfp4
from jitney.kernels.proof_shapes import (
    Matrix,
    MixtureShape,
    ServedShapes,
    distance,
    rounded_distance,
)
from jitney.kernels.w8a8 import Fp8, Int8

#: Most columns of a matrix and rows of a table, plus a remainder (`_narrowed`): sixty vectors of
#: 16, since tiles are chosen by divisors of up to six.
_COLUMNS = 960
#: Number of different rows; the others repeat them, so that the definition computes fewer. A prime,
#: so that the repetition does not coincide with the rows of a tile.
_DIFFERENT_ROWS = 61
#: Most experts of a mixture that are proved.
_EXPERTS = 4
#: Random numbers per piece: float32 that fit a core's cache.
_PIECE = 1 << 16
#: (top-k, top-p) at which the cut is compared; a k beyond the vocabulary keeps all of it.
_CUTS = ((1, 1.0), (50, 1.0), (0, 0.9), (0, 0.1), (40, 0.8), (1 << 30, 0.5), (2000, 0.999))


#: Number of rows of a product -> number of those that are not padding.
type _Counts = dict[int, Any]


def _norm_errors(kernels: KernelSet, shapes: ServedShapes) -> Iterator[float]:
    """Errors of norms: of rows of the hidden size at every row count, alone and added to the same
    rows in another order, in the dtypes of the residual and of products; of heads if they are
    normed, and of rows of other widths.
    """
    rng = np.random.default_rng(5)
    weight = random_array(rng, (shapes.hidden_size,), shapes.norms.dtype)
    x = _random_rows(rng, shapes, shapes.hidden_size)
    turned = np.ascontiguousarray(x[:, ::-1])
    sizes = [(shapes.steps.decode[-1], shapes.hidden_size)]
    if kernels.float32_residual:
        x = x.astype(np.float32)
    sizes += [(shapes.steps.decode[-1], width) for width in shapes.norms.widths]
    for heads in (shapes.attention, *shapes.other_attention):
        if heads.qk_norm:
            sizes.append((shapes.steps.decode[-1] * heads.n_heads, heads.head_dim))
    others: list[tuple[np.ndarray, np.ndarray]] = []
    for size in sizes:
        own_weight = random_array(rng, size[1:], shapes.norms.dtype)
        others.append((random_array(rng, size, shapes.dtype), own_weight))

    def call_all(rows: Any, added: Any, weight: Any, others: Any) -> tuple[list[Any], ...]:
        normed = [kernels.rms_norm(x, weight, shapes.norms.eps) for x in rows]
        of_others = [kernels.rms_norm(x, own, shapes.norms.eps) for x, own in others]
        pairs = zip(rows, added, strict=True)
        sums = [kernels.norm_sum(one, other, weight, shapes.norms.eps) for one, other in pairs]
        return normed, of_others, sums

    rows, added = (
        of_each_count(x, shapes.steps.product_rows),
        of_each_count(turned, shapes.steps.product_rows),
    )
    normed, of_others, sums = jax.jit(call_all)(rows, added, weight, others)
    expected = definitions.rms_norm(x, weight, shapes.norms.eps)
    yield from _distances(normed, expected)
    for got, operands in zip(of_others, others, strict=True):
        yield distance(got, definitions.rms_norm(*operands, shapes.norms.eps))
    total = (x.astype(np.float32) + turned.astype(np.float32)).astype(x.dtype)
    expected = definitions.rms_norm(total, weight, shapes.norms.eps)
    totals, normed = zip(*sums, strict=True)
    yield from _distances(totals, total)
    yield from _distances(normed, expected)


def _product_errors(kernels: KernelSet, shapes: ServedShapes, *, name: str) -> Iterator[float]:
    """Errors of the products that are proved under this name, at every row count."""
    matrices = [one for one in shapes.matrices if _name_of_product(kernels, one) == name]
    return _errors_of(kernels, matrices, shapes)


def _name_of_product(kernels: KernelSet, matrix: Matrix) -> str:
    """The key of `CHECKS` under which a matrix's product is proved."""
    rounds_rows = {"int8": kernels.int8, "fp8": kernels.fp8}
    if matrix.scheme in ("int4", "mxfp4") or rounds_rows.get(matrix.scheme) is not None:
        return f"{matrix.scheme} product"
    return "products"


@dataclass(frozen=True)
class _Product:
    """A kernel set's product with a matrix, and its definition."""

    matrix: Matrix
    #: Packs the matrix; None: it stays [I, O].
    pack: Callable[..., Any] | None
    #: Function of x [T, I], the packed matrix or a `OneOf` of packed matrices, and scale [O].
    multiply: Callable[[Any, Any, Any], jax.Array]
    #: Function of x [T, I], w [I, O] (or an `Mxfp4` of this shape), and scale [O].
    define: Callable[[np.ndarray, Any, np.ndarray], np.ndarray]

    def packed(self, w: Any) -> Any:
        """w [I, O] in the layout that `multiply` takes."""
        if self.pack is None:
            return w
        return self.pack(w, 2 if self.matrix.gated else 1)


def _product_of(kernels: KernelSet, matrix: Matrix) -> _Product:
    """The product that models use for a matrix, except int4."""
    match _name_of_product(kernels, matrix):
        case "mxfp4 product":
            return _in_mxfp4(kernels, matrix)
        case "int8 product":
            return _in_int8(kernels, matrix)
        case "fp8 product":
            return _in_fp8(kernels, matrix)
    return _in_floats(kernels, matrix)


def _in_floats(kernels: KernelSet, matrix: Matrix) -> _Product:
    """The product with floats, or with codes that are widened and scaled after the product."""
    pack = kernels.pack if matrix.scheme == "plain" else None
    if matrix.scheme == "plain" and matrix.gated:
        return _Product(
            matrix,
            pack,
            lambda x, w, scale: kernels.gated(x, w),
            lambda x, w, scale: definitions.gated(definitions.matmul(x, w)),
        )
    return _Product(
        matrix,
        pack,
        lambda x, w, scale: kernels.matmul(x, w),
        lambda x, w, scale: definitions.matmul(x, w),
    )


def _in_int8(kernels: KernelSet, matrix: Matrix) -> _Product:
    products = kernels.int8
    assert products is not None
    if matrix.gated:
        return _Product(
            matrix,
            products.pack,
            lambda x, w, scale: products.gated(x, Int8(w, scale)),
            lambda x, w, scale: definitions.gated(definitions.matmul_int8(x, w, scale)),
        )
    return _Product(
        matrix,
        products.pack,
        lambda x, w, scale: products.matmul(x, Int8(w, scale)),
        definitions.matmul_int8,
    )


def _in_fp8(kernels: KernelSet, matrix: Matrix) -> _Product:
    products = kernels.fp8
    assert products is not None
    return _Product(
        replace(matrix, gated=False),  # see `_rounded_errors`
        products.pack,
        lambda x, w, scale: products.matmul(x, Fp8(w, scale), x.dtype),
        definitions.matmul_fp8,
    )


def _in_mxfp4(kernels: KernelSet, matrix: Matrix) -> _Product:
    products = kernels.mxfp4
    assert products is not None
    return _Product(
        matrix,
        products.pack,
        lambda x, w, scale: products.matmul(x, w),
        lambda x, w, scale: definitions.matmul(x, definitions.mxfp4(*w)),
    )


def _errors_of(kernels: KernelSet, matrices: list[Matrix], shapes: ServedShapes) -> Iterator[float]:
    """Errors of the products with all these matrices at every row count; if the set leaves out
    padding rows, also with a third of the rows being padding.

    All products are in one program, which compiles about as fast as a program for one matrix.
    """
    if not matrices:
        return
    products = [_product_of(kernels, matrix) for matrix in matrices]
    operands = [_random_operands(shapes, matrix, 1) for matrix in matrices]
    inputs = [(of_each_count(x, shapes.steps.product_rows), *rest) for x, *rest in operands]
    counts = _present_rows(kernels, shapes.steps.product_rows)

    def call_all(inputs: Any, counts: _Counts) -> list[tuple[list[Any], list[Any]]]:
        results = []
        for one, (rows, w, scale) in zip(products, inputs, strict=True):
            laid_out = one.packed(_number(w, 0))
            padded = []
            for x in rows:
                if len(x) in counts:
                    counted = _counting(one, kernels, counts[len(x)])
                    padded.append(counted.multiply(x, laid_out, scale))
            results.append(([one.multiply(x, laid_out, scale) for x in rows], padded))
        return results

    results = jax.jit(call_all)(inputs, counts)
    for one, (x, w, scale), (whole, padded) in zip(products, operands, results, strict=True):
        expected = one.define(x, _number(w, 0), scale)
        yield from _distances(whole, expected)
        yield from _distances([got[: counts[len(got)]] for got in padded], expected)


def _fp8_errors(kernels: KernelSet, shapes: ServedShapes) -> Iterator[float]:
    """Errors of fp8 products, and of kernels that round their results for one."""
    yield from _product_errors(kernels, shapes, name="fp8 product")
    matrices = [one for one in shapes.matrices if one.scheme == "fp8"]
    if kernels.fp8 is not None and kernels.rounding is not None and matrices:
        yield from _rounded_errors(kernels.fp8, kernels.rounding, matrices, shapes)


def _rounded_errors(
    products: Fp8Products, rounding: RoundingKernels, matrices: list[Matrix], shapes: ServedShapes
) -> Iterator[float]:
    """Errors of rounded norms and gates at every row count, beyond those of the last rounding."""
    rng, eps = np.random.default_rng(6), shapes.norms.eps
    weight = random_array(rng, (shapes.hidden_size,), shapes.norms.dtype)
    x = _random_rows(rng, shapes, shapes.hidden_size)
    added = np.ascontiguousarray(x[:, ::-1])
    counts = shapes.steps.product_rows
    operands = [_random_operands(shapes, one, 1) for one in matrices if one.gated]
    gated = [(of_each_count(rows, counts), *rest) for rows, *rest in operands]

    def call_all(sums: Any, weight: Any, gated: Any) -> tuple[list[Any], list[list[jax.Array]]]:
        normed = [rounding.norm_sum(one, other, weight, eps) for one, other in sums]
        results = []
        for inputs, w, scale in gated:
            packed = Fp8(products.pack(_number(w, 0)), scale)
            results.append([rounding.gated(rows, packed).widened() for rows in inputs])
        return [(total, rows.widened()) for total, rows in normed], results

    pairs = list(zip(of_each_count(x, counts), of_each_count(added, counts), strict=True))
    sums, results = jax.jit(call_all)(pairs, weight, gated)
    total = (x.astype(np.float32) + added.astype(np.float32)).astype(x.dtype)
    normed = definitions.rms_norm(total, weight, eps)
    for got_total, got in sums:
        yield distance(got_total, repeated(total, len(got)))
        yield rounded_distance(got, repeated(normed, len(got)))
    for (rows, w, scale), by_count in zip(operands, results, strict=True):
        opened = definitions.gated(definitions.matmul_fp8(rows, _number(w, 0), scale))
        for got in by_count:
            yield rounded_distance(got, repeated(opened, len(got)))


def _present_rows(kernels: KernelSet, sizes: Sequence[int]) -> _Counts:
    """Number of rows -> number of those that are not padding, two thirds; empty if the set
    multiplies padding rows too.
    """
    if not kernels.leaves_out_padding:
        return {}
    return {rows: np.int32(rows - rows // 3) for rows in sizes}


def _counting(product: _Product, kernels: KernelSet, count: Any) -> _Product:
    """The product of only a step's first `count` rows; of all rows if count is None."""
    if count is None:
        return product
    return _product_of(kernels.of_rows(count), product.matrix)


def _head_errors(kernels: KernelSet, shapes: ServedShapes) -> Iterator[float]:
    """Errors of the output head at every row count, if it is the embedding table."""
    if not shapes.table:
        return
    rng = np.random.default_rng(11)
    x = _random_rows(rng, shapes, shapes.hidden_size)
    table = random_array(rng, (_narrowed(shapes.table, _COLUMNS), shapes.hidden_size), shapes.dtype)

    def call_all(rows: list[jax.Array], table: jax.Array) -> list[jax.Array]:
        return [kernels.project(x, table) for x in rows]

    expected = definitions.matmul(x, table.T)
    rows = of_each_count(x, shapes.steps.product_rows)
    yield from _distances(jax.jit(call_all)(rows, table), expected)


def _int4_errors(kernels: KernelSet, shapes: ServedShapes) -> Iterator[float]:
    """Errors of products with 4-bit matrices, with zero points, at every row count, compared with
    the reference's product.
    """
    rng = np.random.default_rng(13)
    for matrix in shapes.matrices:
        if matrix.scheme != "int4":
            continue
        narrowed = replace(matrix, size_out=_narrowed(matrix.size_out, _COLUMNS))
        weights = random_int4(rng, narrowed)
        x = _random_rows(rng, shapes, matrix.size_in)
        yield from _errors_of_int4(kernels.matmul_int4, matmul_int4, x, weights, shapes)
        if matrix.gated and kernels.gated_int4 is not None:
            # All columns: their number decides how many a program computes. Products are about 1,
            # where gates are nonlinear.
            weights = random_int4(rng, matrix)
            x = (x.astype(np.float32) / (4 * matrix.size_in**0.5)).astype(x.dtype)
            yield from _errors_of_int4(kernels.gated_int4, _gated_int4, x, weights, shapes)


def _gated_int4(x: jax.Array, weights: Int4) -> jax.Array:
    """A gated product by definition, float32."""
    gates, ups = jnp.split(matmul_int4(x, weights), 2, axis=1)
    return jax.nn.silu(gates) * ups


def _errors_of_int4(
    multiply: Callable[[jax.Array, Int4], jax.Array],
    define: Callable[[jax.Array, Int4], jax.Array],
    x: np.ndarray,
    weights: Int4,
    shapes: ServedShapes,
) -> Iterator[float]:
    """Errors of a product with x [., I] at every row count."""

    def call_all(rows: list[jax.Array], weights: Int4) -> list[jax.Array]:
        return [multiply(x, weights) for x in rows]

    expected = np.asarray(jax.jit(define)(x, weights), np.float32)
    rows = of_each_count(x, shapes.steps.product_rows)
    yield from _distances(jax.jit(call_all)(rows, weights), expected)


def _expert_errors(kernels: KernelSet, shapes: ServedShapes) -> Iterator[float]:
    """Errors of the products with experts, in blocks of every number of rows; with four experts,
    and at most some thousand columns of an expert's feed-forward.
    """
    mixtures = [one for one in shapes.mixtures if "int4" not in one.schemes]
    if kernels.experts is not None:
        yield from _at_once_errors(kernels.experts, shapes, mixtures)
    elif kernels.takes_one_of:
        matrices = [one for mixture in mixtures for one in _matrices_of(mixture, shapes)]
        others = [one for one in matrices if one.scheme != "mxfp4"]
        yield from _one_by_one_errors(kernels, shapes, others)


def _mxfp4_errors(kernels: KernelSet, shapes: ServedShapes) -> Iterator[float]:
    """Errors of products with experts' MXFP4 matrices, if the set multiplies them one by one."""
    if kernels.experts is None and kernels.mxfp4 is not None:
        matrices = [one for mixture in shapes.mixtures for one in _matrices_of(mixture, shapes)]
        own = [one for one in matrices if one.scheme == "mxfp4"]
        yield from _one_by_one_errors(kernels, shapes, own)


def _at_once_errors(
    experts: ExpertProducts, shapes: ServedShapes, mixtures: list[MixtureShape]
) -> Iterator[float]:
    """Errors of the kernel that multiplies all blocks at once."""
    for mixture, block in itertools.product(mixtures, shapes.steps.blocks):
        case = ExpertCase(
            size=shapes.hidden_size,
            inner=_narrowed(mixture.inner, _COLUMNS),
            rows=block + 3,
            block=block,
            n_experts=_EXPERTS,
            schemes=mixture.schemes,
            activation=mixture.activation,
            biased=mixture.biased,
            dtype=shapes.dtype,
        )
        yield from case.errors(experts)


def _one_by_one_errors(
    kernels: KernelSet, shapes: ServedShapes, matrices: list[Matrix]
) -> Iterator[float]:
    """Errors of products with the first and the last expert's matrices, each multiplied in place
    inside the stack; if the set leaves out padding rows, a third of the first expert's rows are
    padding.
    """
    if not matrices:
        return
    products = [_product_of(kernels, matrix) for matrix in dict.fromkeys(matrices)]
    operands = [_random_operands(shapes, one.matrix, _EXPERTS) for one in products]
    inputs = [(of_each_count(x, shapes.steps.blocks), w, scale) for x, w, scale in operands]
    numbers = np.array([0, _EXPERTS - 1], np.int32)
    counts: tuple[_Counts, ...] = (_present_rows(kernels, shapes.steps.blocks), {})

    def call_all(
        inputs: Any, numbers: jax.Array, counts: tuple[_Counts, ...]
    ) -> list[list[jax.Array]]:
        results = []
        for one, (rows, w, scale) in zip(products, inputs, strict=True):
            laid_out = jax.lax.map(one.packed, w)
            for number, present in zip(numbers, counts, strict=True):
                expert = _among(laid_out, number)
                answers = []
                for x in rows:
                    counted = _counting(one, kernels, present.get(len(x)))
                    answers.append(counted.multiply(x, expert, scale))
                results.append(answers)
        return results

    results = iter(jax.jit(call_all)(inputs, numbers, counts))
    for one, (x, w, scale) in zip(products, operands, strict=True):
        for number, present in zip(numbers, counts, strict=True):
            answers = [got[: present.get(len(got), len(got))] for got in next(results)]
            yield from _distances(answers, one.define(x, _number(w, number), scale))


def _among(laid_out: Any, number: jax.Array) -> Any:
    """One matrix of a stack."""
    if isinstance(laid_out, Mxfp4):
        return Mxfp4(*(OneOf(part, number) for part in laid_out))
    return OneOf(laid_out, number)


def _number(w: Any, number: int) -> Any:
    """A copy of one matrix of a stack that is not packed."""
    return jax.tree.map(lambda many: many[number], w)


def _matrices_of(mixture: MixtureShape, shapes: ServedShapes) -> tuple[Matrix, Matrix]:
    """The matrices that open and close an expert."""
    opening, closing = mixture.schemes
    gated = mixture.activation == "silu" and opening in ("plain", "int8")
    columns = mixture.inner if mixture.activation in UNGATED else 2 * mixture.inner
    return (
        Matrix(shapes.hidden_size, columns, opening, gated),
        Matrix(mixture.inner, shapes.hidden_size, closing),
    )


def random_int4(rng: np.random.Generator, matrix: Matrix) -> Int4:
    size_out = matrix.size_out
    groups = matrix.size_in // matrix.group
    packed = rng.integers(0, 256, (matrix.size_in // 2, size_out), np.uint8)
    scales = (rng.random((groups, size_out), np.float32) + 0.5).astype(np.float16)
    zeros = rng.integers(0, 16, (groups, size_out), np.uint8)
    return Int4(jnp.asarray(packed), jnp.asarray(scales), jnp.asarray(zeros))


def _random_operands(
    shapes: ServedShapes, matrix: Matrix, count: int
) -> tuple[np.ndarray, Any, np.ndarray]:
    """(x [., I], `count` matrices [count, I, O] of the matrix's scheme, scales [O]); O is at most
    about two thousand.
    """
    rng = np.random.default_rng(matrix.size_in + matrix.size_out)
    x = _random_rows(rng, shapes, matrix.size_in)
    # Products are about 1, where gates are neither all open nor all closed.
    x = (x.astype(np.float32) * np.float32(4 * matrix.size_in**-0.5)).astype(x.dtype)
    size_out = _narrowed(matrix.size_out, _COLUMNS * (2 if matrix.gated else 1))
    size = count, matrix.size_in, size_out
    scale = 0.5 + rng.random(size_out, np.float32)
    match matrix.scheme:
        case "int8":
            return x, rng.integers(-127, 128, size, np.int8), scale / 127
        case "fp8":
            return x, random_array(rng, size, "float8_e4m3fn"), scale
        case "mxfp4":
            return x, Mxfp4(*random_mxfp4(rng, size, 1.0)), scale
    return x, random_array(rng, size, shapes.dtype), scale


def _random_rows(rng: np.random.Generator, shapes: ServedShapes, size: int) -> np.ndarray:
    """Different random rows of `size` numbers."""
    return random_array(rng, (_DIFFERENT_ROWS, size), shapes.dtype)


def of_each_count(x: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    """The different rows x [., I], repeated to each row count.

    They are made outside the program, where the compiler would turn every slice into a loop.
    """
    most = repeated(x, max(counts))
    return [most[:rows] for rows in counts]


def repeated(x: np.ndarray, rows: int) -> np.ndarray:
    """x [., n] repeated to [rows, n]."""
    return np.resize(x, (rows, x.shape[1]))


def _distances(results: Sequence[jax.Array], expected: np.ndarray) -> Iterator[float]:
    """Distances of each row count's result from the definition's."""
    for got in results:
        yield distance(got, repeated(expected, len(got)))


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random numbers from -1 to 1, drawn in pieces, which halves the time for a large matrix."""
    array = np.empty(shape, jnp.dtype(dtype))
    flat = array.reshape(-1)
    for first in range(0, flat.size, _PIECE):
        piece = flat[first : first + _PIECE]
        piece[:] = 2 * rng.random(piece.size, np.float32) - 1
    return array


def _narrowed(size: int, columns: int) -> int:
    """A size below twice `columns` with the same remainder, so that tiles are the same."""
    return min(size, columns + size % columns)


def _cut_errors(kernels: KernelSet, shapes: ServedShapes) -> Iterator[float]:
    """Errors of the top-k and top-p cut for several limits: the difference between the probability
    that is kept and that by definition.
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
        mass = weights[row >= floor].sum() / weights.sum()
        yield abs(float(mass) - _kept_mass(row, int(k), float(p)))


def _kept_mass(row: np.ndarray, top_k: int, top_p: float) -> float:
    """The probability of logits [V] that top-k (0: all), then top-p of the rest, keep."""
    weights = np.exp(np.sort(row.astype(np.float64))[::-1])
    weights /= weights.sum()
    first = weights[:top_k] if top_k else weights
    before = np.cumsum(first) - first
    return float(first[before < top_p * first.sum()].sum())


#: Kernel -> function that yields its errors; it yields none if the engine never calls the kernel.
CHECKS: dict[str, Callable[[KernelSet, ServedShapes], Iterator[float]]] = {
    "norm": _norm_errors,
    "products": partial(_product_errors, name="products"),
    "head": _head_errors,
    "int4 product": _int4_errors,
    "int8 product": partial(_product_errors, name="int8 product"),
    "fp8 product": _fp8_errors,
    "mxfp4 product": _mxfp4_errors,
    "experts": _expert_errors,
    "sampling cut": _cut_errors,
}
