"""Smoke test of the requirements of all other parts: the compiler, a kernel of the set, and a
repeatedly launched program, as a GPU's graph. It takes seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from msgspec.structs import replace

from jitney.engine.lab.device.rows import PartJob, Row, Task, Tasks
from jitney.kernels.case_proofs import case_proofs
from jitney.kernels.interface import KernelSet

#: Number of chained products, and their rows: XLA makes a graph of five commands or more.
_PRODUCTS, _SIDE = 8, 128
#: The first run records a graph, later ones launch it.
_RUNS = 3
#: Largest distance from numpy in float64, norm over norm: a product may be made in tf32.
_LIMIT = 1e-2


def smoke(job: PartJob, sets: Sequence[KernelSet], dtype: DTypeLike) -> Tasks:
    row = job.row("smoke", "compiler, one kernel, one graph", sets[0].label)
    yield Task(row, partial(_smoke_row, sets[0], jnp.dtype(dtype).name))


def _smoke_row(kernels: KernelSet, dtype: str, row: Row) -> Iterator[Row]:
    """One row: the seconds of each part, and the larger error of kernel and graph."""
    started = time.perf_counter()
    error = _graph_error()
    graph_s = time.perf_counter() - started
    proof = next(case_proofs(kernels, dtype)).prove()
    kernel_s = time.perf_counter() - started - graph_s
    row = replace(
        row.timed([graph_s + kernel_s]),
        error=max(error, proof.error if not proof.reason else 0.0),
        figures={"graph_s": graph_s, "kernel_s": kernel_s},
        note="right",
    )
    if not proof.ok:
        row = row.as_wrong(str(proof))
    elif error > _LIMIT:
        row = row.as_wrong(f"products are off by {error:.3g}, at most {_LIMIT:g} are right")
    yield row


def _graph_error() -> float:
    """Error of a chain of products against numpy's, after several runs of one program."""
    rng = np.random.default_rng(0)
    start, weights = rng.standard_normal((2, _SIDE, _SIDE)) / np.sqrt(_SIDE)

    @jax.jit
    def chain(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(_PRODUCTS):
            x = jnp.tanh(x @ w)
        return x

    expected, result = start, jnp.asarray(start, jnp.float32)
    for _ in range(_RUNS):
        result = chain(result, jnp.asarray(weights, jnp.float32))
        for _ in range(_PRODUCTS):
            expected = np.tanh(expected @ weights)
    return float(np.linalg.norm(np.asarray(result) - expected) / np.linalg.norm(expected))
