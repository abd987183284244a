"""Places in arrays as large as a device holds them: pools of more than 2**31 elements, 512 seats,
32,768 keys, 65,536 rows, and heads of groups that devices share.

Large arrays take only the memory of the pages that are touched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from places import SUPPORT
from sparse_arrays import TOO_MANY, large_pool

from jitney.engine.core.models.sharding import TENSOR, Shares
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.kernels.interface import AttentionMeta, KernelError
from jitney.kernels.select import select

#: (query heads, KV heads, head dim, layers) of models.
MODELS = {
    "SmolLM2-135M": (9, 3, 64, 30),
    "Qwen2.5-7B": (28, 4, 128, 28),
    "Gemma-2-9B": (16, 8, 256, 42),
    "Gemma-3-1B": (4, 1, 256, 26),
    "Llama-3.1-405B": (128, 8, 128, 126),
}
#: How many of 2, 4, 8 and 16 devices are more than the KV heads that they divide by.
SHARED = {"Gemma-3-1B": 2, "Gemma-2-9B": 1, "Llama-3.1-405B": 1}
#: Bytes.
KV = 80 << 30
SEATS, CONTEXT, PAGE, MOST_ROWS = 512, 32768, 16, 65536


def test_triton_kernels_reach_the_end_of_large_arrays():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "triton_sizes.py")],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    right = json.loads(done.stdout)
    assert len(right) == 11 and all(right.values()), right


def two_sequences(first_page: int) -> AttentionMeta:
    """One that decodes over 40 keys and a prompt of 12 rows, in pages from `first_page` on."""
    table = np.zeros((4, 4), np.int32)
    table[0, :3], table[1, 0] = first_page + np.arange(3), first_page + 3
    return AttentionMeta(
        kv_lens=jnp.array([40, 12, 0, 0], jnp.int32),
        cu_q=jnp.array([0, 1, 13, 13, 13], jnp.int32),
        page_table=jnp.asarray(table),
        write_rows=jnp.zeros(16, jnp.int32),
        positions=jnp.zeros(16, jnp.int32),
        counts=jnp.array([1, 2, 13], jnp.int32),
    )


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_a_cpu_reads_the_end_of_a_large_pool(name: str):
    """The same bits as from a small one; the pool is taken where it lies."""
    rng = np.random.default_rng(1)
    few = rng.standard_normal((4, PAGE, 16, 128), np.float32).astype(ml_dtypes.bfloat16)
    large = large_pool(PAGE, 8, 128, ml_dtypes.bfloat16)
    large[-4:] = few
    assert (len(large) - 4) * few[0].size >= TOO_MANY
    pool = jax.device_put(large, may_alias=True)
    assert pool.unsafe_buffer_pointer() == large.ctypes.data
    q = jnp.asarray(rng.standard_normal((16, 16, 128), np.float32), jnp.bfloat16)
    attend = jax.jit(partial(select("cpu", name).attend, scale=0.09))
    expected = np.asarray(attend(q, jnp.asarray(few), two_sequences(0)))[:13]
    found = np.asarray(attend(q, pool, two_sequences(len(large) - 4)))[:13]
    np.testing.assert_array_equal(found, expected)
    assert expected.any()


class Noting:
    """A launch that notes grids and numbers that are fixed."""

    sm = 90

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.constants: list[Any] = []

    def __call__(self, kernel: Any, *args: Any, out: Any, grid: Any, **constants: Any) -> Any:
        self.grids.append(grid)
        self.constants += [value for value in constants.values() if isinstance(value, int)]
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), out)


def traced(heads: tuple[int, int, int], layers: int, itemsize: int, rows: int) -> Noting:
    """A step's attention with a pool of all of KV, as shapes."""
    from jitney.kernels.triton_gpu.kernel_set import TritonKernels

    n_heads, n_kv, dim = heads
    note = Noting()
    kernels = TritonKernels(note)  # pyright: ignore[reportArgumentType]
    pages = KV // (layers * PAGE * 2 * n_kv * dim * itemsize)
    shapes = (SEATS,), (SEATS + 1,), (SEATS, CONTEXT // PAGE), (rows,), (rows,), (3,)
    meta = AttentionMeta(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))  # pyright: ignore[reportArgumentType]
    fused = jax.ShapeDtypeStruct((rows, n_heads + 2 * n_kv, dim), jnp.bfloat16)
    angles = jax.ShapeDtypeStruct((rows, 1, dim // 2), jnp.float32)
    dtype = {1: jnp.int8, 2: jnp.bfloat16}[itemsize]
    kv = jax.ShapeDtypeStruct((pages, PAGE, 2 * n_kv, dim), dtype)
    factors = jax.ShapeDtypeStruct((2 * n_kv,), jnp.float32)

    def step(fused: Any, angles: Any, kv: Any, meta: Any, factors: Any) -> Any:
        scales = factors if itemsize == 1 else None
        q, kv = kernels.rotate_and_write(fused, (angles, angles), kv, meta, kv_scales=scales)
        return kernels.attend(q, kv, meta, scale=1.0, kv_scales=scales)

    o = jax.eval_shape(step, fused, angles, kv, meta, factors)
    assert o.shape == (rows, n_heads, dim)
    return note


@pytest.mark.parametrize("name", MODELS)
def test_launches_of_real_sizes_are_within_a_gpu_s_limits(name: str):
    """80 GiB of keys and values in bfloat16 and in int8, a decode step of all seats and the widest
    prompt step.
    """
    pytest.importorskip("triton")
    *heads, layers = MODELS[name]
    for itemsize in (1, 2):
        for rows in (SEATS, MOST_ROWS):
            note = traced((heads[0], heads[1], heads[2]), layers, itemsize, rows)
            assert len(note.grids) >= 3
            assert all(max(grid[1:], default=0) <= 65535 and grid[0] < 2**31 for grid in note.grids)
            assert all(number < 2**31 for number in note.constants)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ((256, 1, 16), "66048 blocks, a GPU takes 65535: choose a smaller token_budget"),
        ((128, 64, 256), "65536 x 256 x 256 numbers of a step's rows are 2"),
    ],
)
def test_rows_that_the_kernels_cannot_count_are_refused(heads: tuple[int, int, int], message: str):
    pytest.importorskip("triton")
    with pytest.raises(KernelError, match=message):
        traced(heads, 80, 2, MOST_ROWS)


