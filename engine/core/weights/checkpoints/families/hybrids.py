"""Readers of config.json: families with layers of Mamba-2 or of short convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jitney.engine.common.errors import ModelError
from jitney.engine.common.requests import JsonObject
from jitney.engine.core.weights.checkpoints.config_fields import MOST, Fields
from jitney.engine.core.weights.checkpoints.families.dense import granite
from jitney.engine.core.weights.checkpoints.families.shared import (
    clustered_experts,
    dense_among,
    read_decoder,
    recurrent_layers,
)
from jitney.engine.core.weights.checkpoints.layer_configs import (
    ExpertsConfig,
    MambaConfig,
    ShortConvConfig,
)
from jitney.engine.core.weights.checkpoints.layer_patterns import halves
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig

#: Names of layers with attention, and of layers of Mamba-2, in files of hybrid models.
_ATTENTION = ("attention", "full_attention")
_MAMBA = ("mamba", "linear_attention")


def lfm2(values: JsonObject) -> ModelConfig:
    """LFM2; its first files call some keys tie_embedding and block_ff_dim."""
    renamed = {
        "rms_norm_eps": values.get("norm_eps", 1e-5),
        "tie_word_embeddings": values.get("tie_embedding", values.get("tie_word_embeddings", True)),
        "intermediate_size": values.get("block_ff_dim", values.get("intermediate_size", 12288)),
    }
    fields, config = read_decoder(
        dict(values) | renamed,
        max_position_embeddings=128000,
        num_key_value_heads=8,
        rope_theta=1e6,
        bos_token_id=1,
        eos_token_id=2,
    )
    if fields.flag("conv_bias"):
        raise ModelError("config.json: conv_bias is not supported")
    kinds, layers = fields.get("layer_types"), config.n_layers
    if kinds is None:
        attending = fields.get("full_attn_idxs", list(range(layers)))
        if not isinstance(attending, list):
            fields.reject("full_attn_idxs", attending, "numbers of layers")
        kinds = ["full_attention" if layer in attending else "conv" for layer in range(layers)]
    conv = ShortConvConfig(
        recurrent_layers(fields, kinds, layers, "conv"),
        config.hidden_size,
        fields.integer("conv_L_cache", 2, MOST.taps, default=3),
    )
    return replace(
        config,
        intermediate_size=_lfm2_inner(fields, config.intermediate_size),
        qkv_bias=False,
        qk_norm=True,
        activation="silu",
        recurrent=conv,
    )


def lfm2_moe(values: JsonObject) -> ModelConfig:
    """LFM2's mixtures, whose first layers have no experts."""
    settings = {"intermediate_size": 7168} | dict(values) | {"block_auto_adjust_ff_dim": False}
    fields, config = Fields(settings, "config.json"), lfm2(settings)
    experts = ExpertsConfig(
        fields.integer("num_experts", 1, MOST.experts, default=32),
        fields.integer("num_experts_per_tok", 1, MOST.experts, default=4),
        fields.flag("norm_topk_prob", True),
        scoring="sigmoid",
        choice_bias=fields.flag("use_expert_bias", True),
        share_factor=fields.number("routed_scaling_factor", 1.0),
    )
    dense = fields.integer("num_dense_layers", 0, config.n_layers, default=2)
    return replace(
        config,
        intermediate_size=fields.integer("moe_intermediate_size", 1, MOST.width, default=1792),
        experts=dense_among(experts, fields, range(dense)),
    )


