"""Paged attention for CPUs: calls `native/attention.cc` and `native/rotation.cc`, or the reference
for unsupported shapes.
"""

from __future__ import annotations

from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jitney.kernels import reference
from jitney.kernels.cpu import library
from jitney.kernels.cpu.norms import rms_norm
from jitney.kernels.interface import AttentionMeta, AttentionOptions

#: Numbers per vector; heads must be multiples of it.
_LANES = 16
#: Supported dtypes of queries and pools.
_DTYPES = (jnp.bfloat16, jnp.float32)


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    kv: jax.Array,
    meta: AttentionMeta,
    **options: Unpack[AttentionOptions],
) -> tuple[jax.Array, jax.Array]:
    """See `jitney.kernels.interface.Kernels.paged_attention`."""
    kv = reference.write_kv(kv, k, v, meta.write_rows, options.get("kv_scales"))
    return attend(q, kv, meta, **options), kv


def rotate_and_write(
    heads: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    kv: jax.Array,
    meta: AttentionMeta,
    *,
    norms: tuple[jax.Array, jax.Array] | None = None,
    eps: float = 0.0,
    kv_scales: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `jitney.kernels.interface.RotateAndWrite`; norm and rotation each round to heads' dtype.

    Heads and pool must have one dtype, bfloat16 or float32, and D must be a multiple of 32; else
    the reference rotates.
    """
    n_rows, n_all, dim = heads.shape
    n_heads = n_all - kv.shape[2]
    plain = heads.dtype == kv.dtype and heads.dtype in _DTYPES
    if not plain or dim % (2 * _LANES):
        if norms is not None:
            heads = _normed(heads, n_heads, norms, eps)
        return reference.rotate_and_write(heads, rope, kv, meta, kv_scales=kv_scales)
    none = jnp.zeros((0,), heads.dtype)
    target = library.load().target("rotate_and_write")
    shapes = (
        jax.ShapeDtypeStruct((n_rows, n_heads, dim), heads.dtype),
        jax.ShapeDtypeStruct(kv.shape, kv.dtype),
    )
    # The pool is updated in place.
    call = jax.ffi.ffi_call(target, shapes, input_output_aliases={6: 1})
    q, kv = call(heads, *rope, meta.write_rows, *(norms or (none, none)), kv, eps=np.float32(eps))
    return q, kv


def _normed(
    heads: jax.Array, n_heads: int, norms: tuple[jax.Array, jax.Array], eps: float
) -> jax.Array:
    """heads [T, H + 2K, D] with queries and keys normed."""
    n_kv = (heads.shape[1] - n_heads) // 2
    q, k, v = jnp.split(heads, [n_heads, n_heads + n_kv], axis=1)
    return jnp.concatenate([rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps), v], axis=1)


def attend(
    q: jax.Array,
    kv: jax.Array,
    meta: AttentionMeta,
    **options: Unpack[AttentionOptions],
) -> jax.Array:
    """See `jitney.kernels.interface.Kernels.attend`; padding rows are zero.

    q and pool must have one dtype, bfloat16 or float32, and D and value_dim must be multiples of
    16; otherwise the reference attends.
    """
    value_dim, sinks = options.get("value_dim", 0), options.get("sinks")
    plain = q.dtype == kv.dtype and q.dtype in _DTYPES
    if not plain or q.shape[2] % _LANES or value_dim % _LANES:
        return reference.attend(q, kv, meta, **options)
    target = library.load().target("attention")
    shape = (*q.shape[:2], value_dim or q.shape[2])
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(shape, q.dtype))
    return call(
        q,
        kv,
        meta.kv_lens,
        meta.cu_q,
        meta.page_table,
        meta.counts,
        *(() if sinks is None else (sinks,)),
        scale=np.float32(options["scale"]),
        softcap=np.float32(options.get("softcap", 0.0)),
        window=np.int64(options.get("window", 0)),
        value_dim=np.int64(value_dim),
    )
