"""Random ragged batches, and attention over them by definition in numpy; shared by the tests of all
kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jitney.kernels.attention_cases import AttentionCase as Case
from jitney.kernels.interface import AttentionMeta

QUANTISED = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


@dataclass
class Batch:
    """A case's arrays (numpy, except meta) and the numbers of its real rows and sequences."""

    q: Any
    k: Any
    v: Any
    kv: Any
    meta: AttentionMeta
    n_rows: int
    n_seqs: int
    options: dict[str, Any]


def make(case: Case, seed: int = 7) -> Batch:
    """The batch of a case: random numbers, pages of each sequence scattered over the pool, padding
    at the end.
    """
    rng = np.random.default_rng(seed)
    n_heads, n_kv, dim = case.heads
    lens, counts = case.lens, case.counts
    seqs, rows = case.seqs or len(lens), case.rows or sum(counts)
    kv_lens, cu_q = np.zeros(seqs, np.int32), np.zeros(seqs + 1, np.int32)
    kv_lens[: len(lens)] = lens
    cu_q[1 : len(lens) + 1] = np.cumsum(counts)
    cu_q[len(lens) + 1 :] = sum(counts)
    table = np.zeros((seqs, case.pages), np.int32)
    free = iter(rng.permutation(case.n_pages - 1) + 1)
    positions, write_rows = (
        np.zeros(rows, np.int32),
        np.full(rows, case.n_pages * case.page, np.int32),
    )
    for s, (length, count) in enumerate(zip(lens, counts, strict=True)):
        used = -(-length // case.page)
        table[s, :used] = [next(free) for _ in range(used)]
        if (
            case.window
        ):  # pages outside all windows may belong to other sequences: the table has the trash page
            table[s, : max(0, length - count - case.window + 1) // case.page] = 0
        at = np.arange(length - count, length)
        positions[cu_q[s] : cu_q[s + 1]] = at
        write_rows[cu_q[s] : cu_q[s + 1]] = table[s, at // case.page] * case.page + at % case.page
    totals = np.array([len(case.decode), len(lens), sum(counts)], np.int32)
    uploaded = (kv_lens, cu_q, table, write_rows, positions, totals)
    arrays: list[Any] = [jnp.asarray(array) for array in uploaded]
    meta = AttentionMeta(*arrays)
    q, k, v = (
        rng.standard_normal((rows, n, dim), np.float32).astype(case.dtype)
        for n in (n_heads, n_kv, n_kv)
    )
    planes = 1 if case.value_dim else 2
    kv = rng.standard_normal((case.n_pages, case.page, planes * n_kv, dim), np.float32)
    options: dict[str, Any] = {"scale": dim**-0.5, "window": case.window, "softcap": case.softcap}
    if case.value_dim:
        options["value_dim"] = case.value_dim
    if case.sinks:  # every second sink outweighs all keys together, the others no key
        own = 6 + rng.random(n_heads, np.float32)
        options["sinks"] = np.where(np.arange(n_heads) % 2, own, own - 9).astype(np.float32)
    if case.pool in QUANTISED:
        limit, shape = QUANTISED[case.pool], (2 * n_kv,) if case.scales == "head" else ()
        factors = np.float32(2.0) ** rng.integers(-3, 2, shape) / (1 << int(np.log2(limit / 4)))
        options["kv_scales"] = factors.astype(np.float32)
        kv *= limit / 8
        if case.pool != "int8":
            k, v = (
                exact(x, case.pool, options["kv_scales"], i, n_kv) for i, x in enumerate((k, v))
            )
    return Batch(
        q,
        k,
        None if case.value_dim else v,
        np.asarray(jnp.asarray(kv).astype(case.pool)),
        meta,
        sum(counts),
        len(lens),
        options,
    )


def exact(new: np.ndarray, pool: str, scales: np.ndarray, which: int, n_kv: int) -> np.ndarray:
    """new [T, K, D] changed to numbers that an fp8 pool holds exactly: Triton's interpreter rounds
    7.99 to 4.
    """
    factors = np.broadcast_to(scales, (2 * n_kv,))[which::2, None]
    fitting = np.clip(new / factors, -QUANTISED[pool], QUANTISED[pool])
    return (np.asarray(jnp.asarray(fitting).astype(pool)).astype(np.float32) * factors).astype(
        new.dtype
    )


def written(batch: Batch) -> np.ndarray:
    """The pool after the step's keys and values are written."""
    kv, limit = batch.kv.reshape(-1, *batch.kv.shape[2:]).copy(), QUANTISED.get(batch.kv.dtype.name)
    new = batch.k
    if batch.v is not None:
        new = np.stack([batch.k, batch.v], 2).reshape(len(batch.k), -1, batch.k.shape[2])
    new = new[: batch.n_rows]
    if limit:
        factors = np.broadcast_to(batch.options["kv_scales"], (kv.shape[1],))[:, None]
        new = np.clip(new.astype(np.float32) / factors, -limit, limit)
        new = np.floor(new + np.float32(0.5)) if kv.dtype == np.int8 else new
    kv[np.asarray(batch.meta.write_rows)[: batch.n_rows]] = new.astype(kv.dtype)
    return kv.reshape(batch.kv.shape)


def attention(batch: Batch, kv: np.ndarray) -> np.ndarray:
    """softmax(q k) v over each row's visible keys, one sequence and one head at a time, in float64
    -> [rows, H, D].
    """
    options = batch.options
    size_out = options.get("value_dim", 0)
    if size_out:  # keys serve as values
        kv = np.repeat(kv, 2, axis=2)
    wide = kv.astype(np.float64)
    if "kv_scales" in options:
        wide *= np.broadcast_to(options["kv_scales"], (kv.shape[2],)).astype(np.float64)[:, None]
    q = batch.q[: batch.n_rows].astype(np.float64)
    out = np.zeros_like(q)
    group = q.shape[1] // (kv.shape[2] // 2)
    cu_q, table = np.asarray(batch.meta.cu_q), np.asarray(batch.meta.page_table)
    for s, length in enumerate(np.asarray(batch.meta.kv_lens)[: batch.n_seqs]):
        rows = slice(cu_q[s], cu_q[s + 1])
        cells = wide[table[s]].reshape(-1, *kv.shape[2:])[:length]
        seen = visible(length, cu_q[s + 1] - cu_q[s], options["window"])
        for h in range(q.shape[1]):
            scores = capped(
                q[rows, h] @ cells[:, 2 * (h // group)].T * options["scale"], options["softcap"]
            )
            top = np.where(seen, scores, -np.inf).max(1, keepdims=True)
            p = np.where(seen, np.exp(scores - top), 0)
            if "sinks" in options:
                p = np.hstack([p, np.exp(options["sinks"][h] - top)])
            p = p / p.sum(1, keepdims=True)
            out[rows, h] = p[:, :length] @ cells[:, 2 * (h // group) + 1]
    return out[..., :size_out] if size_out else out


def visible(length: int, count: int, window: int) -> np.ndarray:
    """bool [count, length]: whether each of a sequence's last `count` rows sees each key."""
    at, key_at = length - count + np.arange(count)[:, None], np.arange(length)[None]
    return (key_at <= at) & ((key_at > at - window) if window else True)


def capped(scores: np.ndarray, softcap: float) -> np.ndarray:
    return softcap * np.tanh(scores / softcap) if softcap else scores
