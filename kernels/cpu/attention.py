"""Paged attention for CPUs: what `native/attention.cc` serves, and what is the reference's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jitney.kernels import reference
from jitney.kernels.cpu import library
from jitney.kernels.interface import AttentionMeta

LANES = 16
DTYPES = (jnp.bfloat16, jnp.float32)


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
    kv_scales: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `jitney.kernels.interface.PagedAttention`."""
    kv = reference.write_kv(kv, k, v, meta.write_rows, kv_scales)
    o = attend(q, kv, meta, scale=scale, window=window, softcap=softcap, kv_scales=kv_scales)
    return o, kv


def attend(
    q: jax.Array,
    kv: jax.Array,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    kv_scales: jax.Array | None = None,
) -> jax.Array:
    """See `jitney.kernels.interface.Attend`: q and pool of one dtype, bfloat16 or float32, D a
    multiple of 16.

    Other shapes, quantised pools and soft caps are the reference's.
    """
    if softcap or q.shape[2] % LANES or q.dtype != kv.dtype or q.dtype not in DTYPES:
        return reference.attend(
            q,
            kv,
            meta,
            scale=scale,
            window=window,
            softcap=softcap,
            kv_scales=kv_scales,
        )
    call = jax.ffi.ffi_call(
        library.load().target("attention"), jax.ShapeDtypeStruct(q.shape, q.dtype)
    )
    return call(
        q,
        kv,
        meta.kv_lens,
        meta.cu_q,
        meta.page_table,
        meta.counts,
        scale=np.float32(scale),
        window=np.int64(window),
    )
