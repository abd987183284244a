"""RMS norms on the CPU: each row by itself, added up in one order in every number of rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jitney.kernels import reference
from jitney.kernels.cpu import library

#: Elements that every library takes at once.
_LANES = 16


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x [..., E] / rms(x) * weight [E] -> x's dtype; bfloat16 or float32, E a multiple of 16, else
    the reference's. A float32 weight of bfloat16 rows: in float32, rounded once.
    """
    size = x.shape[-1]
    if x.dtype == jnp.bfloat16 and weight.dtype == jnp.float32:
        return rms_norm(x.astype(jnp.float32), weight, eps).astype(x.dtype)
    if size % _LANES or x.dtype != weight.dtype or x.dtype not in (jnp.bfloat16, jnp.float32):
        return reference.rms_norm(x, weight, eps)
    rows = x.reshape(-1, size)
    call = jax.ffi.ffi_call(
        library.load().target("rms_norm"), jax.ShapeDtypeStruct(rows.shape, x.dtype)
    )
    return call(rows, weight, eps=np.float32(eps)).reshape(x.shape)
