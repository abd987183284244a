"""The families of models that are read, and what each adds to the common keys of its files.

To add one: a `Family` in FAMILIES, and its module in `jitney.engine.core.models.registry`.
Jax-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jitney.engine.common.errors import ModelError
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.core.weights.checkpoints import gguf_families
from jitney.engine.core.weights.checkpoints.config_fields import MOST, Fields, TensorFields
from jitney.engine.core.weights.checkpoints.layer_patterns import (
    halves,
    ropes_by_window,
    ropes_without_full,
    windows_of,
)
from jitney.engine.core.weights.checkpoints.model_config import (
    Activation,
    DeltaNetConfig,
    EncoderConfig,
    ExpertsConfig,
    FullHeads,
    LatentConfig,
    MambaConfig,
    ModelConfig,
    RopeConfig,
    RopeScaling,
    ShortConvConfig,
)
from jitney.engine.core.weights.checkpoints.rope_config import (
    RopeReader,
    extended_context,
    hf_full_rope,
    hf_local_rope,
    hf_part_rope,
    hf_rope,
    score_factor,
)

#: transformers' names of activations -> ours.
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
#: The same of encoders.
_ENCODER_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
#: What gpt-oss's gates must be, as `jitney.kernels.experts` has them.
_GPT_OSS_GATES = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
#: gpt-oss's rotary positions where its file does not say.
_GPT_OSS_ROPE: JsonDict = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
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
#: Names of layers with attention, and of layers of Mamba-2, in files of hybrid models.
_ATTENTION = ("attention", "full_attention")
_MAMBA = ("mamba", "linear_attention")


def _read_decoder(
    values: JsonObject, read_rope: RopeReader = hf_rope, **defaults: Any
) -> tuple[Fields, ModelConfig]:
    """The keys of config.json that all decoders share, and their configuration.

    read_rope: of the layers that see all. defaults: what transformers assumes for keys that are
    left out; null is not left out: Mistral's `sliding_window: null` means none, its absence 4096.
    """
    fields = Fields(defaults | dict(values), "config.json")
    heads = fields.integer("num_attention_heads", 1, MOST.width)
    hidden = fields.integer("hidden_size", 1, MOST.width)
    layers = fields.integer("num_hidden_layers", 1, MOST.layers)
    context = fields.integer("max_position_embeddings", 1, MOST.context)
    head_dim = fields.integer("head_dim", 2, MOST.width, default=hidden // heads)
    rope = read_rope(fields, context, head_dim)
    return fields, ModelConfig(
        architecture="",
        vocab_size=fields.integer("vocab_size", 2, MOST.vocab),
        hidden_size=hidden,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=fields.integer("num_key_value_heads", 1, heads, default=heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size", 1, MOST.width),
        windows=(0,) * layers,
        context_length=extended_context(context, rope.scaling),
        ropes=(rope,),
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=fields.flag("attention_bias"),
        activation=_activation(fields),
        bos_id=fields.token_id("bos_token_id"),
        eos_ids=fields.token_ids("eos_token_id"),
    )


def _activation(
    fields: Fields, known: Mapping[str, Activation] = _ACTIVATIONS, default: str = "silu"
) -> Activation:
    """`hidden_activation` goes before `hidden_act`: Gemma's first files name another there."""
    key = "hidden_act" if fields.get("hidden_activation") is None else "hidden_activation"
    name = fields.get(key, default)
    if not isinstance(name, str) or name not in known:
        names = ", ".join(known)
        raise ModelError(f"config.json: {key} {str(name)[:40]!r} is not supported; known: {names}")
    return known[name]


def _window(fields: Fields) -> int:
    """`sliding_window`; 0 for none."""
    if fields.get("sliding_window") is None:
        return 0
    return fields.integer("sliding_window", 1, MOST.context)


def _windows_by_type(fields: Fields, layers: int) -> tuple[int, ...] | None:
    """Windows of the layers as `layer_types` names them; None if it is left out."""
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
        fields.reject("layer_types", kinds, f"{layers} times full_attention or sliding_attention")
    windows = {"full_attention": 0, "sliding_attention": _window(fields)}
    return tuple(windows[kind] for kind in kinds)


def _windows(fields: Fields, layers: int, every: int) -> tuple[int, ...]:
    """Windows by `layer_types`; without them each `every`-th layer, counted from 1, sees all, or by
    `sliding_window_pattern`.
    """
    typed = _windows_by_type(fields, layers)
    if typed is not None:
        return typed
    pattern = fields.integer("sliding_window_pattern", 1, MOST.layers, default=every)
    return windows_of(pattern, _window(fields), layers)


def _llama(values: JsonObject) -> ModelConfig:
    fields, config = _read_decoder(values, max_position_embeddings=2048)
    return replace(config, o_bias=config.qkv_bias, mlp_bias=fields.flag("mlp_bias"))


def _mistral(values: JsonObject) -> ModelConfig:
    fields, config = _read_decoder(
        values, max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096
    )
    return replace(config, windows=(_window(fields),) * config.n_layers)


def _qwen2(values: JsonObject) -> ModelConfig:
    fields, config = _qwen(values, num_key_value_heads=32)
    return replace(config, qkv_bias=True, windows=_qwen_windows(fields, config.n_layers))


