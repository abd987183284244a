"""Paged attention against numpy, one sequence and one head at a time, on ragged batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jitney.kernels.interface import AttentionMeta
from jitney.kernels.reference import paged_attention, write_kv
from jitney.kernels.select import KernelError, select

N_PAGES = 400


def numpy_attention(q, kv, kv_lens, cu_q, table, scale, window, softcap):
    """The definition: softmax(q k / sqrt) v over each row's visible keys."""
    out = np.zeros_like(q)
    n_heads, n_kv = q.shape[1], kv.shape[2] // 2
    for s, length in enumerate(kv_lens):
        rows = kv[table[s]].reshape(-1, *kv.shape[2:])[:length]
        count = cu_q[s + 1] - cu_q[s]
        at, key_at = length - count + np.arange(count)[:, None], np.arange(length)[None]
        seen = (key_at <= at) & ((key_at > at - window) if window else True)
        for h in range(n_heads):
            key, value = rows[:, 2 * (h // (n_heads // n_kv))], rows[:, 2 * (h // (n_heads // n_kv)) + 1]
            scores = q[cu_q[s] : cu_q[s + 1], h] @ key.T * scale
            scores = softcap * np.tanh(scores / softcap) if softcap else scores
            p = np.where(seen, np.exp(scores - scores.max(1, keepdims=True)), 0)
            out[cu_q[s] : cu_q[s + 1], h] = p / p.sum(1, keepdims=True) @ value
    return out


def ragged_batch(rng, heads, page, pages_per_seq, decode, prefill, rows, seqs):
    """(q, k, v, kv, meta, real rows): decode is context lengths, prefill (context, new rows) pairs."""
    n_heads, n_kv, dim = heads
    lens = [*decode, *(length for length, _ in prefill)]
    counts = [1] * len(decode) + [count for _, count in prefill]
    kv_lens, cu_q = np.zeros(seqs, np.int32), np.zeros(seqs + 1, np.int32)
    kv_lens[: len(lens)] = lens
    cu_q[1 : len(lens) + 1] = np.cumsum(counts)
    cu_q[len(lens) + 1 :] = sum(counts)
    table = np.zeros((seqs, pages_per_seq), np.int32)
    free = iter(rng.permutation(N_PAGES - 1) + 1)
    positions, write_rows = np.zeros(rows, np.int32), np.full(rows, N_PAGES * page, np.int32)
    for s, (length, count) in enumerate(zip(lens, counts, strict=True)):
        used = -(-length // page)
        table[s, :used] = [next(free) for _ in range(used)]
        at = np.arange(length - count, length)
        positions[cu_q[s] : cu_q[s + 1]] = at
        write_rows[cu_q[s] : cu_q[s + 1]] = table[s, at // page] * page + at % page
    counts3 = np.array([len(decode), len(lens), sum(counts)], np.int32)
    meta = AttentionMeta(*map(jnp.asarray, (kv_lens, cu_q, table, write_rows, positions, counts3)))
    q, k, v = (rng.standard_normal((rows, n, dim), np.float32) for n in (n_heads, n_kv, n_kv))
    kv = rng.standard_normal((N_PAGES, page, 2 * n_kv, dim), np.float32)
    return q, k, v, kv, meta, sum(counts)


CASES = {
    "decode, three query heads a key head": ((9, 3, 64), 16, 32, [5, 100, 200, 33], [], 4, 4),
    "decode, absent sequences": ((4, 4, 32), 8, 64, [1, 250], [], 8, 8),
    "prefill alone": ((8, 2, 32), 16, 32, [], [(70, 70), (17, 17), (1, 1)], 256, 8),
    "mixed, chunks in the middle of prompts": ((8, 2, 32), 16, 32, [5, 300], [(300, 140), (17, 3), (9, 1)], 256, 8),
    "group of seven, page table not a power of two": ((14, 2, 64), 16, 30, [77], [(170, 40)], 64, 4),
}


@pytest.mark.parametrize("window,softcap", [(0, 0.0), (24, 0.0), (0, 5.0)])
@pytest.mark.parametrize("case", CASES)
def test_matches_numpy(case, window, softcap):
    rng = np.random.default_rng(7)
    q, k, v, kv, meta, real = ragged_batch(rng, *CASES[case])
    scale = q.shape[-1] ** -0.5
    o, after = jax.jit(lambda *args: paged_attention(*args, scale=scale, window=window, softcap=softcap))(
        q, k, v, kv, meta)
    expected_kv = kv.reshape(-1, *kv.shape[2:]).copy()
    rows = np.asarray(meta.write_rows)[:real]
    expected_kv[rows, 0::2], expected_kv[rows, 1::2] = k[:real], v[:real]
    expected_kv = expected_kv.reshape(kv.shape)
    np.testing.assert_array_equal(after, expected_kv)  # padding wrote nowhere
    seqs = int(meta.counts[1])
    expected = numpy_attention(q, expected_kv, np.asarray(meta.kv_lens)[:seqs], np.asarray(meta.cu_q),
                               np.asarray(meta.page_table), scale, window, softcap)
    np.testing.assert_allclose(np.asarray(o)[:real], expected[:real], atol=3e-6)


def test_a_row_that_is_not_finite_stays_out_of_the_pool():
    kv = jnp.ones((4, 8, 2, 16))
    k = jnp.full((3, 1, 16), jnp.nan)
    v = jnp.full((3, 1, 16), jnp.inf)
    after = np.asarray(write_kv(kv, k, v, jnp.array([8, 9, 32], jnp.int32))).reshape(32, 2, 16)
    assert np.isfinite(after).all()
    assert (after[8:10] == 0).all()
    assert (np.delete(after, [8, 9], axis=0) == 1).all()


def test_the_pool_is_updated_in_place_when_donated():
    q, k, v, kv, meta, _ = ragged_batch(np.random.default_rng(0), *CASES["decode, absent sequences"])
    step = jax.jit(lambda kv, q, k, v, meta: paged_attention(q, k, v, kv, meta, scale=1.0), donate_argnums=0)
    memory = step.lower(kv, q, k, v, meta).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == kv.nbytes
    assert memory.temp_size_in_bytes < kv.nbytes // 2  # no second pool


def test_unknown_kernels_are_refused_by_name():
    assert select("cpu").name == "reference"
    with pytest.raises(KernelError, match=r"unknown kernels 'flash'; known: auto, reference"):
        select("cpu", "flash")
