"""Nemotron-H and Nemotron 3: layers of Mamba-2 between attention layers, and feed-forwards without
gates, whose activation is the squared ReLU; some or all of them are mixtures.

The files store each half of a layer as a layer, and a layer may have no second half
(`ModelConfig.stored_halves`).
"""

from __future__ import annotations

from dataclasses import replace

from jitney.engine.core.models.llama import Llama
from jitney.engine.core.models.mamba import Mamba
from jitney.engine.core.models.mixture import MixtureBlock
from jitney.engine.core.weights.checkpoints.names import GGUF, HF

_HF = replace(
    HF,
    embed="model.embeddings",
    norm="model.norm_f",
    attention_norm="norm",
    mlp_norm="norm",
    q="mixer.q_proj",
    k="mixer.k_proj",
    v="mixer.v_proj",
    o="mixer.o_proj",
    gate="",
    up="mixer.up_proj",
    down="mixer.down_proj",
    mamba="mixer.",
    router="mixer.gate",
    choice_bias="mixer.gate.e_score_correction_bias",
    expert_gate="",
    expert_up="mixer.experts.{e}.up_proj",
    expert_down="mixer.experts.{e}.down_proj",
    shared="mixer.shared_experts",
)
_GGUF = replace(
    GGUF,
    mlp_norm="attn_norm",
    gate="",
    expert_gate="",
    paired_rows=True,
    reads_layers_behind=False,
)


class _Block(MixtureBlock):
    recurrent_class = Mamba


class NemotronH(Llama):
    block = _Block
    hf, gguf = _HF, _GGUF
