"""The Pallas product with int4 weights, interpreted on the CPU, against weights written out in
numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from int4_weights import pack_int4

from jitney.kernels.int4 import Int4
from jitney.kernels.pallas_tpu.narrow_products import matmul_int4


def random_weights(
    size_in: int, size_out: int, group: int, *, zeros: bool = True, scales: str = "float16"
) -> Int4:
    rng = np.random.default_rng(size_in + group)
    shape = size_in // group, size_out
    steps = (rng.random(shape, np.float32) + 0.5).astype(jnp.dtype(scales))
    points = rng.integers(0, 17, shape) if zeros else None
    weights = pack_int4(rng.integers(0, 16, (size_in, size_out)), steps, points)
    return jax.tree.map(jnp.asarray, weights)


def error(x: np.ndarray, weights: Int4) -> float:
    """Greatest difference, of the root mean square of the results."""
    wanted = x.astype(np.float32) @ np.asarray(weights.unpacked())
    got = np.asarray(jax.jit(lambda x, w: matmul_int4(x, w, interpret=True))(x, weights))
    assert got.shape == wanted.shape and got.dtype == np.float32
    return float(np.abs(got - wanted).max() / np.sqrt(np.mean(wanted**2)))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("zeros", [False, True])
def test_a_product_of_groups_is_that_of_the_weights_written_out(group: int, zeros: bool):
    weights = random_weights(384, 640, group, zeros=zeros)
    x = np.random.default_rng(3).standard_normal((5, 384), np.float32)
    assert error(x, weights) < 1e-4


@pytest.mark.parametrize("rows", [1, 16, 530])
def test_rows_in_bfloat16_of_any_number(rows: int):
    weights = random_weights(256, 96, 128, scales="bfloat16")
    x = np.random.default_rng(rows).standard_normal((rows, 256), np.float32)
    assert error(x.astype(jnp.bfloat16), weights) < 1e-4


def test_scales_of_float16_keep_every_bit():
    """The smallest ones, too, which a TPU's float32 would take for 0 if their bits were moved."""
    weights = random_weights(128, 128, 128)
    tiny = np.asarray(weights.scales).copy()
    tiny[0, :3] = np.array([5.96e-8, 6.1e-5, 65504.0], np.float16)
    columns = weights._replace(scales=jnp.asarray(tiny))
    x = np.zeros((8, 128), np.float32)
    x[0, 7] = 1.0
    got = np.asarray(matmul_int4(jnp.asarray(x), columns, interpret=True))[0]
    wanted = np.asarray(columns.unpacked())[7]
    np.testing.assert_allclose(got, wanted, rtol=1e-4)


def test_inputs_that_are_no_whole_chunks_are_multiplied_all_the_same():
    weights = random_weights(192, 64, 32, scales="float32")
    x = np.random.default_rng(5).standard_normal((3, 192), np.float32)
    assert error(x, weights) < 1e-4