def _lfm2_inner(fields: Fields, inner: int) -> int:
    """Columns of the feed-forward, which are fewer than the file says unless it says otherwise."""
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return inner
    factor = fields.number("block_ffn_dim_multiplier", 1.0)
    step = fields.integer("block_multiple_of", 1, MOST.width, default=256)
    return -(-int(factor * int(2 * inner / 3)) // step) * step


def granite4(values: JsonObject) -> ModelConfig:
    """Granite 4: layers that attend between layers of Mamba-2; of a mixture all rows go through
    `shared_mlp`, too, which is the only feed-forward of the others.
    """
    fields = Fields(values, "config.json")
    count = fields.integer("num_local_experts", 0, MOST.experts, default=8)
    shared = fields.integer("shared_intermediate_size", 1, MOST.width, default=1024)
    inner = fields.integer("intermediate_size", 1, MOST.width, default=11008) if count else shared
    config = granite(dict(values) | {"intermediate_size": inner})
    if fields.get("position_embedding_type") != "rope":
        config = replace(config, ropes=(None,))
    if count:
        chosen = fields.integer("num_experts_per_tok", 1, MOST.experts, default=2)
        experts = ExpertsConfig(count, chosen, True, shared_size=shared, shared_gate=False)
        config = replace(config, experts=experts)
    kinds = fields.get("layer_types", fields.get("layers_block_type"))
    if kinds is None:
        kinds = ["mamba"] * config.n_layers
    kinds = _checked_kinds(fields, "layer_types", kinds, (*_MAMBA, *_ATTENTION))
    if len(kinds) != config.n_layers:
        fields.reject("layer_types", kinds, f"{config.n_layers} kinds of layers")
    layers = frozenset(layer for layer, kind in enumerate(kinds) if kind in _MAMBA)
    if not layers:
        return config
    if fields.flag("mamba_proj_bias"):
        raise ModelError("config.json: mamba_proj_bias is not supported")
    heads = fields.integer("mamba_n_heads", 1, MOST.width, default=128)
    size = fields.get("mamba_d_head", "auto")
    expanded = fields.integer("mamba_expand", 1, MOST.width, default=2) * config.hidden_size
    mamba = MambaConfig(
        layers,
        groups=fields.integer("mamba_n_groups", 1, MOST.width, default=1),
        heads=heads,
        head_dim=expanded // heads
        if size == "auto"
        else fields.integer("mamba_d_head", 1, MOST.width),
        state_size=fields.integer("mamba_d_state", 1, MOST.width, default=256),
        taps=fields.integer("mamba_d_conv", 2, MOST.taps, default=4),
        conv_bias=fields.flag("mamba_conv_bias", True),
        step_limits=_step_limits(fields),
    )
    return replace(config, recurrent=mamba)


def _checked_kinds(fields: Fields, key: str, kinds: Any, supported: Sequence[str]) -> list[str]:
    """The kinds of layers; ModelError unless it is a list of known ones, some of which attend."""
    if not isinstance(kinds, list) or any(kind not in supported for kind in kinds):
        fields.reject(key, kinds, f"a list of {', '.join(supported)}")
    if not any(kind in _ATTENTION for kind in kinds):
        raise ModelError(f"config.json: {key}: a model in which no layer attends is not supported")
    return kinds


def _step_limits(fields: Fields) -> tuple[float, float]:
    """`time_step_limit`, in which transformers writes infinity as a table."""
    value = fields.get("time_step_limit", [0.0, math.inf])
    limits = value
    if isinstance(value, list):
        limits = [math.inf if one == {"__float__": "Infinity"} else one for one in value]
    sound = isinstance(limits, list) and len(limits) == 2
    if not sound or not all(type(one) in (int, float) and one >= 0 for one in limits):
        fields.reject("time_step_limit", value, "two numbers that are not negative")
    return float(limits[0]), float(limits[1])


def nemotron_h(values: JsonObject) -> ModelConfig:
    """Nemotron-H and Nemotron 3: each stored layer is a half of ours, one that mixes rows or a
    feed-forward behind such a one; nothing is rotated.

    Steps are clamped by `time_step_limit`; `time_step_min`, by which transformers 5.24 clamps those
    of prompts and not those of tokens that follow, only says how weights were drawn.
    """
    kinds = _nemotron_kinds(Fields(values, "config.json"))
    pairs, counted = halves(kinds), dict(values)
    counted |= {"num_hidden_layers": len(pairs), "hidden_act": "silu"}
    counted["rms_norm_eps"] = values.get("layer_norm_epsilon", 1e-5)
    fields, config = read_decoder(
        counted,
        max_position_embeddings=4096,
        num_key_value_heads=8,
        head_dim=128,
        bos_token_id=1,
        eos_token_id=2,
        n_routed_experts=8,
        num_experts_per_tok=2,
    )
    supported = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"}
    for key, name in supported.items():
        if fields.get(key, name) != name:
            raise ModelError(f"config.json: {key} other than {name} is not supported")
    for key in ("mlp_bias", "use_bias", "mamba_proj_bias", "attention_bias"):
        if fields.flag(key):
            raise ModelError(f"config.json: {key} is not supported")
    if fields.get("moe_latent_size") is not None:
        raise ModelError("config.json: moe_latent_size is not supported")
    first = [kinds[one] for one, _ in pairs]
    mamba = MambaConfig(
        frozenset(layer for layer, kind in enumerate(first) if kind in _MAMBA),
        groups=fields.integer("n_groups", 1, MOST.width, default=8),
        heads=fields.integer("mamba_num_heads", 1, MOST.width, default=128),
        head_dim=fields.integer("mamba_head_dim", 1, MOST.width, default=64),
        state_size=fields.integer("ssm_state_size", 1, MOST.width, default=128),
        taps=fields.integer("conv_kernel", 2, MOST.taps, default=4),
        conv_bias=fields.flag("use_conv_bias", True),
        step_limits=_step_limits(fields),
    )
    config = replace(
        config,
        ropes=(None,),
        activation="relu2",
        recurrent=mamba if mamba.layers else None,
        bare_layers=frozenset(layer for layer, (_, fed) in enumerate(pairs) if fed < 0),
        stored_halves=pairs,
    )
    mixtures = frozenset(
        layer for layer, (_, fed) in enumerate(pairs) if fed >= 0 and kinds[fed] == "moe"
    )
    return _nemotron_experts(fields, config, mixtures) if mixtures else config


def _nemotron_kinds(fields: Fields) -> list[str]:
    """The stored layers, by transformers' names or by a pattern of letters."""
    kinds = fields.get("layers_block_type", fields.get("layer_types"))
    pattern = fields.get("hybrid_override_pattern")
    if kinds is None and isinstance(pattern, str):
        letters = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
        kinds = [letters.get(letter, letter) for letter in pattern]
    supported = *_MAMBA, *_ATTENTION, "mlp", "moe"
    return _checked_kinds(fields, "layers_block_type", kinds, supported)


def _nemotron_experts(fields: Fields, config: ModelConfig, mixtures: frozenset[int]) -> ModelConfig:
    """With experts in some layers."""
    own = fields.integer("moe_shared_expert_intermediate_size", 1, MOST.width, default=7688)
    shared = fields.integer("n_shared_experts", 0, MOST.experts, default=1)
    experts = clustered_experts(fields, own if shared else 0)
    experts = replace(experts, scoring="sigmoid", choice_bias=True)
    dense = frozenset(range(config.n_layers)) - config.bare_layers - mixtures
    return replace(
        config,
        intermediate_size=fields.integer("moe_intermediate_size", 1, MOST.width, default=7688),
        experts=dense_among(experts, fields, dense),
    )
