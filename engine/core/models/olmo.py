"""OLMo 2 (arXiv 2501.00656), OLMo 3 and EXAONE 4: the differences from Llama's layers.

Attention and MLP read rows without a norm, and their outputs are normed before they are added. OLMo
normalises queries, and keys, over all heads at once, before the split into heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jitney.engine.core.models.attention import Attention
from jitney.engine.core.models.layers import NoNorm, RMSNorm
from jitney.engine.core.models.llama import Llama, PostNormBlock
from jitney.engine.core.models.sharding import TENSOR
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.names import GGUF, HF
from jitney.kernels.interface import Kernels
from jitney.kernels.partial_sums import whole

_HF = replace(
    HF,
    attention_norm="",
    attention_post_norm="post_attention_layernorm",
    mlp_norm="",
    mlp_post_norm="post_feedforward_layernorm",
)
_GGUF = replace(
    GGUF,
    attention_norm="",
    attention_post_norm="post_attention_norm",
    mlp_norm="",
    mlp_post_norm="post_ffw_norm",
)


class _WideNormAttention(Attention):
    """Attention whose queries, and whose keys, are normed over all heads at once
    (`ModelConfig.wide_qk_norm`).
    """

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        self.shards = config.shards
        self.wide_q_norm = RMSNorm.of(config.n_heads * config.head_dim, config, dtype)
        self.wide_k_norm = RMSNorm.of(config.n_kv_heads * config.head_dim, config, dtype)

    def projected(self, x: Array, kernels: Kernels, adapted: Array | None) -> Array:
        first_key = self.n_heads * self.head_dim
        first_value = first_key + self.n_kv_heads * self.head_dim
        rows = whole(super().projected(x, kernels, adapted))
        q, k, v = jnp.split(rows, [first_key, first_value], axis=1)
        if self.shards == 1:
            q, k = self.wide_q_norm(q, kernels), self.wide_k_norm(k, kernels)
        else:
            q, k = _normed_shares([q, k], [self.wide_q_norm, self.wide_k_norm], self.shards)
        return jnp.concatenate([q, k, v], axis=1)


def _normed_shares(shares: Sequence[Array], norms: Sequence[RMSNorm], devices: int) -> list[Array]:
    """Normalise rows whose columns are split over devices. shares: this device's columns [T, C] of
    each kind of rows. norms: with this device's share of each kind's weights.

    All devices have the same number of columns, so the mean of their means is the mean of all. One
    sum over the devices serves all kinds. Only inside the step.
    """
    wide = [rows.astype(jnp.float32) for rows in shares]
    own = jnp.stack([jnp.mean(rows * rows, axis=-1) for rows in wide], axis=-1)
    means = TENSOR.total(own) / devices
    normed: list[Array] = []
    for kind, norm in enumerate(norms):
        rows = wide[kind] * jax.lax.rsqrt(means[:, kind, None] + norm.eps)
        weight = norm.weight[...].astype(jnp.float32)
        normed.append((rows * weight).astype(shares[kind].dtype))
    return normed


class _NormedBehind(PostNormBlock):
    """One layer: the outputs of attention and MLP are normed, then added."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        self.attention_norm = NoNorm()
        self.mlp_norm = NoNorm()


class _OlmoBlock(_NormedBehind):
    attention_class = _WideNormAttention


class Exaone(Llama):
    block = _NormedBehind
    hf, gguf = _HF, _GGUF


class Olmo(Exaone):
    block = _OlmoBlock
