"""Layers shared by all models: every norm and rotation of the engine, and every product with
weights, is called here.

Axes: T tokens, E embed, H query heads, K KV heads, D head dim, F feed-forward, I and O any input
and output size. dtype in equals dtype out; sums, norms and rotations are computed in float32.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jitney.engine.checkpoints.model_config import ModelConfig, RopeScaling
from jitney.engine.models.quantization import Packed, product
from jitney.engine.models.sharding import total
from jitney.kernels.interface import Arrange, Kernels
from jitney.kernels.reference import gate

DType = Any


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], spread: float, dtype: DType) -> jax.Array:
    """Random weights, drawn in float32 whatever the dtype: a bfloat16 model is the float32 one,
    rounded.
    """
    return (spread * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)


class Linear(nnx.Module):
    """A matrix [I, O] in one of the schemes of `jitney.engine.models.quantization`, and bias [O] or
    None.

    kernel, scale, zeros, lows: the arrays of `Packed`; `set_matrix` replaces them. summed: the
    inputs are split over devices, so the products are summed over them (in x's dtype) before the
    bias.
    """

    def __init__(
        self,
        size_in: int,
        size_out: int,
        *,
        bias: bool,
        dtype: DType,
        rngs: nnx.Rngs,
        summed: bool = False,
    ):
        self.summed = summed
        spread = 1.5 / math.sqrt(
            size_in
        )  # keeps random models lively: the top two logits stay well apart
        self.kernel = nnx.Param(normal(rngs, (size_in, size_out), spread, dtype))
        self.scale: nnx.Param | None = None
        self.zeros: nnx.Param | None = None
        self.lows: nnx.Param | None = None
        self.bias = nnx.Param(normal(rngs, (size_out,), 0.25, dtype)) if bias else None

    def __call__(self, x: jax.Array, kernels: Kernels, dtype: DType = None) -> jax.Array:
        """x [T, I] -> [T, O] in `dtype` (x's own if None)."""
        dtype = dtype or x.dtype
        if self.bias is None and not self.summed:
            return product(x, self.packed, kernels, dtype)
        y = (
            total(product(x, self.packed, kernels, x.dtype))
            if self.summed
            else product(x, self.packed, kernels)
        )
        if self.bias is not None:
            y = y.astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return y.astype(dtype)

    def gated(self, x: jax.Array, kernels: Kernels) -> jax.Array:
        """x [T, I] -> silu(first half of the outputs) * the other half, [T, O // 2] in x's
        dtype.
        """
        if self.bias is None and self.scale is None:
            return kernels.gated(x, self.kernel[...])
        return gate(self(x, kernels, jnp.float32), x.dtype)

    def arrange(self, arrange: Arrange, parts: int) -> None:
        """Lay a plain matrix out as a kernel set wants it; parts: 2 if `gated` will be called, else
        1.
        """
        if self.packed.scheme == "plain":
            self.kernel = nnx.Param(arrange(self.kernel[...], parts))

    @property
    def packed(self) -> Packed:
        """The matrix as it is stored."""
        return Packed(
            self.kernel[...],
            *(
                None if param is None else param[...]
                for param in (self.scale, self.zeros, self.lows)
            ),
        )

    def set_matrix(self, packed: Packed) -> None:
        """Replace the matrix, and with it the scheme."""
        for name, array in packed._asdict().items():
            # nnx fixes an attribute without arrays as such when it is first set; data() says that
            # it may change.
            setattr(self, name, None if array is None else nnx.data(nnx.Param(array)))


class RMSNorm(nnx.Module):
    """weight [E]; x / rms(x) * weight."""

    def __init__(self, size: int, eps: float, *, dtype: DType):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array, kernels: Kernels) -> jax.Array:
        """x [..., E] -> [..., E] in x's dtype."""
        return kernels.rms_norm(x, self.weight[...], self.eps)


class MLP(nnx.Module):
    """down(silu(gate) * up), gate and up fused into one product [E, 2F]."""

    def __init__(self, config: ModelConfig, *, dtype: DType, rngs: nnx.Rngs):
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = Linear(size, 2 * inner, bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear(inner, size, bias=bias, dtype=dtype, rngs=rngs, summed=config.shards > 1)

    def __call__(self, x: jax.Array, kernels: Kernels) -> jax.Array:
        """x [T, E] -> [T, E]."""
        return self.down(self.gate_up.gated(x, kernels), kernels)


def inverse_frequencies(config: ModelConfig) -> tuple[jax.Array, float]:
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
            return llama3_frequencies(plain, scaling), 1.0
        case "yarn":
            return yarn_frequencies(plain, scaling, config), scaling.attention_factor


def llama3_frequencies(plain: jax.Array, scaling: RopeScaling) -> jax.Array:
    """Llama 3.1: a pair that turns less than `low` times in the trained context is slowed by
    `factor`, one that turns more than `high` times is kept, the others are blended linearly in
    their number of turns."""
    turns = scaling.original_context * plain / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = jnp.clip(keep, 0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / scaling.factor


def yarn_frequencies(plain: jax.Array, scaling: RopeScaling, config: ModelConfig) -> jax.Array:
    """YaRN (arXiv 2309.00071, section 3.2): blend by pair index between the pairs of beta_fast and
    beta_slow turns.
    """
    dim = config.head_dim

    def pair_turning(times: float) -> float:
        return (
            dim
            * math.log(scaling.original_context / (times * 2 * math.pi))
            / (2 * math.log(config.rope_theta))
        )

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (jnp.arange(dim // 2, dtype=jnp.float32) - low) / max(high - low, 0.001)
    slowed = jnp.clip(ramp, 0.0, 1.0)
    return (1.0 - slowed) * plain + slowed * plain / scaling.factor


def rotary(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """positions int32 [T] -> cos and sin, float32 [T, 1, D // 2]; once per step, shared by all
    layers.

    The barrier keeps it once: XLA would rather fuse the sines into every rotation of every layer.
    """
    frequencies, factor = inverse_frequencies(config)
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies
    return jax.lax.optimization_barrier((jnp.cos(angles) * factor, jnp.sin(angles) * factor))


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate pairs (j, j + D/2) of x [T, heads, D]; cos and sin [T, 1, D // 2] -> [T, heads, D] in
    x's dtype.
    """
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
