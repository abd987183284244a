"""Phi-3 and Phi-4: Llama's layers, whose files have one matrix for queries, keys and values, and
one for gate and up.
"""

from __future__ import annotations

from dataclasses import replace

from jitney.engine.core.models.llama import Llama
from jitney.engine.core.weights.checkpoints.names import GGUF, HF

_HF = replace(HF, qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")
#: In llama.cpp's files the matrix of gate and up is named "up".
_GGUF = replace(GGUF, qkv="attn_qkv", gate_up="ffn_up")


class Phi(Llama):
    hf, gguf = _HF, _GGUF
