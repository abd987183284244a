"""GLM-4 (dense, of 2025): Llama's layers with additional norms after both halves.

Half of each head is rotated, in pairs (2j, 2j + 1).
"""

from __future__ import annotations

from dataclasses import replace

from jitney.engine.core.models.llama import Llama, PostNormBlock
from jitney.engine.core.weights.checkpoints.names import GGUF, HF

_HF = replace(
    HF,
    attention_post_norm="post_self_attn_layernorm",
    mlp_post_norm="post_mlp_layernorm",
    gate_up="mlp.gate_up_proj",
    paired_rows=True,
)
_GGUF = replace(
    GGUF,
    attention_post_norm="post_attention_norm",
    mlp_post_norm="post_ffw_norm",
    gate_up="ffn_up",
    paired_rows=True,
)


class Glm(Llama):
    block = PostNormBlock
    hf, gguf = _HF, _GGUF
