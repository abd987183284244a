"""Readers of config.json: Qwen's dense models, mixtures and those with delta nets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jitney.engine.common.requests import JsonObject
from jitney.engine.core.weights.checkpoints.config_fields import MOST, Fields
from jitney.engine.core.weights.checkpoints.families.shared import (
    dense_among,
    read_decoder,
    recurrent_layers,
    window_of,
    windows_by_type,
)
from jitney.engine.core.weights.checkpoints.layer_configs import (
    DeltaNetConfig,
    ExpertsConfig,
)
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig


def qwen2(values: JsonObject) -> ModelConfig:
    fields, config = _qwen(values, num_key_value_heads=32)
    return replace(config, qkv_bias=True, windows=_qwen_windows(fields, config.n_layers))


def qwen3(values: JsonObject) -> ModelConfig:
    fields, config = _read_qwen3(values, num_key_value_heads=32, head_dim=128)
    return replace(config, windows=_qwen_windows(fields, config.n_layers))


def _read_qwen3(values: JsonObject, **defaults: Any) -> tuple[Fields, ModelConfig]:
    """Fields that Qwen3's dense models and mixtures share; see `read_decoder`."""
    fields, config = _qwen(values, **defaults)
    return fields, replace(config, o_bias=config.qkv_bias, qk_norm=True)


def _qwen(values: JsonObject, **defaults: Any) -> tuple[Fields, ModelConfig]:
    return read_decoder(values, max_position_embeddings=32768, sliding_window=4096, **defaults)


def _qwen_windows(fields: Fields, layers: int) -> tuple[int, ...]:
    """Without types, layers have windows from `max_window_layers` on."""
    typed = windows_by_type(fields, layers)
    if not fields.flag("use_sliding_window"):
        return (0,) * layers
    if typed is not None:
        return typed
    first = min(fields.integer("max_window_layers", 0, MOST.layers, default=28), layers)
    return (0,) * first + (window_of(fields),) * (layers - first)


def qwen3_moe(values: JsonObject) -> ModelConfig:
    """Qwen3's mixtures. transformers 5 writes num_local_experts, older releases num_experts.

    With `use_sliding_window` every layer has the window: transformers reads neither `layer_types`
    nor `max_window_layers` here.
    """
    fields, config = _read_qwen3(values, num_key_value_heads=4)
    window = window_of(fields) if fields.flag("use_sliding_window") else 0
    count = "num_experts" if fields.get("num_local_experts") is None else "num_local_experts"
    inner = fields.integer("moe_intermediate_size", 1, MOST.width, default=768)
    experts = ExpertsConfig(
        fields.integer(count, 1, MOST.experts, default=128),
        fields.integer("num_experts_per_tok", 1, MOST.experts, default=8),
        fields.flag("norm_topk_prob"),
    )
    experts = _with_dense_layers(experts, fields, config.n_layers)
    windows = (window,) * config.n_layers
    return replace(config, intermediate_size=inner, windows=windows, experts=experts)


def _with_dense_layers(experts: ExpertsConfig, fields: Fields, layers: int) -> ExpertsConfig:
    """Qwen's layers without experts: those of `mlp_only_layers`, and all but each
    `decoder_sparse_step`-th, counted from 1.
    """
    every = fields.integer("decoder_sparse_step", 1, MOST.layers, default=1)
    named = fields.get("mlp_only_layers", [])
    if not isinstance(named, list):
        fields.reject("mlp_only_layers", named, "a list of numbers of layers")
    dense = {layer for layer in range(layers) if layer in named or (layer + 1) % every}
    return dense_among(experts, fields, dense)


def qwen3_5(values: JsonObject) -> ModelConfig:
    fields, config = read_decoder(
        values, max_position_embeddings=32768, head_dim=256, partial_rotary_factor=0.25
    )
    kinds = fields.get("layer_types")
    if kinds is None:
        every = fields.integer("full_attention_interval", 1, MOST.layers, default=4)
        layers = frozenset(i for i in range(config.n_layers) if (i + 1) % every)
    else:
        layers = recurrent_layers(fields, kinds, config.n_layers, "linear_attention")
    recurrent = DeltaNetConfig(
        layers,
        key_heads=fields.integer("linear_num_key_heads", 1, MOST.width, default=16),
        value_heads=fields.integer("linear_num_value_heads", 1, MOST.width, default=32),
        key_dim=fields.integer("linear_key_head_dim", 1, MOST.width, default=128),
        value_dim=fields.integer("linear_value_head_dim", 1, MOST.width, default=128),
        taps=fields.integer("linear_conv_kernel_dim", 2, MOST.taps, default=4),
    )
    return replace(
        config,
        o_bias=config.qkv_bias,
        qk_norm=True,
        float32_norms=True,
        attention_gate=True,
        recurrent=recurrent,
        n_prediction_layers=_mtp_layers(fields),
    )


def _mtp_layers(fields: Fields) -> int:
    """Layers that predict further tokens; none with an embedding of their own is read."""
    count = fields.integer("mtp_num_hidden_layers", 0, MOST.layers, default=0)
    return 0 if fields.flag("mtp_use_dedicated_embeddings") else count


def qwen3_5_moe(values: JsonObject) -> ModelConfig:
    """Qwen3.5's mixtures; config.json has no intermediate_size beside those of the experts."""
    settings = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    settings |= {"num_key_value_heads": 2} | dict(values)
    fields = Fields(settings, "config.json")
    inner = fields.integer("moe_intermediate_size", 1, MOST.width)
    experts = ExpertsConfig(
        fields.integer("num_experts", 1, MOST.experts, default=256),
        fields.integer("num_experts_per_tok", 1, MOST.experts, default=8),
        renormalised=True,
        shared_size=fields.integer("shared_expert_intermediate_size", 1, MOST.width),
    )
    config = qwen3_5(settings | {"intermediate_size": inner})
    return replace(config, experts=experts)


def qwen3_next(values: JsonObject) -> ModelConfig:
    """Qwen3-Next: a mixture of Qwen3.5 with more experts, whose shares may stay as they are."""
    settings = {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True}
    settings |= dict(values)
    fields = Fields(settings, "config.json")
    config = qwen3_5_moe(settings)
    assert config.experts is not None
    experts = replace(config.experts, renormalised=fields.flag("norm_topk_prob"))
    return replace(
        config,
        experts=_with_dense_layers(experts, fields, config.n_layers),
        n_prediction_layers=fields.integer("num_nextn_predict_layers", 0, MOST.layers, default=1),
    )
