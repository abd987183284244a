"""Readers of config.json: Mixtral and gpt-oss."""

from __future__ import annotations

from dataclasses import replace

from jitney.engine.common.errors import ModelError
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.core.weights.checkpoints.config_fields import MOST
from jitney.engine.core.weights.checkpoints.families.shared import (
    read_decoder,
    window_of,
    windows_from,
)
from jitney.engine.core.weights.checkpoints.layer_configs import ExpertsConfig
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig

#: What gpt-oss's gates must be, as `jitney.kernels.experts` has them.
_GPT_OSS_GATES = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
#: gpt-oss's rotary positions where its file does not say.
_GPT_OSS_ROPE: JsonDict = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def mixtral(values: JsonObject) -> ModelConfig:
    fields, config = read_decoder(
        values, max_position_embeddings=131072, num_key_value_heads=8, rms_norm_eps=1e-5
    )
    experts = ExpertsConfig(
        fields.integer("num_local_experts", 1, MOST.experts, default=8),
        fields.integer("num_experts_per_tok", 1, MOST.experts, default=2),
        renormalised=True,
    )
    return replace(config, windows=(window_of(fields),) * config.n_layers, experts=experts)


def gpt_oss(values: JsonObject) -> ModelConfig:
    """gpt-oss: windows in every second layer; its gates are always bounded alike."""
    defaults: JsonDict = {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "attention_bias": True,
    }
    if values.get("rope_parameters") is None and values.get("rope_scaling") is None:
        defaults["rope_parameters"] = _GPT_OSS_ROPE
    fields, config = read_decoder(values, **defaults)
    for key, supported in _GPT_OSS_GATES.items():
        if fields.number(key, supported) != supported:
            raise ModelError(f"config.json: {key} other than {supported} is not supported")
    experts = ExpertsConfig(
        fields.integer("num_local_experts", 1, MOST.experts, default=128),
        fields.integer("num_experts_per_tok", 1, MOST.experts, default=4),
        renormalised=True,
    )
    return replace(
        config,
        windows=windows_from(fields, config.n_layers, every=2),
        o_bias=config.qkv_bias,
        mlp_bias=True,
        attention_sinks=True,
        activation="clamped_silu",
        experts=experts,
    )