@pytest.mark.parametrize("name", MODELS)
def test_the_heads_of_a_device_find_their_keys_on_it(name: str):
    """Also where a group of query heads is spread over devices; what would tear one is refused."""
    n_heads, n_kv, dim, _ = MODELS[name]
    config = replace(
        tiny_config(), n_heads=n_heads, n_kv_heads=n_kv, head_dim=dim, intermediate_size=2**14
    )
    torn = 0
    for shards in (2, 4, 8, 16):
        if n_heads % shards or (n_kv % shards and shards % n_kv):
            continue
        torn += shards > n_kv
        shares = Shares(config, AbstractMesh((shards,), (TENSOR.name,)))  # pyright: ignore[reportArgumentType]
        fused = np.repeat(np.arange(n_heads + 2 * n_kv), dim)[None]
        for device in range(shards):
            own = shares.own
            held = shares.cut(("layers", 0, "attention", "qkv", "kernel"), fused, device)[0, ::dim]
            queries, keys, values = np.split(held, [own.n_heads, own.n_heads + own.n_kv_heads])
            wanted = queries // (n_heads // n_kv)
            group = own.n_heads // own.n_kv_heads
            np.testing.assert_array_equal(np.repeat(keys - n_heads, group), wanted)
            np.testing.assert_array_equal(values, keys + n_kv)
    assert torn == SHARED.get(name, 0)
