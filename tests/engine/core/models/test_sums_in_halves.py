"""Products whose results are summed over devices, in two halves of their outputs: the same
numbers, and a sum for each half."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jitney.engine.core.models.layers import Linear
from jitney.engine.core.models.quantization import quantise
from jitney.engine.core.models.sharding import TENSOR, make_mesh
from jitney.kernels.select import reference

KERNELS = replace(reference(), sums_in_halves=True)


def layer(outputs: int, scheme: str) -> Linear:
    made = Linear(32, outputs, bias=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(3), summed=True)
    made.set_matrix(quantise(made.kernel[...], scheme=scheme, dtype=jnp.bfloat16))
    return made


def program(made: Linear, rows: int, *, halves: bool) -> tuple[np.ndarray, int]:
    """The layer on one device, as a step of several runs it, and how many sums it takes."""
    graph, state = nnx.split(made)
    kernels = replace(KERNELS, sums_in_halves=halves)
    x = jnp.asarray(np.random.default_rng(rows).standard_normal((rows, 32)), jnp.bfloat16)
    step = jax.shard_map(
        lambda state, x: nnx.merge(graph, state)(x, kernels),
        mesh=make_mesh(jax.devices()[:1]),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    sums = str(jax.make_jaxpr(step)(state, x)).count(f"axes=('{TENSOR.name}',)")
    return np.asarray(jax.jit(step)(state, x)), sums


@pytest.mark.parametrize(
    ("outputs", "scheme", "rows", "sums"),
    [
        *((512, scheme, 256, 2) for scheme in ("plain", "int8", "fp8")),
        # Few rows, odd halves and int4 stay whole.
        (512, "plain", 255, 1),
        (384, "plain", 256, 1),
        (512, "int4", 256, 1),
    ],
)
def test_halves_are_the_whole(outputs: int, scheme: str, rows: int, sums: int):
    made = layer(outputs, scheme)
    whole, one = program(made, rows, halves=False)
    halves, found = program(made, rows, halves=True)
    assert (one, found) == (1, sums)
    assert (whole == halves).all()
