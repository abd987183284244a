"""Paged attention by the ragged kernel that jax itself ships for TPUs, behind
`jitney.kernels.interface`.

The kernel set "pallas-jax": to compare with, and to fall back on by name. Keys and values are
scattered into the pool by XLA, which does it in place, then
`jax.experimental.pallas.ops.tpu.ragged_paged_attention` reads the pages.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from jitney.kernels.interface import AttentionMeta
from jitney.kernels.reference import write_kv
from jitney.kernels.scales import limit_of

#: A row of the pool fills whole vector registers: their width in numbers.
LANES = 128
#: Keys and query rows of a block, and the VMEM the kernel may take (half of what the smallest of
#: v5e, v6e, v7x has).
KEYS, QUERIES, VMEM = 256, 32, 32 << 20


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv: jax.Array,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: jax.Array | None = None,
    kv_scales: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `jitney.kernels.interface.PagedAttention`; rows of padding are undefined. Raises
    ValueError for sinks and quantised pools, which the kernel cannot do."""
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, kv.shape[3] - x.shape[2]))) for x in (k, v))
    kv = write_kv(kv, k, v, meta.write_rows, kv_scales)
    return attend(
        q, kv, meta, scale=scale, window=window, softcap=softcap, sinks=sinks, kv_scales=kv_scales
    ), kv


def attend(
    q: jax.Array,
    kv: jax.Array,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: jax.Array | None = None,
    kv_scales: jax.Array | None = None,
) -> jax.Array:
    """See `jitney.kernels.interface.Attend`. A pool whose rows are no multiple of 128 numbers is
    copied each time.
    """
    if sinks is not None or limit_of(kv):
        raise ValueError(
            "kernels pallas-jax have no "
            f"{'sinks' if sinks is not None else f'pools of {kv.dtype}'}; "
            "choose kernels pallas"
        )
    width = -(-kv.shape[3] // LANES) * LANES
    wide = jnp.pad(q, ((0, 0), (0, 0), (0, width - q.shape[2])))
    pool = jnp.pad(kv, ((0, 0), (0, 0), (0, 0), (0, width - kv.shape[3])))
    kv_lens, cu_q, n_seqs = never_empty(meta)
    o = ragged_paged_attention(
        wide,
        pool,
        kv_lens,
        meta.page_table,
        cu_q,
        n_seqs,
        sm_scale=scale,
        sliding_window=window or None,
        soft_cap=softcap or None,
        num_kv_pages_per_block=max(1, min(KEYS // kv.shape[1], meta.page_table.shape[1])),
        num_queries_per_block=min(QUERIES, q.shape[0]),
        vmem_limit_bytes=VMEM,
    )
    return o[:, :, : q.shape[2]]


def never_empty(meta: AttentionMeta) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(kv_lens [S], cu_q [S+1], sequences [1]) of a batch with at least one sequence of one row and
    one key.

    The kernel starts to copy sequence 0's first pages before it asks whether there is one, and then
    never waits.
    """
    n_seqs = meta.counts[1:2]
    empty = (n_seqs == 0).astype(jnp.int32)
    first = jnp.arange(meta.kv_lens.shape[0]) == 0
    later = jnp.arange(meta.cu_q.shape[0]) > 0
    return meta.kv_lens + empty * first, meta.cu_q + empty * later, n_seqs + empty


def pool_shape(
    n_pages: int, page_size: int, n_kv_heads: int, head_dim: int, dtype: Any
) -> tuple[int, int, int, int]:
    """See `jitney.kernels.interface.PoolShape`: the interface's layout with rows padded to whole
    registers.
    """
    return n_pages, page_size, 2 * n_kv_heads, -(-head_dim // LANES) * LANES