def _qwen3(values: JsonObject) -> ModelConfig:
    fields, config = _read_qwen3(values, num_key_value_heads=32, head_dim=128)
    return replace(config, windows=_qwen_windows(fields, config.n_layers))


def _read_qwen3(values: JsonObject, **defaults: Any) -> tuple[Fields, ModelConfig]:
    """Fields that Qwen3's dense models and mixtures share; see `_read_decoder`."""
    fields, config = _qwen(values, **defaults)
    return fields, replace(config, o_bias=config.qkv_bias, qk_norm=True)


def _qwen(values: JsonObject, **defaults: Any) -> tuple[Fields, ModelConfig]:
    return _read_decoder(values, max_position_embeddings=32768, sliding_window=4096, **defaults)


def _qwen_windows(fields: Fields, layers: int) -> tuple[int, ...]:
    """Without types, layers have windows from `max_window_layers` on."""
    typed = _windows_by_type(fields, layers)
    if not fields.flag("use_sliding_window"):
        return (0,) * layers
    if typed is not None:
        return typed
    first = min(fields.integer("max_window_layers", 0, MOST.layers, default=28), layers)
    return (0,) * first + (_window(fields),) * (layers - first)


def _qwen3_moe(values: JsonObject) -> ModelConfig:
    """Qwen3's mixtures. transformers 5 writes num_local_experts, older releases num_experts.

    With `use_sliding_window` every layer has the window: transformers reads neither `layer_types`
    nor `max_window_layers` here.
    """
    fields, config = _read_qwen3(values, num_key_value_heads=4)
    window = _window(fields) if fields.flag("use_sliding_window") else 0
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
    return _dense_among(experts, fields, dense)


def _dense_among(experts: ExpertsConfig, fields: Fields, dense: Iterable[int]) -> ExpertsConfig:
    """With one feed-forward of `intermediate_size` in these layers."""
    layers = frozenset(dense)
    if not layers:
        return experts
    size = fields.integer("intermediate_size", 1, MOST.width)
    return replace(experts, dense_layers=layers, dense_size=size)


def _qwen3_5(values: JsonObject) -> ModelConfig:
    fields, config = _read_decoder(
        values, max_position_embeddings=32768, head_dim=256, partial_rotary_factor=0.25
    )
    kinds = fields.get("layer_types")
    if kinds is None:
        every = fields.integer("full_attention_interval", 1, MOST.layers, default=4)
        layers = frozenset(i for i in range(config.n_layers) if (i + 1) % every)
    else:
        layers = _recurrent_layers(fields, kinds, config.n_layers, "linear_attention")
    delta_net = DeltaNetConfig(
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
        delta_net=delta_net,
        n_prediction_layers=_mtp_layers(fields),
    )


def _mtp_layers(fields: Fields) -> int:
    """Layers that predict further tokens; none with an embedding of their own is read."""
    count = fields.integer("mtp_num_hidden_layers", 0, MOST.layers, default=0)
    return 0 if fields.flag("mtp_use_dedicated_embeddings") else count


def _recurrent_layers(fields: Fields, kinds: Any, layers: int, name: str) -> frozenset[int]:
    """Which layers `layer_types` calls by that name."""
    known = ("full_attention", name)
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
        fields.reject("layer_types", kinds, f"{layers} times full_attention or {name}")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == name)


def _qwen3_5_moe(values: JsonObject) -> ModelConfig:
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
    config = _qwen3_5(settings | {"intermediate_size": inner})
    return replace(config, experts=experts)


def _qwen3_next(values: JsonObject) -> ModelConfig:
    """Qwen3-Next: a mixture of Qwen3.5 with more experts, whose shares may stay as they are."""
    settings = {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True}
    settings |= dict(values)
    fields = Fields(settings, "config.json")
    config = _qwen3_5_moe(settings)
    assert config.experts is not None
    experts = replace(config.experts, renormalised=fields.flag("norm_topk_prob"))
    return replace(config, experts=_with_dense_layers(experts, fields, config.n_layers))


def _read_latent(values: JsonObject, **defaults: Any) -> tuple[Fields, ModelConfig]:
    """Latent attention, and the mixture that goes with it, but for how experts are chosen."""
    shared: JsonDict = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_experts_per_tok": 8}
    settings = shared | {"moe_intermediate_size": 2048} | defaults | dict(values)
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
    _, config = _read_decoder(settings | one_head, hf_part_rope)
    rope = config.rope(0)
    assert rope is not None
    factor = score_factor(fields, rope.scaling)
    inner = fields.integer("moe_intermediate_size", 1, MOST.width)
    experts = ExpertsConfig(
        fields.integer("n_routed_experts", 1, MOST.experts, default=64),
        fields.integer("num_experts_per_tok", 1, MOST.experts),
        fields.flag("norm_topk_prob", True),
        shared_size=inner * fields.integer("n_shared_experts", 0, MOST.experts, default=1),
        shared_gate=False,
        clusters=fields.integer("n_group", 1, MOST.experts, default=1),
        chosen_clusters=fields.integer("topk_group", 1, MOST.experts, default=1),
        share_factor=fields.number("routed_scaling_factor", 1.0),
    )
    dense = range(fields.integer("first_k_dense_replace", 0, MOST.layers, default=0))
    return fields, replace(
        config,
        head_dim=latent.rank + latent.rotated_dim,
        query_scalar=latent.query_dim / factor**2,
        latent=latent,
        intermediate_size=inner,
        experts=_dense_among(experts, fields, dense),
    )


