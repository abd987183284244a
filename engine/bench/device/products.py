"""Products with weights as they may be packed, and the search for a top-k or top-p threshold:
checked, then timed.

Bytes: weights with their scales, rows and results once. Operations: two per weight and row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from msgspec.structs import replace

from jitney.engine.bench.device.kernels import WRONG, wrong
from jitney.engine.bench.device.rows import PartJob, Row, Task, Tasks
from jitney.engine.bench.device.timing import chained, copies_for, distance, timed
from jitney.engine.executor.sampling import threshold
from jitney.engine.models.quantization import SCHEMES, Packed, product, quantise, widened
from jitney.kernels.interface import KernelSet

#: Share of the probability and number of tokens that the timed search keeps: nucleus sampling over
#: a flat tail, which no short list of candidates decides.
_TOP_P, _TOP_K = 0.95, 0


def products(job: PartJob, sets: Sequence[KernelSet], dtype: Any) -> Tasks:
    """The two large matrices of a layer, for few rows: every way to keep weights."""
    config = job.config
    shapes = {
        "gate_up": (config.hidden_size, 2 * config.intermediate_size),
        "down": (config.intermediate_size, config.hidden_size),
    }
    for rows in job.sizes.product_rows:
        for scheme in SCHEMES:
            for name, shape in shapes.items():
                for kernels in sets:
                    case = f"{name} {shape[0]} x {shape[1]}, {rows} rows"
                    yield Task(
                        f"{scheme} product",
                        case,
                        kernels.label,
                        partial(_product_row, job, kernels, dtype, scheme, case, shape, rows),
                    )


def _product_row(
    job: PartJob,
    kernels: KernelSet,
    dtype: Any,
    scheme: str,
    case: str,
    shape: tuple[int, int],
    rows: int,
) -> Iterator[Row]:
    """One product with random weights, checked against float32."""
    weights = _make_weights(scheme, shape, dtype, 0)
    x = jax.random.normal(jax.random.key(9), (rows, shape[0]), dtype)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    moved = held + x.nbytes + 4 * rows * shape[1]
    floor_s, bound = job.measured.of(moved, 2.0 * rows * shape[0] * shape[1])
    exact = jnp.matmul(x.astype(jnp.float32), widened(weights), precision="highest")
    error = float(distance(jax.jit(lambda x, w: product(x, w, kernels))(x, weights), exact))
    row = Row(
        part=job.part,
        name=f"{scheme} product",
        case=case,
        by=kernels.label,
        floor_s=floor_s,
        bound=bound,
        error=error,
    )
    if not error < WRONG[jnp.dtype(dtype).itemsize]:
        yield wrong(row)
        return
    copies = [
        weights,
        *(_make_weights(scheme, shape, dtype, seed) for seed in range(1, copies_for(job, moved))),
    ]
    timing = timed(
        lambda x, w: chained(x, product(x, w, kernels)),
        x,
        copies,
        floor_s=floor_s,
        sample_s=job.sizes.sample_s,
    )
    yield replace(row, **timing)


def _make_weights(scheme: str, shape: tuple[int, int], dtype: Any, seed: int) -> Packed:
    """Random weights [I, O] of spread 1 / sqrt(I)."""
    return quantise(
        jax.random.normal(jax.random.key(seed), shape) / shape[0] ** 0.5, scheme=scheme, dtype=dtype
    )


def thresholds(job: PartJob, sets: Sequence[KernelSet], dtype: Any) -> Tasks:
    """Where nucleus sampling cuts, over the whole vocabulary: the set's kernel beside the sampler's
    own search.
    """
    for rows in job.sizes.sampled:
        case = f"{rows} x {job.config.vocab_size:,}"
        for kernels in sets:
            yield Task(
                "top-p threshold",
                case,
                kernels.label,
                partial(_threshold_row, job, kernels, rows, case),
            )
        yield Task(
            "top-p threshold", case, "sampler", partial(_threshold_row, job, None, rows, case)
        )


def _threshold_row(job: PartJob, kernels: KernelSet | None, rows: int, case: str) -> Iterator[Row]:
    """One search; kernels None: the sampler's own, which the others are checked against."""
    name, by = "top-p threshold", kernels.label if kernels else "sampler"
    search = kernels.threshold if kernels else threshold
    if search is None:
        yield Row(
            part=job.part,
            name=name,
            case=case,
            by=by,
            note="the sampler's own search serves this set",
        )
        return
    scaled = jax.random.normal(jax.random.key(3), (rows, job.config.vocab_size), jnp.float32)
    scaled -= jnp.max(scaled, axis=-1, keepdims=True)
    top_k, top_p = jnp.full((rows,), _TOP_K, jnp.int32), jnp.full((rows,), _TOP_P, jnp.float32)
    floor_s, bound = job.measured.of(scaled.nbytes)
    error = (
        float(distance(jax.jit(search)(scaled, top_k, top_p), threshold(scaled, top_k, top_p)))
        if kernels
        else None
    )
    row = Row(part=job.part, name=name, case=case, by=by, floor_s=floor_s, bound=bound, error=error)
    if error is not None and not error < WRONG[4]:
        yield wrong(row)
        return
    timing = timed(
        lambda p, given: chained(p, search(given[0], given[1], p)),
        top_p,
        [(scaled, top_k)],
        floor_s=floor_s,
        sample_s=job.sizes.sample_s,
    )
    yield replace(row, **timing)
