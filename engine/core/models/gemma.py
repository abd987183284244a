"""Gemma 2 and Gemma 3 (text): the differences from Llama's layers.

Both halves of a layer have a norm before and after, embeddings are scaled, scores and logits may
have soft caps, and Gemma 3's layers with a window rotate with their own theta. The norms' weights
are stored as 1 + w, in float32: near 1 bfloat16 has steps of 1/128, and w needs finer ones.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jax import Array

from jitney.engine.core.models.layers import scaled
from jitney.engine.core.models.llama import Llama, PostNormBlock
from jitney.engine.core.weights.checkpoints.names import GGUF, HF

_HF = replace(
    HF,
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    norm_offset=1.0,
)
#: llama.cpp's converter has added the 1 already.
_GGUF = replace(GGUF, attention_post_norm="post_attention_norm", mlp_post_norm="post_ffw_norm")


class Gemma(Llama):
    block = PostNormBlock
    hf, gguf = _HF, _GGUF

    def embedded(self, tokens: Array) -> Array:
        """Embeddings of tokens int32 [T] -> [T, E]; the scale is rounded to the dtype, as in
        training.
        """
        x = super().embedded(tokens)
        return scaled(x, float(np.asarray(self.config.hidden_size**0.5, x.dtype)))
