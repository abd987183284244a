"""Cohere 2 (Command R7B and A): attention and MLP read the output of the same norm, which also
subtracts the mean, and both are added at once; logits are multiplied by a factor.

Layers that see all positions have no rotation; rotated pairs are (2j, 2j + 1).
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jitney.engine.core.models.layers import NoNorm, RowFacts, rounded
from jitney.engine.core.models.llama import Block, Llama
from jitney.engine.core.models.rope import Rope
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.names import GGUF, HF
from jitney.kernels.interface import AttentionMeta, Kernels
from jitney.kernels.partial_sums import whole

_HF = replace(HF, mlp_norm="", paired_rows=True)
_GGUF = replace(GGUF, mlp_norm="", paired_rows=True)


class _ParallelBlock(Block):
    """One layer: attention and MLP of the same rows, both added to them."""

    has_halves = False

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        self.mlp_norm = NoNorm()

    def __call__(
        self, x: Array, added: Array, rope: Rope, kv: Array, meta: AttentionMeta, kernels: Kernels
    ) -> tuple[Array, Array, Array]:
        x, normed = self.attention_norm.of_sum(x, added, kernels)
        o, kv = self.attention(normed, rope, kv, meta, kernels)
        o, answers = whole(o), whole(self.fed_forward(normed, kernels, RowFacts.of(meta)))
        both = o.astype(jnp.float32) + answers
        return x, rounded(both, o.dtype), kv


class Cohere(Llama):
    block = _ParallelBlock
    hf, gguf = _HF, _GGUF
