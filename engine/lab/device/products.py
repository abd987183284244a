"""Measures products with packed weights, and the search for a top-k or top-p threshold: each is
checked, then timed.

Bytes: weights with their scales, rows and results once. Operations: two per weight and row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jitney.engine.core import Packed, RandomMatrix, threshold
from jitney.engine.lab.device.kernels import measured
from jitney.engine.lab.device.rows import PartJob, Row, Task, Tasks
from jitney.engine.lab.device.timing import distance, timed
from jitney.kernels.interface import KernelSet

#: Share of the probability and number of tokens that the timed search keeps: nucleus sampling over
#: a flat tail, which no short list of candidates decides.
_TOP_P, _TOP_K = 0.95, 0


def products(job: PartJob, sets: Sequence[KernelSet], dtype: DTypeLike) -> Tasks:
    """Products with the two large matrices of a layer, for few rows, in every weight format."""
    config = job.config
    shapes = {
        "gate_up": (config.hidden_size, 2 * config.intermediate_size),
        "down": (config.intermediate_size, config.hidden_size),
    }
    combinations = itertools.product(job.sizes.product_rows, Packed.schemes, shapes.items(), sets)
    for rows, scheme, (name, shape), kernels in combinations:
        case = f"{name} {shape[0]} x {shape[1]}, {rows} rows"
        row = job.row(f"{scheme} product", case, kernels.label)
        yield Task(row, partial(_product_row, job, kernels, dtype, scheme, shape, rows))


def _product_row(
    job: PartJob,
    kernels: KernelSet,
    dtype: DTypeLike,
    scheme: str,
    shape: tuple[int, int],
    rows: int,
    row: Row,
) -> Iterator[Row]:
    matrix = RandomMatrix(scheme, shape, dtype, kernels)
    weights = matrix.packed(0)
    x = jax.random.normal(jax.random.key(9), (rows, shape[0]), dtype)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    moved = held + x.nbytes + 4 * rows * shape[1]

    def time(floor_s: float) -> list[float]:
        copies = [weights, *map(matrix.packed, range(1, job.copies_of(moved)))]
        return timed(
            lambda x, w: _chained(x, w.product(x, kernels)),
            x,
            copies,
            floor_s=floor_s,
            sample_s=job.sizes.sample_s,
        )

    ours = jax.jit(lambda x, w: w.product(x, kernels))(x, weights)
    yield measured(
        job,
        row,
        moved=moved,
        operations=2.0 * rows * shape[0] * shape[1],
        error=float(distance(ours, matrix.exact_product(x))),
        itemsize=jnp.dtype(dtype).itemsize,
        time=time,
    )


def thresholds(job: PartJob, sets: Sequence[KernelSet], dtype: DTypeLike) -> Tasks:
    """The threshold of nucleus sampling over the whole vocabulary: the set's kernel and the
    sampler's own search.
    """
    searches = {kernels.label: kernels.threshold for kernels in sets}
    searches["sampler"] = threshold
    for rows in job.sizes.sampled:
        for by, search in searches.items():
            row = job.row("top-p threshold", f"{rows} x {job.config.vocab_size:,}", by)
            yield Task(row, partial(_threshold_row, job, search, rows))


def _threshold_row(
    job: PartJob, search: Callable[..., jax.Array] | None, rows: int, row: Row
) -> Iterator[Row]:
    """Measure one search, compared with the sampler's own."""
    if search is None:
        yield row.noted("the sampler's own search serves this set")
        return
    scaled = _random_logits(rows, job.config.vocab_size)
    top_k, top_p = jnp.full((rows,), _TOP_K, jnp.int32), jnp.full((rows,), _TOP_P, jnp.float32)
    error = None
    if search is not threshold:
        thresholds = jax.jit(search)(scaled, top_k, top_p)
        error = float(distance(thresholds, threshold(scaled, top_k, top_p)))

    def time(floor_s: float) -> list[float]:
        return timed(
            lambda p, inputs: _chained(p, search(inputs[0], inputs[1], p)),
            top_p,
            [(scaled, top_k)],
            floor_s=floor_s,
            sample_s=job.sizes.sample_s,
        )

    yield measured(job, row, moved=scaled.nbytes, error=error, itemsize=4, time=time)


def _chained(x: jax.Array, y: jax.Array) -> jax.Array:
    """x with a dependency on y: a number too small to change x is added.

    The barrier keeps XLA from computing only the used part of y.
    """
    tiny = jax.lax.optimization_barrier(y).ravel()[0].astype(jnp.float32) * 1e-30
    return x + tiny.astype(x.dtype)


def _random_logits(rows: int, vocab: int) -> jax.Array:
    """Random logits, float32 [rows, vocab]; the largest of each row is 0."""
    logits = jax.random.normal(jax.random.key(3), (rows, vocab), jnp.float32)
    return logits - jnp.max(logits, axis=-1, keepdims=True)
