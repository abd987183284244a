"""Paged attention for CPUs: what `native/attention.cc` serves, and what is the reference's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jitney.kernels import reference
from jitney.kernels.cpu import library
from jitney.kernels.interface import AttentionMeta

#: Numbers of a vector; a head is whole ones.
_LANES = 16
#: Of queries and pools.
_DTYPES = (jnp.bfloat16, jnp.float32)


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
    """See `jitney.kernels.interface.Attend`; padding rows are zero.

    q and pool of one dtype, bfloat16 or float32, and D a multiple of 16; the rest is the
    reference's.
    """
    plain = q.dtype == kv.dtype and q.dtype in _DTYPES
    if not plain or q.shape[2] % _LANES:
        return reference.attend(
            q, kv, meta, scale=scale, window=window, softcap=softcap, kv_scales=kv_scales
        )
    target = library.load().target("attention")
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call(
        q,
        kv,
        meta.kv_lens,
        meta.cu_q,
        meta.page_table,
        meta.counts,
        scale=np.float32(scale),
        softcap=np.float32(softcap),
        window=np.int64(window),
    )
