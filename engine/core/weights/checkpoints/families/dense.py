"""Readers of config.json: families of dense decoders."""

from __future__ import annotations

from dataclasses import replace

from jitney.engine.common.errors import ModelError
from jitney.engine.common.requests import JsonObject
from jitney.engine.core.weights.checkpoints.config_fields import MOST
from jitney.engine.core.weights.checkpoints.families.shared import (
    read_decoder,
    window_of,
    windows_by_type,
    windows_from,
)
from jitney.engine.core.weights.checkpoints.layer_patterns import (
    ropes_by_window,
    ropes_without_full,
)
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.rope_config import hf_full_rope, hf_local_rope


def llama(values: JsonObject) -> ModelConfig:
    fields, config = read_decoder(values, max_position_embeddings=2048)
    return replace(config, o_bias=config.qkv_bias, mlp_bias=fields.flag("mlp_bias"))


def mistral(values: JsonObject) -> ModelConfig:
    fields, config = read_decoder(
        values, max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096
    )
    return replace(config, windows=(window_of(fields),) * config.n_layers)


def olmo2(values: JsonObject) -> ModelConfig:
    _, config = read_decoder(values, max_position_embeddings=2048, rms_norm_eps=1e-5)
    return replace(config, o_bias=config.qkv_bias, wide_qk_norm=True)


def olmo3(values: JsonObject) -> ModelConfig:
    """OLMo 3: layers with a window rotate without scaling."""
    fields, config = read_decoder(
        values,
        hf_full_rope,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        sliding_window=4096,
    )
    windows = windows_from(fields, config.n_layers, every=4)
    config = replace(config, o_bias=config.qkv_bias, wide_qk_norm=True, windows=windows)
    local = hf_local_rope(
        fields, config.context_length, config.head_dim, fields.number("rope_theta")
    )
    return replace(config, ropes=ropes_by_window(config, local))


def ministral3(values: JsonObject) -> ModelConfig:
    fields, config = read_decoder(
        values,
        max_position_embeddings=262144,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
    )
    return replace(config, windows=(window_of(fields),) * config.n_layers)


def smollm3(values: JsonObject) -> ModelConfig:
    """SmolLM3: some layers do not rotate, and may have a window instead."""
    fields, config = read_decoder(
        values,
        max_position_embeddings=32768,
        num_key_value_heads=4,
        rope_theta=2e6,
        tie_word_embeddings=True,
    )
    layers = config.n_layers
    every = fields.integer("no_rope_layer_interval", 1, MOST.layers, default=4)
    rotates = fields.get("no_rope_layers") or [(layer + 1) % every for layer in range(layers)]
    if not isinstance(rotates, list) or len(rotates) != layers:
        fields.reject("no_rope_layers", rotates, f"a list of {layers} numbers, 0 without rope")
    typed = windows_by_type(fields, layers)
    windows = (0,) * layers
    if fields.flag("use_sliding_window"):
        window = window_of(fields)
        windows = typed or tuple(0 if own else window for own in rotates)
    return replace(
        config,
        o_bias=config.qkv_bias,
        mlp_bias=fields.flag("mlp_bias"),
        windows=windows,
        ropes=tuple(config.rope(0) if own else None for own in rotates),
    )


def seed_oss(values: JsonObject) -> ModelConfig:
    fields, config = read_decoder(
        values,
        max_position_embeddings=524288,
        num_key_value_heads=8,
        head_dim=128,
        attention_bias=True,
    )
    return replace(
        config, o_bias=fields.flag("attention_out_bias"), mlp_bias=fields.flag("mlp_bias")
    )


def phi3(values: JsonObject) -> ModelConfig:
    fields, config = read_decoder(
        values,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    )
    return replace(config, qkv_bias=False, windows=(window_of(fields),) * config.n_layers)