def _deepseek_v2(values: JsonObject) -> ModelConfig:
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


def _deepseek_v3(values: JsonObject) -> ModelConfig:
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


def _glm4_moe_lite(values: JsonObject) -> ModelConfig:
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
    known = ("dense", "sparse")
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
        fields.reject("mlp_layer_types", kinds, f"{layers} times dense or sparse")
    assert config.experts is not None
    dense = [layer for layer, kind in enumerate(kinds) if kind == "dense"]
    experts = replace(config.experts, dense_layers=frozenset(), dense_size=0)
    config = replace(config, experts=_dense_among(experts, fields, dense))
    return _with_sigmoids(_with_prediction_layers(config, fields))


def _mistral4(values: JsonObject) -> ModelConfig:
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


def _lfm2(values: JsonObject) -> ModelConfig:
    """LFM2; its first files call some keys tie_embedding and block_ff_dim."""
    renamed = {
        "rms_norm_eps": values.get("norm_eps", 1e-5),
        "tie_word_embeddings": values.get("tie_embedding", values.get("tie_word_embeddings", True)),
        "intermediate_size": values.get("block_ff_dim", values.get("intermediate_size", 12288)),
    }
    fields, config = _read_decoder(
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
        _recurrent_layers(fields, kinds, layers, "conv"),
        config.hidden_size,
        fields.integer("conv_L_cache", 2, MOST.taps, default=3),
    )
    return replace(
        config,
        intermediate_size=_lfm2_inner(fields, config.intermediate_size),
        qkv_bias=False,
        qk_norm=True,
        activation="silu",
        short_conv=conv,
    )


def _lfm2_moe(values: JsonObject) -> ModelConfig:
    """LFM2's mixtures, whose first layers have no experts."""
    settings = {"intermediate_size": 7168} | dict(values) | {"block_auto_adjust_ff_dim": False}
    fields, config = Fields(settings, "config.json"), _lfm2(settings)
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
        experts=_dense_among(experts, fields, range(dense)),
    )


