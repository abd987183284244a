"""Paged attention in jax.numpy against numpy, one sequence and one head at a time, on ragged
batches.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged import Case, attention, make, written

from jitney.kernels import definitions
from jitney.kernels.interface import KernelError
from jitney.kernels.reference import (
    gated,
    gated_narrow,
    paged_attention,
    rotate_and_write,
    write_kv,
)
from jitney.kernels.select import select

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

CASES = {
    "decode, three query heads a key head": Case((9, 3, 64), (5, 100, 200, 33)),
    "decode, absent sequences": Case((4, 4, 32), (1, 250), rows=8, seqs=8, page=8, pages=64),
    "prefill alone": Case((8, 2, 32), (), ((70, 70), (17, 17), (1, 1)), rows=256, seqs=8),
    "mixed, chunks in the middle of prompts": Case(
        (8, 2, 32), (5, 300), ((300, 140), (17, 3), (9, 1)), rows=256, seqs=8
    ),
    "group of seven, page table not a power of two": Case(
        (14, 2, 64), (77,), ((170, 40),), rows=64, seqs=4, pages=30
    ),
}
OPTIONS = {
    "plain": {},
    "window, softcap": {"window": 24, "softcap": 5.0},
    "sinks, window": {"sinks": True, "window": 24},
    "int8": {"pool": "int8"},
    "fp8": {"pool": "float8_e4m3fn", "scales": "pool"},
}
TRIED = [(case, "plain") for case in CASES] + [
    (case, option)
    for case in ("decode, absent sequences", "mixed, chunks in the middle of prompts")
    for option in ("window, softcap", "sinks, window", "int8", "fp8")
]


@pytest.mark.parametrize("case,options", TRIED)
def test_matches_numpy(case: str, options: str):
    batch = make(replace(CASES[case], **OPTIONS[options]))
    o, after = jax.jit(lambda *args: paged_attention(*args, **batch.options))(
        batch.q, batch.k, batch.v, batch.kv, batch.meta
    )
    expected = written(batch)
    np.testing.assert_array_equal(after, expected)  # padding wrote nowhere
    np.testing.assert_allclose(np.asarray(o)[: batch.n_rows], attention(batch, expected), atol=4e-6)


def test_a_row_that_is_not_finite_stays_out_of_the_pool():
    kv = jnp.ones((4, 8, 2, 16))
    k = jnp.full((3, 1, 16), jnp.nan)
    v = jnp.full((3, 1, 16), jnp.inf)
    after = np.asarray(write_kv(kv, k, v, jnp.array([8, 9, 32], jnp.int32))).reshape(32, 2, 16)
    assert np.isfinite(after).all()
    assert (after[8:10] == 0).all()
    assert (np.delete(after, [8, 9], axis=0) == 1).all()


def test_rotating_and_writing_in_one_call_is_both_in_turn():
    batch = make(CASES["mixed, chunks in the middle of prompts"])
    angles = (
        np.random.default_rng(0)
        .uniform(0, 7, (len(batch.q), 1, batch.q.shape[2] // 2))
        .astype(np.float32)
    )

    def turned(x: np.ndarray) -> np.ndarray:
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate(
            [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
        )

    heads = np.concatenate([batch.q, batch.k, batch.v], axis=1)
    q, after = rotate_and_write(
        jnp.asarray(heads), (jnp.cos(angles), jnp.sin(angles)), jnp.asarray(batch.kv), batch.meta
    )
    np.testing.assert_allclose(q, turned(batch.q), atol=1e-5)
    np.testing.assert_allclose(after, written(replace(batch, k=turned(batch.k))), atol=1e-5)


@pytest.mark.parametrize(
    "pool,scales,message",
    [
        ("int8", None, "a pool of int8 needs kv_scales"),
        ("float32", np.ones(()), "kv_scales are for int8 and fp8 pools; this one holds float32"),
        ("int8", np.ones((3,)), r"kv_scales has shape \(3,\); this pool takes \(\) or \(4,\)"),
    ],
)
def test_scales_must_fit_the_pool(pool: str, scales: np.ndarray | None, message: str):
    batch = make(replace(CASES["prefill alone"], pool=pool))
    factors = None if scales is None else jnp.asarray(scales)
    with pytest.raises(ValueError, match=message):
        paged_attention(
            batch.q, batch.k, batch.v, batch.kv, batch.meta, scale=1.0, kv_scales=factors
        )


def test_the_pool_is_updated_in_place_when_donated():
    batch = make(replace(CASES["decode, absent sequences"], spare=400))
    step = jax.jit(
        lambda kv, q, k, v, meta: paged_attention(q, k, v, kv, meta, scale=1.0), donate_argnums=0
    )
    memory = step.lower(batch.kv, batch.q, batch.k, batch.v, batch.meta).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == batch.kv.nbytes
    assert memory.temp_size_in_bytes < batch.kv.nbytes // 2  # no second pool


def test_unknown_kernels_are_refused_by_name():
    assert select("cpu", "reference").name == "reference"
    with pytest.raises(
        KernelError, match=r"unknown kernels 'flash'; known: auto, reference, native, triton"
    ):
        select("cpu", "flash")


def test_narrow_gates_are_the_wide_ones_but_for_their_rounding():
    rng = np.random.default_rng(19)
    x = jnp.asarray(rng.standard_normal((9, 64), np.float32), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((64, 48), np.float32) / 8, jnp.bfloat16)
    exact = definitions.gated(definitions.matmul(np.asarray(x), np.asarray(w)))
    got = np.asarray(gated_narrow(x, w), np.float32)
    assert got.shape == (9, 24)
    # Each gate, what it gates and their product are rounded to 2**-9 of themselves.
    assert np.all(np.abs(got - exact) <= 2**-6 * np.abs(exact) + 1e-3)
    assert np.any(got != np.asarray(gated(x, w), np.float32))
