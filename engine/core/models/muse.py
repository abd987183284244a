"""Muse-Glimmer (text): Llama's layers with norms before and after both halves, and gated attention.

Embeddings, queries and keys are normed without weights, scores and logits are multiplied by the
model's factors, and logits have a soft cap. Every fourth layer sees all positions and has no
rotation. Weights of the layers' norms are stored as w and applied as 1 + w, those of the last norm
unchanged.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jitney.engine.core.models.attention import GatedAttention
from jitney.engine.core.models.layers import UnitNorm, rounded
from jitney.engine.core.models.llama import Llama, PostNormBlock
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.names import HF, FileFormat, WeightMap

_HF = replace(
    HF,
    attention_gate="self_attn.gate_proj",
    q_norm="",
    k_norm="",
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    norm_offset=1.0,
)


class _Attention(GatedAttention):
    """Gated attention whose gates have a separate matrix in the files."""

    @staticmethod
    def head_norm(config: ModelConfig, dtype: DTypeLike) -> UnitNorm:
        return UnitNorm(config.head_dim, config.rms_eps)


class _Block(PostNormBlock):
    attention_class = _Attention


class Muse(Llama):
    block = _Block
    hf = _HF

    def embedded(self, tokens: Array) -> Array:
        """See `Llama.embedded`; each row is normed."""
        x = super().embedded(tokens)
        wide = x.astype(jnp.float32)
        squares = jnp.mean(wide * wide, axis=-1, keepdims=True)
        return rounded(wide * jax.lax.rsqrt(squares + self.config.rms_eps), x.dtype)

    @classmethod
    def weight_map(cls, config: ModelConfig, file_format: FileFormat) -> WeightMap:
        weights = super().weight_map(config, file_format)
        last = ("norm", "weight")
        targets = [
            replace(target, offset=0.0) if target.path == last else target
            for target in weights.targets
        ]
        return replace(weights, targets=tuple(targets))
