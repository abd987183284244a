"""Rotary positions: frequencies of every kind of long-context scaling, and the rotation.

Axes: T tokens, D head dim. Everything is computed in float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jitney.engine.core.weights.checkpoints.model_config import ModelConfig, RopeScaling


class Rope(NamedTuple):
    """What rows are rotated by; a pytree of arrays, float32 [T, 1, D // 2] each."""

    cos: Array
    sin: Array

    @classmethod
    def at(cls, positions: Array, config: ModelConfig) -> Rope:
        """Of positions int32 [T]; once per step, shared by all layers.

        The barrier keeps it once: XLA would rather fuse the sines into every rotation of every
        layer.
        """
        frequencies, factor = _inverse_frequencies(config)
        angles = positions.astype(jnp.float32)[:, None, None] * frequencies
        both = jnp.cos(angles) * factor, jnp.sin(angles) * factor
        return cls(*jax.lax.optimization_barrier(both))

    def rotate(self, x: Array) -> Array:
        """Rotate pairs (j, j + D/2) of x [T, heads, D] -> [T, heads, D] in x's dtype."""
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        turned = [a * self.cos - b * self.sin, b * self.cos + a * self.sin]
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _inverse_frequencies(config: ModelConfig) -> tuple[Array, float]:
    """(radians per position of each rotated pair, float32 [D // 2]; factor on cos and sin)."""
    half = config.head_dim // 2
    plain = 1.0 / config.rope_theta ** (jnp.arange(half, dtype=jnp.float32) / half)
    scaling = config.rope_scaling
    if scaling is None:
        return plain, 1.0
    match scaling.kind:
        case "linear":
            return plain / scaling.factor, 1.0
        case "factors":
            return plain / jnp.asarray(scaling.factors, jnp.float32), 1.0
        case "llama3":
            return _llama3_frequencies(plain, scaling), 1.0
        case "yarn":
            return _yarn_frequencies(plain, scaling, config), scaling.attention_factor


def _llama3_frequencies(plain: Array, scaling: RopeScaling) -> Array:
    """Llama 3.1: a pair that turns less than `low` times in the trained context is slowed by
    `factor`, one that turns more than `high` times is kept, the others are blended linearly in
    their number of turns."""
    turns = scaling.original_context * plain / (2 * math.pi)
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = jnp.clip(share, 0.0, 1.0)
    return share * plain + (1.0 - share) * plain / scaling.factor


def _yarn_frequencies(plain: Array, scaling: RopeScaling, config: ModelConfig) -> Array:
    """YaRN (arXiv 2309.00071, section 3.2): blend by pair index between the pairs of beta_fast and
    beta_slow turns.
    """
    dim = config.head_dim
    low = _pair_turning(scaling.beta_fast, scaling, config)
    high = _pair_turning(scaling.beta_slow, scaling, config)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (jnp.arange(dim // 2, dtype=jnp.float32) - low) / max(high - low, 0.001)
    slowed = jnp.clip(ramp, 0.0, 1.0)
    return (1.0 - slowed) * plain + slowed * plain / scaling.factor


def _pair_turning(times: float, scaling: RopeScaling, config: ModelConfig) -> float:
    """The index of the pair that turns so often in the trained context."""
    slowness = math.log(scaling.original_context / (times * 2 * math.pi))
    return config.head_dim * slowness / (2 * math.log(config.rope_theta))
