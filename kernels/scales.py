"""Scales of int8 and fp8 KV pools: one per key head and per value head, or one for the pool.

A stored number times its scale is the key or value. Axes as in `jitney.kernels.interface`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

#: Largest magnitude of each quantised dtype; pools of other dtypes have no scales.
_LIMITS = {
    jnp.dtype(jnp.int8): 127.0,
    jnp.dtype(jnp.float8_e4m3fn): 448.0,
    jnp.dtype(jnp.float8_e5m2): 57344.0,
}


def limit_of(dtype: DTypeLike) -> float:
    """The largest magnitude in a quantised pool of this dtype; 0 for a pool of plain floats."""
    return _LIMITS.get(jnp.dtype(dtype), 0.0)


def scales_of(kv: jax.Array, kv_scales: jax.Array | None) -> jax.Array | None:
    """kv_scales as float32 [2K] (row 2h key head h, row 2h + 1 value head h) from [2K] or []; None
    for plain floats.

    Raises ValueError if scales are missing, of a wrong shape, or given for plain floats.
    """
    if not limit_of(kv.dtype):
        if kv_scales is not None:
            raise ValueError(f"kv_scales are for int8 and fp8 pools; this one holds {kv.dtype}")
        return None
    if kv_scales is None:
        raise ValueError(f"a pool of {kv.dtype} needs kv_scales")
    if kv_scales.shape not in ((), (kv.shape[2],)):
        raise ValueError(
            f"kv_scales has shape {kv_scales.shape}; this pool takes () or ({kv.shape[2]},)"
        )
    return jnp.broadcast_to(kv_scales.astype(jnp.float32), (kv.shape[2],))


def as_stored(new: jax.Array, kv: jax.Array, scales: jax.Array | None) -> jax.Array:
    """new [T, 2K, D] in the pool's dtype: divided by its scale, clipped, int8 rounded half up;
    non-finite numbers become 0.
    """
    if scales is not None:
        limit = limit_of(kv.dtype)
        wide = new.astype(jnp.float32)
        new = jnp.clip(jnp.where(jnp.isfinite(wide), wide, 0.0) / scales[:, None], -limit, limit)
        return (jnp.floor(new + 0.5) if kv.dtype == jnp.int8 else new).astype(kv.dtype)
    new = new.astype(kv.dtype)
    return jnp.where(jnp.isfinite(new), new, 0)
