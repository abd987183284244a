"""Differences of the families' tiny random models from the smallest one."""

from __future__ import annotations

from dataclasses import replace

from jitney.engine.common.requests import JsonDict
from jitney.engine.core.weights.checkpoints.layer_configs import (
    DeltaNetConfig,
    EncoderConfig,
    ExpertsConfig,
    FullHeads,
    LatentConfig,
    MambaConfig,
    RopeConfig,
    RopeScaling,
    ShortConvConfig,
)
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig

#: The smallest model that still has more than one of everything.
SMALLEST = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=512,
    hidden_size=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    windows=(0, 0),
    context_length=2048,
    bos_id=257,
    eos_ids=(259,),
)
#: Untied, unlike the published ones: a random one with scaled embeddings would repeat a token.
GEMMA: JsonDict = {
    "windows": (32, 0),
    "float32_norms": True,
    "activation": "gelu_tanh",
    "query_scalar": 24.0,
}
GEMMA3: JsonDict = GEMMA | {
    "qk_norm": True,
    "ropes": (RopeConfig(100.0), RopeConfig()),
}
#: Of the last two layers each reads the keys and values of one before them.
GEMMA4: JsonDict = {
    "n_layers": 4,
    "windows": (32, 0, 32, 0),
    "ropes": (
        RopeConfig(100.0),
        RopeConfig(scaling=RopeScaling("proportional", rotated_pairs=8)),
    )
    * 2,
    "activation": "gelu_tanh",
    "qk_norm": True,
    "query_scalar": 4.0,
    "head_dim": 32,
    "full_heads": FullHeads(1, 64),
    "n_kv_readers": 2,
    "reader_width": 2,
    "layer_input_size": 32,
}
#: Keys that are values, too, and experts beside the feed-forward.
GEMMA4_EXPERTS: JsonDict = {
    "windows": (32, 0),
    "ropes": GEMMA4["ropes"][:2],
    "activation": "gelu_tanh",
    "qk_norm": True,
    "query_scalar": 4.0,
    "head_dim": 32,
    "full_heads": FullHeads(1, 64, 1),
    "experts": ExpertsConfig(8, 2, True, shared_size=64, shared_gate=False),
}
GRANITE: JsonDict = {
    "embed_factor": 3.0,
    "residual_factor": 0.7,
    "query_scalar": 24.0,
    "logit_factor": 0.5,
}
GPT_OSS: JsonDict = {
    "windows": (32, 0),
    "ropes": (
        RopeConfig(
            scaling=RopeScaling("yarn", 4.0, 64, truncate=False, attention_factor=1.14),
        ),
    ),
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "attention_sinks": True,
    "activation": "clamped_silu",
    "experts": ExpertsConfig(8, 4, True),
}
#: Value heads that share key heads, and layers of both kinds.
QWEN3_5: JsonDict = {
    "n_layers": 3,
    "windows": (0, 0, 0),
    "qk_norm": True,
    "float32_norms": True,
    "attention_gate": True,
    "recurrent": DeltaNetConfig(frozenset({0, 2}), 2, 4, 16, 16),
}
QWEN3_5_MOE: JsonDict = QWEN3_5 | {"experts": ExpertsConfig(8, 2, True, shared_size=64)}
LFM2: JsonDict = {
    "n_layers": 3,
    "windows": (0, 0, 0),
    "qk_norm": True,
    "recurrent": ShortConvConfig(frozenset({0, 2}), 64),
}
GRANITE_H: JsonDict = GRANITE | {
    "n_layers": 3,
    "windows": (0, 0, 0),
    "ropes": (None,),
    "recurrent": MambaConfig(frozenset({0, 2}), 1, 8, 16, 16),
    "experts": ExpertsConfig(8, 2, True, shared_size=64, shared_gate=False),
}
#: A layer without a feed-forward, one with an MLP, and mixtures.
NEMOTRON_H: JsonDict = {
    "n_layers": 4,
    "windows": (0,) * 4,
    "ropes": (None,),
    "activation": "relu2",
    "recurrent": MambaConfig(frozenset({0, 2, 3}), 4, 8, 16, 16),
    "experts": ExpertsConfig(
        8,
        2,
        True,
        scoring="sigmoid",
        choice_bias=True,
        clusters=4,
        chosen_clusters=2,
        share_factor=2.5,
        shared_size=64,
        shared_gate=False,
        dense_layers=frozenset({2}),
        dense_size=96,
    ),
    "bare_layers": frozenset({0}),
    "stored_halves": ((0, -1), (1, 2), (3, 4), (5, 6)),
}
#: Clusters of experts, and a dense layer before them.
LATENT: JsonDict = {
    "n_kv_heads": 1,
    "head_dim": 64,
    "query_scalar": 40.0,
    "latent": LatentConfig(48, 24, 16, 32, query_rank=32),
    "experts": ExpertsConfig(
        8,
        2,
        True,
        shared_size=64,
        shared_gate=False,
        scoring="sigmoid",
        choice_bias=True,
        clusters=4,
        chosen_clusters=2,
        share_factor=1.5,
        dense_layers=frozenset({0}),
        dense_size=192,
    ),
}
#: And a layer behind the last that predicts one token more.
PREDICTING: JsonDict = LATENT | {"n_prediction_layers": 1}
#: Queries of hidden rows, and shares of all experts.
DEEPSEEK_V2: JsonDict = LATENT | {
    "latent": LatentConfig(48, 24, 16, 32),
    "experts": replace(LATENT["experts"], scoring="softmax", choice_bias=False, renormalised=False),
}


def of_encoder(encoder: EncoderConfig) -> JsonDict:
    biases = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
    return {"n_kv_heads": 4, "activation": "gelu", "encoder": encoder} | biases
