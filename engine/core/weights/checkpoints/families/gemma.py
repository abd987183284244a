"""Readers of config.json: the Gemmas."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from jitney.engine.common.errors import ModelError
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.core.weights.checkpoints.config_fields import MOST, Fields
from jitney.engine.core.weights.checkpoints.families.shared import read_decoder, windows_from
from jitney.engine.core.weights.checkpoints.layer_configs import (
    ExpertsConfig,
    FullHeads,
)
from jitney.engine.core.weights.checkpoints.layer_patterns import ropes_by_window
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.rope_config import hf_full_rope, hf_local_rope

#: What Gemma 4's files may leave out.
_GEMMA4: JsonDict = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


_GEMMA4_ROPE: JsonDict = {
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


def gemma2(values: JsonObject) -> ModelConfig:
    defaults = {
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    return _gemma(defaults | dict(values), every=2)


def gemma3(values: JsonObject) -> ModelConfig:
    """Gemma 3: layers with a window have a theta of their own."""
    settings = {"max_position_embeddings": 131072, "rope_theta": 1e6} | dict(values)
    fields = Fields(settings, "config.json")
    config = _gemma(settings, every=6)
    theta = fields.number("rope_local_base_freq", 10000.0)
    local = hf_local_rope(fields, config.context_length, config.head_dim, theta)
    return replace(config, qk_norm=True, ropes=ropes_by_window(config, local))


def gemma4(values: JsonObject) -> ModelConfig:
    """Gemma 4: layers that see all have heads of their own, which may serve as keys and values; the
    last layers may read the keys and values of others, and layers have numbers of a token of their
    own.
    """
    settings = _GEMMA4 | dict(values)
    if settings.get("rope_parameters") is None:
        settings["rope_parameters"] = _GEMMA4_ROPE
    fields, config = read_decoder(settings, partial(hf_local_rope, theta=10000.0))
    if fields.get("use_bidirectional_attention") not in (None, "vision"):
        raise ModelError("config.json: use_bidirectional_attention is not supported for text")
    layers = config.n_layers
    # The last layer sees all, whatever `layer_types` says: so transformers has it.
    config = replace(config, windows=(*windows_from(fields, layers, every=6)[:-1], 0))
    heads = _gemma4_full_heads(fields, config)
    local = config.rope(0)
    full = hf_full_rope(fields, config.context_length, heads.head_dim)
    shared = fields.integer("num_kv_shared_layers", 0, layers - 1, default=0)
    config = replace(
        config,
        full_heads=heads,
        ropes=tuple(local if window else full for window in config.windows),
        o_bias=config.qkv_bias,
        qk_norm=True,
        query_scalar=1.0,
        logit_softcap=fields.number_or_zero("final_logit_softcapping"),
        n_kv_readers=shared,
        reader_width=1 + fields.flag("use_double_wide_mlp"),
        layer_input_size=_gemma4_layer_inputs(fields, config),
    )
    return _with_gemma4_experts(fields, config) if fields.flag("enable_moe_block") else config


def gemma4_unified(values: JsonObject) -> ModelConfig:
    """Gemma 4 12B, whose class has no experts and no layer inputs."""
    defaults = {"max_position_embeddings": 262144, "sliding_window": 1024}
    missing = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
    return gemma4(defaults | dict(values) | missing)


def _gemma4_layer_inputs(fields: Fields, config: ModelConfig) -> int:
    """Numbers of a token that each layer has of its own."""
    own = fields.integer("hidden_size_per_layer_input", 0, MOST.width, default=256)
    rows = fields.integer("vocab_size_per_layer_input", 1, MOST.vocab, default=config.vocab_size)
    if own and rows != config.vocab_size:
        fields.reject("vocab_size_per_layer_input", rows, f"vocab_size ({config.vocab_size})")
    return own


def _gemma4_full_heads(fields: Fields, config: ModelConfig) -> FullHeads:
    """Heads of the layers that see all. transformers 5.24 writes what is different of each layer in
    a table by its number, published files have keys of their own.
    """
    as_values, heads = fields.flag("attention_k_eq_v"), config.n_kv_heads
    if fields.get("per_layer_config") is None:
        if as_values:
            heads = fields.integer("num_global_key_value_heads", 1, config.n_heads, default=heads)
        dim = fields.integer("global_head_dim", 2, MOST.width, default=512)
        return FullHeads(heads, dim, 2 - as_values)
    tables = Fields(fields.table("per_layer_config"), "config.json: per_layer_config")
    kinds = set()
    for layer, window in enumerate(config.windows):
        own = Fields(tables.table(str(layer)), f"{tables.where}: {layer}")
        dim = own.integer("head_dim", 2, MOST.width, default=config.head_dim)
        count = own.integer("num_key_value_heads", 1, config.n_heads, default=heads)
        if window and (dim, count) != (config.head_dim, heads):
            tables.reject(str(layer), own.values, "left out: the layer has a window")
        if not window:
            kinds.add(FullHeads(count, dim, 2 - as_values))
    if len(kinds) > 1:
        raise ModelError(f"{tables.where}: layers that see all have different heads")
    return kinds.pop()


def _with_gemma4_experts(fields: Fields, config: ModelConfig) -> ModelConfig:
    """With experts beside the feed-forward that all rows go through."""
    experts = ExpertsConfig(
        fields.integer("num_experts", 1, MOST.experts),
        fields.integer("top_k_experts", 1, MOST.experts),
        renormalised=True,
        shared_size=config.intermediate_size,
        shared_gate=False,
    )
    inner = fields.integer("moe_intermediate_size", 1, MOST.width)
    return replace(config, intermediate_size=inner, experts=experts)


def _gemma(values: JsonObject, every: int) -> ModelConfig:
    """Fields that the Gemmas share; every: without `layer_types`, one layer in `every` sees all."""
    fields, config = read_decoder(
        values,
        hf_full_rope,
        num_key_value_heads=4,
        head_dim=256,
        sliding_window=4096,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_id=1,
    )
    if fields.flag("use_bidirectional_attention"):
        raise ModelError("config.json: use_bidirectional_attention is not supported")
    return replace(
        config,
        windows=windows_from(fields, config.n_layers, every),
        o_bias=config.qkv_bias,
        float32_norms=True,
        query_scalar=fields.number("query_pre_attn_scalar"),
        attention_softcap=fields.number_or_zero("attn_logit_softcapping"),
        logit_softcap=fields.number_or_zero("final_logit_softcapping"),
    )