def _lfm2_inner(fields: Fields, inner: int) -> int:
    """Columns of the feed-forward, which are fewer than the file says unless it says otherwise."""
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return inner
    factor = fields.number("block_ffn_dim_multiplier", 1.0)
    step = fields.integer("block_multiple_of", 1, MOST.width, default=256)
    return -(-int(factor * int(2 * inner / 3)) // step) * step


def _mixtral(values: JsonObject) -> ModelConfig:
    fields, config = _read_decoder(
        values, max_position_embeddings=131072, num_key_value_heads=8, rms_norm_eps=1e-5
    )
    experts = ExpertsConfig(
        fields.integer("num_local_experts", 1, MOST.experts, default=8),
        fields.integer("num_experts_per_tok", 1, MOST.experts, default=2),
        renormalised=True,
    )
    return replace(config, windows=(_window(fields),) * config.n_layers, experts=experts)


def _gpt_oss(values: JsonObject) -> ModelConfig:
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
    fields, config = _read_decoder(values, **defaults)
    for key, known in _GPT_OSS_GATES.items():
        if fields.number(key, known) != known:
            raise ModelError(f"config.json: {key} other than {known} is not supported")
    experts = ExpertsConfig(
        fields.integer("num_local_experts", 1, MOST.experts, default=128),
        fields.integer("num_experts_per_tok", 1, MOST.experts, default=4),
        renormalised=True,
    )
    return replace(
        config,
        windows=_windows(fields, config.n_layers, every=2),
        o_bias=config.qkv_bias,
        mlp_bias=True,
        attention_sinks=True,
        activation="clamped_silu",
        experts=experts,
    )


def _olmo2(values: JsonObject) -> ModelConfig:
    _, config = _read_decoder(values, max_position_embeddings=2048, rms_norm_eps=1e-5)
    return replace(config, o_bias=config.qkv_bias, wide_qk_norm=True)


def _olmo3(values: JsonObject) -> ModelConfig:
    """OLMo 3: layers with a window rotate without scaling."""
    fields, config = _read_decoder(
        values,
        hf_full_rope,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        sliding_window=4096,
    )
    windows = _windows(fields, config.n_layers, every=4)
    config = replace(config, o_bias=config.qkv_bias, wide_qk_norm=True, windows=windows)
    local = hf_local_rope(
        fields, config.context_length, config.head_dim, fields.number("rope_theta")
    )
    return replace(config, ropes=ropes_by_window(config, local))


def _ministral3(values: JsonObject) -> ModelConfig:
    fields, config = _read_decoder(
        values,
        max_position_embeddings=262144,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
    )
    return replace(config, windows=(_window(fields),) * config.n_layers)


def _smollm3(values: JsonObject) -> ModelConfig:
    """SmolLM3: some layers do not rotate, and may have a window instead."""
    fields, config = _read_decoder(
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
    typed = _windows_by_type(fields, layers)
    windows = (0,) * layers
    if fields.flag("use_sliding_window"):
        window = _window(fields)
        windows = typed or tuple(0 if own else window for own in rotates)
    return replace(
        config,
        o_bias=config.qkv_bias,
        mlp_bias=fields.flag("mlp_bias"),
        windows=windows,
        ropes=tuple(config.rope(0) if own else None for own in rotates),
    )


def _seed_oss(values: JsonObject) -> ModelConfig:
    fields, config = _read_decoder(
        values,
        max_position_embeddings=524288,
        num_key_value_heads=8,
        head_dim=128,
        attention_bias=True,
    )
    return replace(
        config, o_bias=fields.flag("attention_out_bias"), mlp_bias=fields.flag("mlp_bias")
    )


def _phi3(values: JsonObject) -> ModelConfig:
    fields, config = _read_decoder(
        values,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    )
    return replace(config, qkv_bias=False, windows=(_window(fields),) * config.n_layers)


def _glm4(values: JsonObject) -> ModelConfig:
    _, config = _read_decoder(
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


def _exaone4(values: JsonObject) -> ModelConfig:
    """EXAONE 4: where some layers have a window, those that see all do not rotate."""
    fields, config = _read_decoder(
        values, max_position_embeddings=2048, rms_norm_eps=1e-5, sliding_window=4096
    )
    config = replace(config, qk_norm=True)
    if not _window(fields):
        return config
    config = replace(config, windows=_windows(fields, config.n_layers, every=4))
    return replace(config, ropes=ropes_without_full(config))


def _cohere2(values: JsonObject) -> ModelConfig:
    """Cohere 2: layers that see all do not rotate."""
    fields, config = _read_decoder(
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
        windows=_windows(fields, config.n_layers, every=4),
        rms_eps=fields.number("layer_norm_eps", 1e-5),
        centred_norms=True,
        logit_factor=fields.number("logit_scale", 0.0625),
    )
    return replace(config, ropes=ropes_without_full(config))


def _muse_glimmer(values: JsonObject) -> ModelConfig:
    """Muse-Glimmer: layers without a theta of their own do not rotate; each fourth one, counted
    back from the last, sees all and is such a one unless the file says otherwise.
    """
    fields, config = _read_decoder(
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
    rope, window = config.rope(0), _window(fields)
    assert rope is not None
    thetas = fields.get("layer_rope_theta")
    if thetas is None:
        thetas = [0 if whole else rope.theta for whole in sees_all]
    known = 0, rope.theta
    if (
        not isinstance(thetas, list)
        or len(thetas) != len(layers)
        or any(theta not in known for theta in thetas)
    ):
        fields.reject("layer_rope_theta", thetas, f"{len(layers)} times 0 or {rope.theta:g}")
    usual = tuple(0 if whole else window for whole in sees_all)
    return replace(
        config,
        windows=_windows_by_type(fields, config.n_layers) or usual,
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


def _granite(values: JsonObject) -> ModelConfig:
    fields, config = _read_decoder(values, max_position_embeddings=2048)
    return replace(
        config,
        o_bias=config.qkv_bias,
        mlp_bias=fields.flag("mlp_bias"),
        embed_factor=fields.number("embedding_multiplier", 1.0),
        residual_factor=fields.number("residual_multiplier", 1.0),
        query_scalar=fields.number("attention_multiplier", 1.0) ** -2,
        logit_factor=1.0 / fields.number("logits_scaling", 1.0),
    )


def _granite4(values: JsonObject) -> ModelConfig:
    """Granite 4: layers that attend between layers of Mamba-2; of a mixture all rows go through
    `shared_mlp`, too, which is the only feed-forward of the others.
    """
    fields = Fields(values, "config.json")
    count = fields.integer("num_local_experts", 0, MOST.experts, default=8)
    shared = fields.integer("shared_intermediate_size", 1, MOST.width, default=1024)
    inner = fields.integer("intermediate_size", 1, MOST.width, default=11008) if count else shared
    config = _granite(dict(values) | {"intermediate_size": inner})
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
    return replace(config, mamba=mamba)


def _checked_kinds(fields: Fields, key: str, kinds: Any, known: Sequence[str]) -> list[str]:
    """The kinds of layers; ModelError unless it is a list of known ones, some of which attend."""
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        fields.reject(key, kinds, f"a list of {', '.join(known)}")
    if not any(kind in _ATTENTION for kind in kinds):
        raise ModelError(f"config.json: {key}: a model in which no layer attends is not supported")
    return kinds


def _step_limits(fields: Fields) -> tuple[float, float]:
    """`time_step_limit`, in which transformers writes infinity as a table."""
    given = fields.get("time_step_limit", [0.0, math.inf])
    limits = given
    if isinstance(given, list):
        limits = [math.inf if one == {"__float__": "Infinity"} else one for one in given]
    sound = isinstance(limits, list) and len(limits) == 2
    if not sound or not all(type(one) in (int, float) and one >= 0 for one in limits):
        fields.reject("time_step_limit", given, "two numbers that are not negative")
    return float(limits[0]), float(limits[1])


def _nemotron_h(values: JsonObject) -> ModelConfig:
    """Nemotron-H and Nemotron 3: each stored layer is a half of ours, one that mixes rows or a
    feed-forward behind such a one; nothing is rotated.

    Steps are clamped by `time_step_limit`; `time_step_min`, by which transformers 5.24 clamps those
    of prompts and not those of tokens that follow, only says how weights were drawn.
    """
    kinds = _nemotron_kinds(Fields(values, "config.json"))
    pairs, counted = halves(kinds), dict(values)
    counted |= {"num_hidden_layers": len(pairs), "hidden_act": "silu"}
    counted["rms_norm_eps"] = values.get("layer_norm_epsilon", 1e-5)
    fields, config = _read_decoder(
        counted,
        max_position_embeddings=4096,
        num_key_value_heads=8,
        head_dim=128,
        bos_token_id=1,
        eos_token_id=2,
    )
    known = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"}
    for key, name in known.items():
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
        mamba=mamba if mamba.layers else None,
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
    known = *_MAMBA, *_ATTENTION, "mlp", "moe"
    return _checked_kinds(fields, "layers_block_type", kinds, known)


def _nemotron_experts(fields: Fields, config: ModelConfig, mixtures: frozenset[int]) -> ModelConfig:
    """With experts in some layers."""
    own = fields.integer("moe_shared_expert_intermediate_size", 1, MOST.width, default=7688)
    shared = fields.integer("n_shared_experts", 0, MOST.experts, default=1)
    experts = ExpertsConfig(
        fields.integer("n_routed_experts", 1, MOST.experts, default=8),
        fields.integer("num_experts_per_tok", 1, MOST.experts, default=2),
        fields.flag("norm_topk_prob", True),
        scoring="sigmoid",
        choice_bias=True,
        clusters=fields.integer("n_group", 1, MOST.experts, default=1),
        chosen_clusters=fields.integer("topk_group", 1, MOST.experts, default=1),
        share_factor=fields.number("routed_scaling_factor", 1.0),
        shared_size=own if shared else 0,
        shared_gate=False,
    )
    dense = frozenset(range(config.n_layers)) - config.bare_layers - mixtures
    return replace(
        config,
        intermediate_size=fields.integer("moe_intermediate_size", 1, MOST.width, default=7688),
        experts=_dense_among(experts, fields, dense),
    )


def _gemma2(values: JsonObject) -> ModelConfig:
    defaults = {
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    return _gemma(defaults | dict(values), every=2)


def _gemma3(values: JsonObject) -> ModelConfig:
    """Gemma 3: layers with a window have a theta of their own."""
    settings = {"max_position_embeddings": 131072, "rope_theta": 1e6} | dict(values)
    fields = Fields(settings, "config.json")
    config = _gemma(settings, every=6)
    theta = fields.number("rope_local_base_freq", 10000.0)
    local = hf_local_rope(fields, config.context_length, config.head_dim, theta)
    return replace(config, qk_norm=True, ropes=ropes_by_window(config, local))


def _gemma4(values: JsonObject) -> ModelConfig:
    """Gemma 4: layers that see all have heads of their own, which may serve as keys and values; the
    last layers may read the keys and values of others, and layers have numbers of a token of their
    own.
    """
    settings = _GEMMA4 | dict(values)
    if settings.get("rope_parameters") is None:
        settings["rope_parameters"] = _GEMMA4_ROPE
    fields, config = _read_decoder(settings, partial(hf_local_rope, theta=10000.0))
    if fields.get("use_bidirectional_attention") not in (None, "vision"):
        raise ModelError("config.json: use_bidirectional_attention is not supported for text")
    layers = config.n_layers
    # The last layer sees all, whatever `layer_types` says: so transformers has it.
    config = replace(config, windows=(*_windows(fields, layers, every=6)[:-1], 0))
    heads = _gemma4_full_heads(fields, config)
    local = config.rope(0)
    full = hf_full_rope(fields, config.context_length, heads.head_dim)
    shared = fields.integer("num_kv_shared_layers", 0, layers - 1, default=0)
    return replace(
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
        experts=_gemma4_experts(fields, config),
        intermediate_size=_gemma4_inner(fields, config),
    )


def _gemma4_unified(values: JsonObject) -> ModelConfig:
    """Gemma 4 12B, whose class has no experts and no layer inputs."""
    defaults = {"max_position_embeddings": 262144, "sliding_window": 1024}
    missing = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
    return _gemma4(defaults | dict(values) | missing)


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
    found = set()
    for layer, window in enumerate(config.windows):
        own = Fields(tables.table(str(layer)), f"{tables.where}: {layer}")
        dim = own.integer("head_dim", 2, MOST.width, default=config.head_dim)
        count = own.integer("num_key_value_heads", 1, config.n_heads, default=heads)
        if window and (dim, count) != (config.head_dim, heads):
            tables.reject(str(layer), own.values, "left out: the layer has a window")
        if not window:
            found.add(FullHeads(count, dim, 2 - as_values))
    if len(found) > 1:
        raise ModelError(f"{tables.where}: layers that see all have different heads")
    return found.pop()


def _gemma4_experts(fields: Fields, config: ModelConfig) -> ExpertsConfig | None:
    """Experts beside the feed-forward that all rows go through; None: there are none."""
    if not fields.flag("enable_moe_block"):
        return None
    return ExpertsConfig(
        fields.integer("num_experts", 1, MOST.experts),
        fields.integer("top_k_experts", 1, MOST.experts),
        renormalised=True,
        shared_size=config.intermediate_size,
        shared_gate=False,
    )


def _gemma4_inner(fields: Fields, config: ModelConfig) -> int:
    """Columns of the feed-forward, or of each expert."""
    if not fields.flag("enable_moe_block"):
        return config.intermediate_size
    return fields.integer("moe_intermediate_size", 1, MOST.width)


def _gemma(values: JsonObject, every: int) -> ModelConfig:
    """Fields that the Gemmas share; every: without `layer_types`, one layer in `every` sees all."""
    fields, config = _read_decoder(
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
        windows=_windows(fields, config.n_layers, every),
        o_bias=config.qkv_bias,
        float32_norms=True,
        query_scalar=fields.number("query_pre_attn_scalar"),
        attention_softcap=fields.number_or_zero("attn_logit_softcapping"),
        logit_softcap=fields.number_or_zero("final_logit_softcapping"),
    )


def _bert(values: JsonObject) -> ModelConfig:
    fields = Fields(values, "config.json")
    token_types = fields.integer("type_vocab_size", 1, MOST.width, default=2)
    return _encoder(fields, EncoderConfig("mean", token_types))


def _xlm_roberta(values: JsonObject) -> ModelConfig:
    """XLM-RoBERTa: positions begin behind the padding token's id; the table has rows for all."""
    fields = Fields(
        {"max_position_embeddings": 514, "pad_token_id": 1} | dict(values), "config.json"
    )
    padding = fields.integer("pad_token_id", 0, MOST.vocab)
    token_types = fields.integer("type_vocab_size", 1, MOST.width, default=1)
    return _encoder(fields, EncoderConfig("mean", token_types, first_position=padding + 1))


def _scoring(read: Callable[[JsonObject], ModelConfig]) -> Callable[[JsonObject], ModelConfig]:
    """Reader of a model with a head that scores pairs, and otherwise as `read` says."""

    def read_scoring(values: JsonObject) -> ModelConfig:
        config = read(values)
        labels = values.get("id2label")
        count = len(labels) if isinstance(labels, Mapping) else values.get("num_labels", 2)
        if count != 1:
            raise ModelError(
                f"config.json: the model has {str(count)[:40]} labels; of those that classify only "
                "rerankers are served, which have one"
            )
        assert config.encoder is not None  # `_encoder` has put it there
        return replace(config, encoder=replace(config.encoder, pooling="classify"))

    return read_scoring


def _encoder(fields: Fields, encoder: EncoderConfig) -> ModelConfig:
    """Fields that the encoders share."""
    for key in ("is_decoder", "add_cross_attention"):
        if fields.flag(key):
            raise ModelError(f"config.json: an encoder with {key} is not supported")
    if fields.get("position_embedding_type", "absolute") != "absolute":
        raise ModelError(
            "config.json: position_embedding_type other than absolute is not supported"
        )
    if fields.get("quantization_config") is not None:
        raise ModelError("config.json: quantised encoders are not supported")
    heads = fields.integer("num_attention_heads", 1, MOST.width, default=12)
    hidden = fields.integer("hidden_size", 1, MOST.width, default=768)
    layers = fields.integer("num_hidden_layers", 1, MOST.layers, default=12)
    first = encoder.first_position
    places = fields.integer("max_position_embeddings", first + 2, MOST.context, default=512)
    if hidden % heads:
        fields.reject("hidden_size", hidden, f"a multiple of num_attention_heads ({heads})")
    return ModelConfig(
        architecture="",
        vocab_size=fields.integer("vocab_size", 2, MOST.vocab, default=30522),
        hidden_size=hidden,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=fields.integer("intermediate_size", 1, MOST.width, default=3072),
        windows=(0,) * layers,
        context_length=places - first,
        rms_eps=fields.number("layer_norm_eps", 1e-12),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        activation=_activation(fields, _ENCODER_ACTIVATIONS, "gelu"),
        encoder=encoder,
        bos_id=fields.token_id("bos_token_id"),
        eos_ids=fields.token_ids("eos_token_id"),
    )


@dataclass(frozen=True)
class Family:
    """How the files of one family are read."""

    #: In `tiny-random:NAME`.
    name: str
    #: The configuration in a config.json, but for `architecture`; raises ModelError.
    from_hf: Callable[[JsonObject], ModelConfig]
    #: From the metadata of a GGUF file and what the common keys said; None: they are not read, or
    #: go by another family's name.
    from_gguf: Callable[[TensorFields, ModelConfig], ModelConfig] | None = None
    #: How its tiny random model differs from TINY.
    tiny: JsonDict = field(default_factory=dict)
    #: `general.architecture` of its GGUF files; empty: as `name`.
    gguf: str = ""

    @property
    def gguf_name(self) -> str:
        """`general.architecture` of its GGUF files."""
        return self.gguf or self.name


#: The smallest model that still has more than one of everything.
_TINY = ModelConfig(
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
_TINY_GEMMA: JsonDict = {
    "windows": (32, 0),
    "float32_norms": True,
    "activation": "gelu_tanh",
    "query_scalar": 24.0,
}
_TINY_GEMMA3: JsonDict = _TINY_GEMMA | {
    "qk_norm": True,
    "ropes": (RopeConfig(100.0), RopeConfig()),
}
#: Of the last two layers each reads the keys and values of one before them.
_TINY_GEMMA4: JsonDict = {
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
_TINY_GEMMA4_EXPERTS: JsonDict = {
    "windows": (32, 0),
    "ropes": _TINY_GEMMA4["ropes"][:2],
    "activation": "gelu_tanh",
    "qk_norm": True,
    "query_scalar": 4.0,
    "head_dim": 32,
    "full_heads": FullHeads(1, 64, 1),
    "experts": ExpertsConfig(8, 2, True, shared_size=64, shared_gate=False),
}
_TINY_GRANITE: JsonDict = {
    "embed_factor": 3.0,
    "residual_factor": 0.7,
    "query_scalar": 24.0,
    "logit_factor": 0.5,
}
_TINY_GPT_OSS: JsonDict = {
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
_TINY_QWEN3_5: JsonDict = {
    "n_layers": 3,
    "windows": (0, 0, 0),
    "qk_norm": True,
    "float32_norms": True,
    "attention_gate": True,
    "delta_net": DeltaNetConfig(frozenset({0, 2}), 2, 4, 16, 16),
}
_TINY_QWEN3_5_MOE: JsonDict = _TINY_QWEN3_5 | {"experts": ExpertsConfig(8, 2, True, shared_size=64)}
_TINY_LFM2: JsonDict = {
    "n_layers": 3,
    "windows": (0, 0, 0),
    "qk_norm": True,
    "short_conv": ShortConvConfig(frozenset({0, 2}), 64),
}
_TINY_GRANITE_H: JsonDict = _TINY_GRANITE | {
    "n_layers": 3,
    "windows": (0, 0, 0),
    "ropes": (None,),
    "mamba": MambaConfig(frozenset({0, 2}), 1, 8, 16, 16),
    "experts": ExpertsConfig(8, 2, True, shared_size=64, shared_gate=False),
}
#: A layer without a feed-forward, one with an MLP, and mixtures.
_TINY_NEMOTRON_H: JsonDict = {
    "n_layers": 4,
    "windows": (0,) * 4,
    "ropes": (None,),
    "activation": "relu2",
    "mamba": MambaConfig(frozenset({0, 2, 3}), 4, 8, 16, 16),
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
_TINY_LATENT: JsonDict = {
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
_TINY_PREDICTING: JsonDict = _TINY_LATENT | {"n_prediction_layers": 1}
#: Queries of hidden rows, and shares of all experts.
_TINY_DEEPSEEK_V2: JsonDict = _TINY_LATENT | {
    "latent": LatentConfig(48, 24, 16, 32),
    "experts": replace(
        _TINY_LATENT["experts"], scoring="softmax", choice_bias=False, renormalised=False
    ),
}


def _tiny_encoder(encoder: EncoderConfig) -> JsonDict:
    biases = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
    return {"n_kv_heads": 4, "activation": "gelu", "encoder": encoder} | biases


#: Class name in `architectures` of config.json -> its family.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", _llama, gguf_families.llama),
    "MistralForCausalLM": Family("mistral", _mistral, None, {"windows": (32, 32)}),
    "Qwen2ForCausalLM": Family("qwen2", _qwen2, gguf_families.plain, {"qkv_bias": True}),
    "Qwen3ForCausalLM": Family("qwen3", _qwen3, gguf_families.plain, {"qk_norm": True}),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        _qwen3_moe,
        gguf_families.mixture,
        {"qk_norm": True, "experts": ExpertsConfig(8, 2, True)},
        "qwen3moe",
    ),
    "Qwen3_5ForCausalLM": Family(
        "qwen3_5", _qwen3_5, gguf_families.qwen3_5, _TINY_QWEN3_5, "qwen35"
    ),
    "Qwen3_5MoeForCausalLM": Family(
        "qwen3_5_moe", _qwen3_5_moe, gguf_families.qwen3_5_moe, _TINY_QWEN3_5_MOE, "qwen35moe"
    ),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next", _qwen3_next, gguf_families.qwen3_5_moe, _TINY_QWEN3_5_MOE, "qwen3next"
    ),
    "Lfm2ForCausalLM": Family("lfm2", _lfm2, gguf_families.lfm2, _TINY_LFM2),
    "Lfm2MoeForCausalLM": Family(
        "lfm2_moe",
        _lfm2_moe,
        gguf_families.lfm2_moe,
        _TINY_LFM2
        | {
            "experts": ExpertsConfig(
                8,
                2,
                True,
                scoring="sigmoid",
                choice_bias=True,
                dense_layers=frozenset({0}),
                dense_size=96,
            ),
        },
        "lfm2moe",
    ),
    "MixtralForCausalLM": Family("mixtral", _mixtral, None, {"experts": ExpertsConfig(4, 2, True)}),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        _gemma2,
        gguf_families.gemma2,
        _TINY_GEMMA | {"attention_softcap": 5.0, "logit_softcap": 10.0},
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3",
        _gemma3,
        gguf_families.gemma3,
        _TINY_GEMMA3,
    ),
    "Gemma4ForCausalLM": Family("gemma4", _gemma4, gguf_families.gemma4, _TINY_GEMMA4),
    "Gemma4UnifiedForCausalLM": Family(
        "gemma4_unified", _gemma4_unified, None, _TINY_GEMMA4_EXPERTS
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss", _gpt_oss, gguf_families.gpt_oss, _TINY_GPT_OSS, "gpt-oss"
    ),
    "Olmo2ForCausalLM": Family("olmo2", _olmo2, gguf_families.olmo, {"wide_qk_norm": True}),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        _olmo3,
        None,
        {"wide_qk_norm": True, "windows": (32, 0), "ropes": (RopeConfig(100.0), RopeConfig())},
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4",
        _exaone4,
        gguf_families.exaone4,
        {"qk_norm": True, "windows": (32, 0), "ropes": (RopeConfig(), None)},
    ),
    "Ministral3ForCausalLM": Family(
        "mistral3",
        _ministral3,
        gguf_families.mistral3,
        {"ropes": (RopeConfig(query_beta=0.5, query_context=64),)},
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3", _smollm3, gguf_families.smollm3, {"ropes": (RopeConfig(), None)}
    ),
    "SeedOssForCausalLM": Family("seed_oss", _seed_oss, gguf_families.plain, {"qkv_bias": True}),
    "Phi3ForCausalLM": Family(
        "phi3", _phi3, gguf_families.plain, {"ropes": (RopeConfig(dims=12),)}
    ),
    "Glm4ForCausalLM": Family(
        "glm4", _glm4, gguf_families.plain, {"qkv_bias": True, "ropes": (RopeConfig(dims=8),)}
    ),
    "GraniteForCausalLM": Family("granite", _granite, gguf_families.granite, _TINY_GRANITE),
    "GraniteMoeHybridForCausalLM": Family(
        "granitehybrid", _granite4, gguf_families.granite_hybrid, _TINY_GRANITE_H
    ),
    "MuseGlimmerForCausalLM": Family(
        "muse_glimmer",
        _muse_glimmer,
        None,
        {
            "windows": (32, 0),
            "ropes": (RopeConfig(), None),
            "qk_norm": True,
            "float32_norms": True,
            "post_norm_eps": 1e-8,
            "attention_gate": True,
            "gates_apart": True,
            "query_scalar": 1.0,
            "logit_softcap": 10.0,
        },
    ),
    "NemotronHForCausalLM": Family(
        "nemotron_h", _nemotron_h, gguf_families.nemotron_h, _TINY_NEMOTRON_H
    ),
    "Cohere2ForCausalLM": Family(
        "cohere2",
        _cohere2,
        gguf_families.cohere2,
        {
            "windows": (32, 0),
            "ropes": (RopeConfig(), None),
            "centred_norms": True,
            "logit_factor": 0.5,
        },
    ),
    "DeepseekV2ForCausalLM": Family(
        "deepseek_v2", _deepseek_v2, gguf_families.deepseek2, _TINY_DEEPSEEK_V2, "deepseek2"
    ),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", _deepseek_v3, None, _TINY_PREDICTING),
    "Glm4MoeLiteForCausalLM": Family("glm4_moe_lite", _glm4_moe_lite, None, _TINY_PREDICTING),
    "Mistral4ForCausalLM": Family(
        "mistral4",
        _mistral4,
        gguf_families.mistral4,
        _TINY_LATENT | {"ropes": (RopeConfig(query_beta=0.5, query_context=64),)},
    ),
    "BertModel": Family("bert", _bert, None, _tiny_encoder(EncoderConfig("cls", 2))),
    "BertForSequenceClassification": Family(
        "bert_reranker",
        _scoring(_bert),
        None,
        _tiny_encoder(EncoderConfig("classify", 2, separator_id=259)),
    ),
    "XLMRobertaModel": Family(
        "xlm_roberta", _xlm_roberta, None, _tiny_encoder(EncoderConfig("mean", 1, 2))
    ),
    "XLMRobertaForSequenceClassification": Family(
        "xlm_roberta_reranker",
        _scoring(_xlm_roberta),
        None,
        _tiny_encoder(EncoderConfig("classify", 1, 2)),
    ),
}
#: Class names in `architectures` of models that also see or hear; their text model is served.
#: Each with the `model_type` of its text_config -> class name of the text model.
WRAPPERS: dict[str, dict[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Gemma4UnifiedForConditionalGeneration": {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "mistral4": "Mistral4ForCausalLM",
    },
    "Cohere2VisionForConditionalGeneration": {"cohere2": "Cohere2ForCausalLM"},
    "MuseGlimmerForConditionalGeneration": {"muse_glimmer_text": "MuseGlimmerForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3ForCausalLM"},
}


def tiny_config(name: str = "llama") -> ModelConfig:
    """The configuration behind `tiny-random[:NAME]`. Raises ModelError for an unknown family."""
    for architecture, family in FAMILIES.items():
        if family.name == name:
            return replace(_TINY, architecture=architecture, **family.tiny)
    known = ", ".join(family.name for family in FAMILIES.values())
    raise ModelError(f"tiny-random has no architecture {name!r}; known: {known}")
