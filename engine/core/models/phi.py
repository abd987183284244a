"""Phi-3 and Phi-4: Llama's layers, whose files have one matrix for queries, keys and values, and
one for gate and up.
"""

from __future__ import annotations

from dataclasses import replace

from jitney.engine.core.models.llama import Llama
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.names import GGUF, HF, Dialect, FileFormat

_HF = replace(HF, qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")
#: llama.cpp calls both halves of gate and up the latter.
_GGUF = replace(GGUF, qkv="attn_qkv", gate_up="ffn_up")


class Phi(Llama):
    """See `Llama`."""

    @classmethod
    def dialect(cls, config: ModelConfig, file_format: FileFormat) -> Dialect:
        """See `Llama.dialect`."""
        return _HF if file_format == "hf" else _GGUF
