"""Rotary position embeddings: the frequencies of every kind of long-context scaling, and the
rotation.

If only a part of a head is rotated, its numbers are loaded in another order (`names.head_order`),
so that all kernels rotate the pairs (j, j + D/2) of every head: pairs that are not rotated have an
angle of 0.

Axes: T tokens, D head dim, R numbers of a head that are rotated. Everything is computed in float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jitney.engine.core.weights.checkpoints.layer_configs import (
    RopeConfig,
    RopeScaling,
)
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig


class Rope(NamedTuple):
    """The rotation of rows; a pytree of arrays."""

    #: float32 [T, 1, D // 2] each.
    cos: Array
    sin: Array
    #: float32 [T, 1, 1], factor on rotated queries; None: no factor.
    query_factor: Array | None = None

    @classmethod
    def of_layers(cls, positions: Array, config: ModelConfig) -> list[Rope]:
        """The rotation of each layer at positions int32 [T]; equal layers share one rotation."""
        kinds = []
        made: dict[tuple[RopeConfig | None, int], Rope] = {}
        for layer in range(config.n_layers):
            own = config.of_layer(layer)
            kinds.append((config.rope(layer), own.head_dim))
            if kinds[-1] not in made:
                made[kinds[-1]] = cls.at(positions, own, config.rope(layer))
        return [made[kind] for kind in kinds]

    @classmethod
    def at(cls, positions: Array, config: ModelConfig, rope: RopeConfig | None) -> Rope:
        """The rotation at positions int32 [T]. config: the layer's.

        With the barrier it is computed once; XLA would otherwise fuse the sines into every rotation
        of every layer.
        """
        wide = positions.astype(jnp.float32)[:, None, None]
        half = config.rope_dim // 2
        if rope is None:
            shape = (*wide.shape[:2], half)
            return cls(jnp.ones(shape), jnp.zeros(shape))
        frequencies, factor = _inverse_frequencies(rope, config)
        rest = half - frequencies.shape[0]
        angles = wide * frequencies
        cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor
        if rest:
            cos = jnp.pad(cos, ((0, 0), (0, 0), (0, rest)), constant_values=1.0)
            sin = jnp.pad(sin, ((0, 0), (0, 0), (0, rest)))
        cos, sin = jax.lax.optimization_barrier((cos, sin))
        return cls(cos, sin, _query_factor(positions, rope))

    @property
    def turns(self) -> tuple[Array, Array]:
        """(cos, sin), in the form for kernels."""
        return self.cos, self.sin

    def rotate(self, x: Array) -> Array:
        """Rotate pairs (j, j + D/2) of x [T, heads, D] -> [T, heads, D] in x's dtype."""
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        turned = [a * self.cos - b * self.sin, b * self.cos + a * self.sin]
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)

    def scaled(self, q: Array) -> Array:
        """Multiply rotated queries [T, H, D] by `query_factor`, if there is one."""
        if self.query_factor is None:
            return q
        return (q.astype(jnp.float32) * self.query_factor).astype(q.dtype)


def _query_factor(positions: Array, rope: RopeConfig) -> Array | None:
    """Llama 4's factor on queries at positions far beyond the trained context."""
    if not rope.query_beta:
        return None
    contexts = (positions // rope.query_context).astype(jnp.float32)
    return (1.0 + rope.query_beta * jnp.log1p(contexts))[:, None, None]


def _inverse_frequencies(rope: RopeConfig, config: ModelConfig) -> tuple[Array, float]:
    """(radians per position of each rotated pair, float32 [R // 2]; factor on cos and sin)."""
    dims = rope.dims or config.rope_dim
    plain = _plain_frequencies(rope.theta, dims)
    scaling = rope.scaling
    if scaling is None:
        return plain, 1.0
    is_longer = config.context_length > scaling.original_context
    match scaling.kind:
        case "linear":
            return plain / scaling.factor, 1.0
        case "dynamic":
            return _plain_frequencies(_dynamic_theta(rope, scaling, config), dims), 1.0
        case "proportional":
            rotated = jnp.arange(dims // 2) < scaling.rotated_pairs
            return jnp.where(rotated, plain / scaling.factor, 0.0), 1.0
        case "factors":
            return plain / jnp.asarray(scaling.factors, jnp.float32), 1.0
        case "longrope":
            factors = scaling.long_factors if is_longer else scaling.factors
            return plain / jnp.asarray(factors, jnp.float32), scaling.attention_factor
        case "llama3":
            return _llama3_frequencies(plain, scaling), 1.0
        case "yarn":
            return _yarn_frequencies(plain, scaling, rope.theta, dims), scaling.attention_factor


def _plain_frequencies(theta: float, dims: int) -> Array:
    half = dims // 2
    return 1.0 / theta ** (jnp.arange(half, dtype=jnp.float32) / half)


def _dynamic_theta(rope: RopeConfig, scaling: RopeScaling, config: ModelConfig) -> float:
    """The "NTK-aware" theta for the served context; contexts up to the trained one keep theirs."""
    dims = rope.dims or config.rope_dim
    times = max(config.context_length / scaling.original_context, 1.0)
    stretch = scaling.factor * times - (scaling.factor - 1.0)
    return rope.theta * stretch ** (dims / (dims - 2))


def _llama3_frequencies(plain: Array, scaling: RopeScaling) -> Array:
    """Llama 3.1's scaling: a pair that turns less than `low` times in the trained context is slowed
    by `factor`, one that turns more than `high` times is unchanged, and others are blended linearly
    by their number of turns."""
    turns = scaling.original_context * plain / (2 * math.pi)
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = jnp.clip(share, 0.0, 1.0)
    return share * plain + (1.0 - share) * plain / scaling.factor


def _yarn_frequencies(plain: Array, scaling: RopeScaling, theta: float, dims: int) -> Array:
    """YaRN (arXiv 2309.00071, section 3.2): blend by pair index between the pairs of beta_fast and
    beta_slow turns.
    """
    low = _pair_turning(scaling.beta_fast, scaling, theta, dims)
    high = _pair_turning(scaling.beta_slow, scaling, theta, dims)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = (jnp.arange(dims // 2, dtype=jnp.float32) - low) / max(high - low, 0.001)
    slowed = jnp.clip(ramp, 0.0, 1.0)
    return (1.0 - slowed) * plain + slowed * plain / scaling.factor


def _pair_turning(times: float, scaling: RopeScaling, theta: float, dims: int) -> float:
    """The index of the pair that turns `times` times in the trained context."""
    slowness = math.log(scaling.original_context / (times * 2 * math.pi))
    return dims * slowness / (2 * math.log(theta))
