"""RMS norms on the CPU. The order of additions in a row does not depend on the number of rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jitney.kernels import reference
from jitney.kernels.cpu import library

#: Elements that every library processes at once.
_LANES = 16
#: Supported dtypes of rows and weights.
_DTYPES = (jnp.bfloat16, jnp.float32)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x [..., E] / rms(x) * weight [E] -> x's dtype, computed in float32 and rounded once. x and
    weight must be bfloat16 or float32, and E a multiple of 16; otherwise the reference computes it.
    """
    if not _served(x, weight):
        return reference.rms_norm(x, weight, eps)
    rows = x.reshape(-1, x.shape[-1])
    call = jax.ffi.ffi_call(
        library.load().target("rms_norm"), jax.ShapeDtypeStruct(rows.shape, x.dtype)
    )
    return call(rows, weight, eps=np.float32(eps)).reshape(x.shape)


def norm_sum(
    x: jax.Array, added: jax.Array, weight: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """(x + added [T, E] in x's dtype, its norm in added's dtype: bfloat16, or x's). Supports the
    same shapes and dtypes as `rms_norm`.
    """
    if added.dtype not in (x.dtype, jnp.bfloat16) or not _served(x, weight):
        return reference.norm_sum(x, added, weight, eps)
    rows, normed_rows = (jax.ShapeDtypeStruct(x.shape, of.dtype) for of in (x, added))
    target = library.load().target("norm_sum")
    # x is used only for the sum, which overwrites it.
    call = jax.ffi.ffi_call(target, (rows, normed_rows), input_output_aliases={0: 0})
    total, normed = call(x, added, weight, eps=np.float32(eps))
    return total, normed


def _served(x: jax.Array, weight: jax.Array) -> bool:
    return x.shape[-1] % _LANES == 0 and x.dtype in _DTYPES and weight.dtype in _DTYPES