def glm4(values: JsonObject) -> ModelConfig:
    _, config = read_decoder(
        values,
        max_position_embeddings=131072,
        num_key_value_heads=2,
        head_dim=128,
        rms_norm_eps=1.5625e-7,
        attention_bias=True,
        partial_rotary_factor=0.5,
        eos_token_id=[151329, 151336, 151338],
    )
    return config


def exaone4(values: JsonObject) -> ModelConfig:
    """EXAONE 4: where some layers have a window, those that see all do not rotate."""
    fields, config = read_decoder(
        values, max_position_embeddings=2048, rms_norm_eps=1e-5, sliding_window=4096
    )
    config = replace(config, qk_norm=True)
    if not window_of(fields):
        return config
    config = replace(config, windows=windows_from(fields, config.n_layers, every=4))
    return replace(config, ropes=ropes_without_full(config))


def cohere2(values: JsonObject) -> ModelConfig:
    """Cohere 2: layers that see all do not rotate."""
    fields, config = read_decoder(
        values,
        max_position_embeddings=8192,
        sliding_window=4096,
        tie_word_embeddings=True,
        bos_token_id=5,
        eos_token_id=255001,
    )
    config = replace(
        config,
        o_bias=config.qkv_bias,
        windows=windows_from(fields, config.n_layers, every=4),
        rms_eps=fields.number("layer_norm_eps", 1e-5),
        centred_norms=True,
        logit_factor=fields.number("logit_scale", 0.0625),
    )
    return replace(config, ropes=ropes_without_full(config))


def muse_glimmer(values: JsonObject) -> ModelConfig:
    """Muse-Glimmer: layers without a theta of their own do not rotate; each fourth one, counted
    back from the last, sees all and is such a one unless the file says otherwise.
    """
    fields, config = read_decoder(
        values,
        max_position_embeddings=131072,
        num_key_value_heads=2,
        head_dim=128,
        sliding_window=2048,
        rms_norm_eps=1e-5,
        bos_token_id=200000,
        eos_token_id=200001,
    )
    if config.qkv_bias:
        raise ModelError("config.json: attention_bias is not supported")
    layers = range(config.n_layers)
    sees_all = [(config.n_layers - 1 - layer) % 4 == 0 for layer in layers]
    rope, window = config.rope(0), window_of(fields)
    assert rope is not None
    thetas = fields.get("layer_rope_theta")
    if thetas is None:
        thetas = [0 if whole else rope.theta for whole in sees_all]
    supported = 0, rope.theta
    if (
        not isinstance(thetas, list)
        or len(thetas) != len(layers)
        or any(theta not in supported for theta in thetas)
    ):
        fields.reject("layer_rope_theta", thetas, f"{len(layers)} times 0 or {rope.theta:g}")
    usual = tuple(0 if whole else window for whole in sees_all)
    return replace(
        config,
        windows=windows_by_type(fields, config.n_layers) or usual,
        ropes=tuple(rope if theta else None for theta in thetas),
        qk_norm=True,
        float32_norms=True,
        post_norm_eps=fields.number("post_norm_eps", 1e-8),
        attention_gate=True,
        gates_apart=True,
        query_scalar=config.head_dim / fields.number("qk_scale_factor", 3.87) ** 2,
        logit_factor=fields.number("output_multiplier", 256**0.5 / 6656**0.5),
        logit_softcap=fields.number("final_logit_softcapping", 20.0),
    )


def granite(values: JsonObject) -> ModelConfig:
    fields, config = read_decoder(values, max_position_embeddings=2048)
    return replace(
        config,
        o_bias=config.qkv_bias,
        mlp_bias=fields.flag("mlp_bias"),
        embed_factor=fields.number("embedding_multiplier", 1.0),
        residual_factor=fields.number("residual_multiplier", 1.0),
        query_scalar=fields.number("attention_multiplier", 1.0) ** -2,
        logit_factor=1.0 / fields.number("logits_scaling", 1.0),
    )
