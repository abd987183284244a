"""What rows are rounded by, before a product in int8 or fp8."""

from __future__ import annotations

import jax
import jax.numpy as jnp

#: Rows whose numbers are all smaller are multiplied as if they had one as great.
_LEAST = 1e-30


def greatest_of_rows(x: jax.Array) -> jax.Array:
    """x float32 [T, I] -> the greatest magnitude of each row, float32 [T, 1]; NaN of a row with a
    number that is not finite.
    """
    most = jnp.max(jnp.abs(x), axis=1, keepdims=True)
    return jnp.where(jnp.isfinite(most), jnp.maximum(most, _LEAST), jnp.nan)
