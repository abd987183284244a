"""Readers of config.json: families with latent attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jitney.engine.common.errors import ModelError
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.core.weights.checkpoints.config_fields import MOST, Fields
from jitney.engine.core.weights.checkpoints.families.shared import (
    check_kinds,
    clustered_experts,
    dense_among,
    read_decoder,
)
from jitney.engine.core.weights.checkpoints.layer_configs import LatentConfig
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.rope_config import hf_part_rope, score_factor

#: Mistral Small 4's rotary positions where its file does not say.
_MISTRAL4_ROPE: JsonDict = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _read_latent(values: JsonObject, **defaults: Any) -> tuple[Fields, ModelConfig]:
    """Latent attention, and the mixture that goes with it, but for how experts are chosen."""
    shared: JsonDict = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "n_routed_experts": 64}
    shared |= {"num_experts_per_tok": 8, "moe_intermediate_size": 2048}
    settings = shared | defaults | dict(values)
    fields = Fields(settings, "config.json")
    if fields.flag("attention_bias") or fields.flag("mlp_bias"):
        raise ModelError("config.json: biases of models with latent attention are not supported")
    query_rank = 0
    if fields.get("q_lora_rank") is not None:
        query_rank = fields.integer("q_lora_rank", 1, MOST.width)
    latent = LatentConfig(
        rank=fields.integer("kv_lora_rank", 2, MOST.width),
        plain_dim=fields.integer("qk_nope_head_dim", 1, MOST.width, default=128),
        rotated_dim=fields.integer("qk_rope_head_dim", 2, MOST.width),
        value_dim=fields.integer("v_head_dim", 1, MOST.width, default=128),
        query_rank=query_rank,
        paired=fields.flag("rope_interleave", True),
    )
    one_head = {"head_dim": latent.rotated_dim, "num_key_value_heads": 1}
    _, config = read_decoder(settings | one_head, hf_part_rope)
    rope = config.rope(0)
    assert rope is not None
    factor = score_factor(fields, rope.scaling)
    inner = fields.integer("moe_intermediate_size", 1, MOST.width)
    shared_size = inner * fields.integer("n_shared_experts", 0, MOST.experts, default=1)
    experts = clustered_experts(fields, shared_size)
    dense = range(fields.integer("first_k_dense_replace", 0, MOST.layers, default=0))
    return fields, replace(
        config,
        head_dim=latent.rank + latent.rotated_dim,
        query_scalar=latent.query_dim / factor**2,
        latent=latent,
        intermediate_size=inner,
        experts=dense_among(experts, fields, dense),
    )


def deepseek_v2(values: JsonObject) -> ModelConfig:
    """DeepSeek-V2 and V2-Lite: of groups of experts the best one of each counts."""
    fields, config = _read_latent(
        values,
        max_position_embeddings=2048,
        n_shared_experts=2,
        moe_intermediate_size=1407,
        q_lora_rank=1536,
    )
    assert config.experts is not None
    experts = replace(config.experts, renormalised=False, cluster_best=1)
    method = fields.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        fields.reject("topk_method", method, "greedy or group_limited_greedy")
    if method == "greedy":
        experts = replace(experts, clusters=1, chosen_clusters=1)
    return replace(config, experts=experts)


def deepseek_v3(values: JsonObject) -> ModelConfig:
    fields, config = _read_latent(
        values,
        max_position_embeddings=4096,
        q_lora_rank=1536,
        n_routed_experts=256,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
    )
    return _with_sigmoids(_with_prediction_layers(config, fields))


def _with_prediction_layers(config: ModelConfig, fields: Fields) -> ModelConfig:
    """With the layers behind the last one that files may have."""
    count = fields.integer("num_nextn_predict_layers", 0, MOST.layers, default=0)
    return replace(config, n_prediction_layers=count)


def _with_sigmoids(config: ModelConfig) -> ModelConfig:
    """With experts that are chosen as DeepSeek-V3's: each by itself, and by a bias of its own."""
    assert config.experts is not None
    experts = replace(config.experts, scoring="sigmoid", choice_bias=True)
    return replace(config, experts=experts)


def glm4_moe_lite(values: JsonObject) -> ModelConfig:
    fields, config = _read_latent(
        values,
        max_position_embeddings=202752,
        rms_norm_eps=1e-5,
        q_lora_rank=768,
        qk_nope_head_dim=192,
        v_head_dim=256,
        num_experts_per_tok=4,
        moe_intermediate_size=1536,
        routed_scaling_factor=1.8,
    )
    kinds, layers = fields.get("mlp_layer_types"), config.n_layers
    if kinds is None:
        dense = range(fields.integer("first_k_dense_replace", 0, layers, default=1))
        kinds = ["dense" if layer in dense else "sparse" for layer in range(layers)]
    check_kinds(fields, "mlp_layer_types", kinds, layers, ("dense", "sparse"))
    assert config.experts is not None
    dense = [layer for layer, kind in enumerate(kinds) if kind == "dense"]
    experts = replace(config.experts, dense_layers=frozenset(), dense_size=0)
    config = replace(config, experts=dense_among(experts, fields, dense))
    return _with_sigmoids(_with_prediction_layers(config, fields))


def mistral4(values: JsonObject) -> ModelConfig:
    """Mistral Small 4; without rotary settings it has YaRN's of 128 times 8,192 tokens."""
    defaults: JsonDict = {}
    if values.get("rope_parameters") is None and values.get("rope_scaling") is None:
        defaults["rope_parameters"] = _MISTRAL4_ROPE
    _, config = _read_latent(
        values,
        max_position_embeddings=1048576,
        q_lora_rank=1024,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        n_routed_experts=128,
        num_experts_per_tok=4,
        **defaults,
    )
    return config
