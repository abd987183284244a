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


@pytest.mark.parametrize("scheme", ["plain", "int8", "fp8"])
def test_halves_are_the_whole(scheme: str):
    made = layer(512, scheme)
    whole, one = program(made, 256, halves=False)
    halves, two = program(made, 256, halves=True)
    assert (one, two) == (1, 2)
    assert (whole == halves).all()


@pytest.mark.parametrize(
    "outputs,scheme,rows", [(512, "plain", 255), (384, "plain", 256), (512, "int4", 256)]
)
def test_few_rows_odd_halves_and_int4_stay_whole(outputs: int, scheme: str, rows: int):
    made = layer(outputs, scheme)
    whole, _ = program(made, rows, halves=False)
    halves, sums = program(made, rows, halves=True)
    assert sums == 1
    assert (whole == halves).all()
