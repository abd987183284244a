"""Proof of the choice of a mixture's experts: compares it with the definition for random router
outputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jitney.kernels import definitions
from jitney.kernels.interface import KernelSet
from jitney.kernels.proof_shapes import ServedShapes, distance
from jitney.kernels.routing import Mixture, Route, Routes


def routing_errors(kernels: KernelSet, shapes: ServedShapes) -> Iterator[float]:
    """Errors of the shares in decode steps with the fewest and the most rows; infinite if a row is
    not in the blocks of its experts. Yields nothing without experts.
    """
    mixture = shapes.routing
    if mixture is None or mixture.own < mixture.n_experts:
        return  # no kernel routes to experts that are spread over devices
    rng = np.random.default_rng(9)
    bias = rng.normal(0, 0.1, mixture.n_experts).astype(np.float32) if mixture.choice_bias else None
    factors = rng.uniform(0.5, 2, mixture.n_experts).astype(np.float32)
    for n_rows in dict.fromkeys((shapes.steps.decode[0], shapes.steps.decode[-1])):
        # The router outputs of a row differ enough that rounding changes no choice.
        ranks = rng.permuted(np.tile(np.arange(mixture.n_experts), (n_rows, 1)), axis=1)
        numbers = (8 / mixture.n_experts * ranks - 4).astype(np.float32)
        count = -(-3 * n_rows // 4)
        yield route_error(kernels.route, mixture, numbers, count, bias, factors)


def route_error(
    route: Route,
    mixture: Mixture,
    numbers: np.ndarray,
    count: int,
    bias: np.ndarray | None = None,
    factors: np.ndarray | None = None,
) -> float:
    """The error of the shares of the first `count` rows, with router outputs numbers [T, X or
    more]; infinite if a row is not in the blocks of its experts.
    """
    own = [None if array is None else jnp.asarray(array) for array in (bias, factors)]
    call = jax.jit(lambda numbers, count: route(numbers, mixture, count, 0, *own))
    actual = jax.tree.map(np.asarray, call(numbers, np.int32(count)))
    real = numbers[:count, : mixture.n_experts]
    shares, chosen = definitions.choose_experts(real, mixture, bias, factors)
    if not _stands_right(actual, chosen, len(numbers)):
        return float("inf")
    return distance(actual.shares.T[:count], shares) if count else 0.0


def _stands_right(actual: Routes, chosen: np.ndarray, n_rows: int) -> bool:
    """Whether the blocks of each expert hold exactly its rows, once each, in order."""
    blocks, places = actual.blocks, actual.places
    nowhere = len(blocks.rows)
    standing = places[:, : len(chosen)].T
    if (places[:, len(chosen) :] != nowhere).any() or (standing >= nowhere).any():
        return False
    owners = np.repeat(np.arange(len(chosen)), chosen.shape[1])
    expected = np.full(nowhere, n_rows)
    expected[standing.reshape(-1)] = owners
    used = standing // blocks.size
    in_order = (np.diff(standing[chosen == expert]) > 0 for expert in np.unique(chosen))
    return bool(
        (blocks.rows == expected).all()
        and (blocks.experts[used] == chosen).all()
        and all(map(np.all, in_order))
        and np.array_equal(np.unique(used), np.arange(int(blocks.count)))
    )
