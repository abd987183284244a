"""Readers of the families' own keys in GGUF files, with llama.cpp's defaults for missing ones;
jax-free.
"""

from __future__ import annotations

from dataclasses import replace

from jitney.engine.core.weights.checkpoints.config_fields import MOST, Fields, TensorFields
from jitney.engine.core.weights.checkpoints.layer_configs import (
    DeltaNetConfig,
    ExpertsConfig,
    FullHeads,
    LatentConfig,
    MambaConfig,
    RopeConfig,
    RopeScaling,
    ShortConvConfig,
)
from jitney.engine.core.weights.checkpoints.layer_patterns import (
    halves,
    ropes_by_window,
    ropes_without_full,
    windows_of,
)
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.rope_config import latent_temperature

#: Layers of the Gemmas of 27 billion weights -> their scores are divided by the root of E / H.
_GEMMA2_27B, _GEMMA3_27B = 46, 62
#: Of Mistral Small 4: see `RopeConfig.query_beta`.
_MISTRAL4_BETA = 0.1
#: Gemma 4's files divide frequencies of pairs that are not rotated by more than this.
_NOT_ROTATED = 1e20
#: Of `expert_gating_func`.
_UNTOLD, _SIGMOID, _LAST_GATING = 0, 2, 3


def gemma2(fields: Fields, config: ModelConfig) -> ModelConfig:
    return _gemma(fields, config, every=2, largest=_GEMMA2_27B)


def gemma3(fields: Fields, config: ModelConfig) -> ModelConfig:
    config = _gemma(fields, config, every=6, largest=_GEMMA3_27B)
    local = RopeConfig(fields.number("rope.freq_base_swa", 10000.0))
    return replace(config, ropes=ropes_by_window(config, local))


def _gemma(fields: Fields, config: ModelConfig, *, every: int, largest: int) -> ModelConfig:
    """Fields that GGUF files of Gemma leave out, with llama.cpp's values."""
    window = fields.integer("attention.sliding_window", 1, MOST.context)
    scalar = config.head_dim
    if config.n_layers == largest:
        scalar = config.hidden_size // config.n_heads
    return replace(
        config,
        windows=windows_of(every, window, config.n_layers),
        float32_norms=True,
        activation="gelu_tanh",
        query_scalar=float(scalar),
        attention_softcap=fields.number_or_zero("attn_logit_softcapping"),
        logit_softcap=fields.number_or_zero("final_logit_softcapping"),
    )


def plain(fields: Fields, config: ModelConfig) -> ModelConfig:
    """The same window in all layers; tensors determine the rest."""
    return replace(config, windows=(_window(fields),) * config.n_layers)


def olmo(fields: Fields, config: ModelConfig) -> ModelConfig:
    """OLMo 2, and OLMo 3, which has windows, and scales the rotation of other layers alone."""
    config = replace(config, wide_qk_norm=True)
    window = _window(fields)
    if not window:
        return config
    config = replace(config, windows=windows_of(4, window, config.n_layers))
    rope = config.rope(0)
    assert rope is not None
    return replace(config, ropes=ropes_by_window(config, RopeConfig(rope.theta)))


def exaone4(fields: Fields, config: ModelConfig) -> ModelConfig:
    window = _window(fields)
    if not window:
        return config
    config = replace(config, windows=windows_of(4, window, config.n_layers))
    return replace(config, ropes=ropes_without_full(config))


def mistral3(fields: Fields, config: ModelConfig) -> ModelConfig:
    return _with_query_factor(fields, plain(fields, config))


def _with_query_factor(fields: Fields, config: ModelConfig, default: float = 0.0) -> ModelConfig:
    """With queries that grow beyond the original context; default: by what, where it has one."""
    key, rope = "attention.temperature_scale", config.rope(0)
    beta = fields.number(key) if fields.get(key) else default
    if not beta or rope is None or rope.scaling is None:
        return config
    context = rope.scaling.original_context
    return replace(config, ropes=(replace(rope, query_beta=beta, query_context=context),))


def smollm3(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Each fourth layer does not rotate."""
    config = plain(fields, config)
    ropes = [None if layer % 4 == 3 else config.rope(0) for layer in range(config.n_layers)]
    return replace(config, ropes=tuple(ropes))


def granite(fields: Fields, config: ModelConfig) -> ModelConfig:
    scale = fields.number("attention.scale", config.head_dim**-0.5)
    return replace(
        config,
        embed_factor=fields.number("embedding_scale", 1.0),
        residual_factor=fields.number("residual_scale", 1.0),
        query_scalar=scale**-2,
        logit_factor=1.0 / fields.number("logit_scale", 1.0),
    )


def cohere2(fields: Fields, config: ModelConfig) -> ModelConfig:
    config = replace(
        config,
        windows=windows_of(4, _window(fields), config.n_layers),
        centred_norms=True,
        logit_factor=fields.number("logit_scale"),
    )
    return replace(config, ropes=ropes_without_full(config))


def _window(fields: Fields) -> int:
    return fields.integer("attention.sliding_window", 0, MOST.context, default=0)


def llama(fields: TensorFields, config: ModelConfig) -> ModelConfig:
    """Llama, Mistral, and Mixtral, whose files go by Llama's name, too."""
    config = plain(fields, config)
    if not fields.get("expert_count", 0):
        return config
    return replace(config, architecture="MixtralForCausalLM", experts=_experts(fields, config))


def mixture(fields: TensorFields, config: ModelConfig) -> ModelConfig:
    return replace(plain(fields, config), experts=_experts(fields, config))


def gpt_oss(fields: TensorFields, config: ModelConfig) -> ModelConfig:
    """gpt-oss, whose blend of frequencies begins and ends between pairs."""
    rope = config.rope(0)
    assert rope is not None
    if rope.scaling is not None:
        rope = replace(rope, scaling=replace(rope.scaling, truncate=False))
    return replace(
        config,
        windows=windows_of(2, _window(fields), config.n_layers),
        ropes=(rope,),
        mlp_bias=True,
        attention_sinks=True,
        activation="clamped_silu",
        experts=_experts(fields, config),
    )


def _experts(fields: TensorFields, config: ModelConfig) -> ExpertsConfig:
    """The mixture that keys and tensors describe."""
    clusters = fields.integer("expert_group_count", 1, MOST.experts, default=1)
    has_bias = bool(fields.layers_with("exp_probs_b.bias"))
    gating = fields.integer("expert_gating_func", _UNTOLD, _LAST_GATING, default=_UNTOLD)
    is_sigmoid = gating == _SIGMOID or (gating == _UNTOLD and has_bias)
    factor = fields.get("expert_weights_scale", 0.0)
    shared = fields.size("ffn_down_shexp.weight")
    layers = frozenset(range(config.n_layers))
    dense = layers - fields.layers_with("ffn_gate_inp.weight")
    return ExpertsConfig(
        fields.integer("expert_count", 1, MOST.experts),
        fields.integer("expert_used_count", 1, MOST.experts),
        renormalised=fields.flag("expert_weights_norm", True),
        shared_size=shared,
        shared_gate=not shared or bool(fields.layers_with("ffn_gate_inp_shexp.weight")),
        scoring="sigmoid" if is_sigmoid else "softmax",
        choice_bias=has_bias,
        clusters=clusters,
        chosen_clusters=fields.integer("expert_group_used_count", 1, clusters, default=clusters),
        share_factor=fields.number("expert_weights_scale") if factor else 1.0,
        dense_layers=dense,
        dense_size=fields.size("ffn_down.weight") if dense else 0,
    )


def qwen3_5(fields: TensorFields, config: ModelConfig) -> ModelConfig:
    value_heads = fields.integer("ssm.time_step_rank", 1, MOST.width)
    recurrent = DeltaNetConfig(
        _layers_with(fields, config, "ssm_conv1d.weight"),
        key_heads=fields.integer("ssm.group_count", 1, MOST.width),
        value_heads=value_heads,
        key_dim=fields.integer("ssm.state_size", 1, MOST.width),
        value_dim=fields.integer("ssm.inner_size", value_heads, MOST.width) // value_heads,
        taps=fields.integer("ssm.conv_kernel", 2, MOST.taps),
    )
    return replace(
        config, qk_norm=True, float32_norms=True, attention_gate=True, recurrent=recurrent
    )


def qwen3_5_moe(fields: TensorFields, config: ModelConfig) -> ModelConfig:
    """Qwen3.5's mixtures, and Qwen3-Next."""
    return replace(qwen3_5(fields, config), experts=_experts(fields, config))


def lfm2(fields: TensorFields, config: ModelConfig) -> ModelConfig:
    conv = ShortConvConfig(
        _layers_with(fields, config, "shortconv.conv.weight"),
        config.hidden_size,
        fields.integer("shortconv.l_cache", 2, MOST.taps),
    )
    return replace(config, qk_norm=True, recurrent=conv)


def lfm2_moe(fields: TensorFields, config: ModelConfig) -> ModelConfig:
    return replace(lfm2(fields, config), experts=_experts(fields, config))


def granite_hybrid(fields: TensorFields, config: ModelConfig) -> ModelConfig:
    """Granite 4 with layers of Mamba-2."""
    config = granite(fields, config)
    if not fields.flag("rope.scaling.finetuned"):
        config = replace(config, ropes=(None,))
    if fields.get("expert_count", 0):
        config = replace(config, experts=_experts(fields, config))
    return replace(config, recurrent=_mamba(fields, _layers_with(fields, config, "ssm_in.weight")))


def nemotron_h(fields: TensorFields, config: ModelConfig) -> ModelConfig:
    """Nemotron-H and Nemotron 3, whose stored layers are halves of ours."""
    tensors = {"ssm_in": "mamba", "attn_q": "attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    kinds = dict.fromkeys(range(config.n_layers), "")
    for tensor, kind in tensors.items():
        kinds |= dict.fromkeys(_layers_with(fields, config, f"{tensor}.weight"), kind)
    pairs = halves(list(kinds.values()))
    numbered = list(enumerate(pairs))
    recurrent = frozenset(layer for layer, (first, _) in numbered if kinds[first] == "mamba")
    mixtures = frozenset(layer for layer, (_, second) in numbered if kinds.get(second) == "moe")
    bare = frozenset(layer for layer, (_, second) in numbered if second < 0)
    experts = None
    if mixtures:
        dense = frozenset(range(len(pairs))) - bare - mixtures
        size = fields.size("ffn_down.weight") if dense else 0
        experts = replace(_experts(fields, config), dense_layers=dense, dense_size=size)
    return replace(
        config,
        n_layers=len(pairs),
        windows=(0,) * len(pairs),
        ropes=(None,),
        activation="relu2",
        recurrent=_mamba(fields, recurrent) if recurrent else None,
        experts=experts,
        bare_layers=bare,
        stored_halves=pairs,
    )


def deepseek2(fields: TensorFields, config: ModelConfig) -> ModelConfig:
    """DeepSeek-V2 and V3, and GLM-4.7-Flash, which chooses experts as V3 does. Sizes of the heads
    that latents stand for have keys of their own since those of latents have the usual ones.
    """
    rotated = fields.integer("rope.dimension_count", 2, MOST.width)
    new = "" if fields.get("attention.key_length_mla") is None else "_mla"
    query = fields.integer(f"attention.key_length{new}", rotated + 1, MOST.width)
    latent = LatentConfig(
        rank=fields.integer("attention.kv_lora_rank", 2, MOST.width),
        plain_dim=query - rotated,
        rotated_dim=rotated,
        value_dim=fields.integer(f"attention.value_length{new}", 1, MOST.width),
        query_rank=fields.integer("attention.q_lora_rank", 0, MOST.width, default=0),
    )
    rope = config.rope(0)
    assert rope is not None
    temperature = latent_temperature(fields, rope.scaling)
    if rope.scaling is not None and temperature != 1:  # else it is a factor of cos and sin
        rope = replace(rope, scaling=replace(rope.scaling, attention_factor=1.0))
    experts = replace(
        _experts(fields, config), renormalised=fields.flag("expert_weights_norm", False)
    )
    architecture = "DeepseekV3ForCausalLM"
    if experts.scoring == "softmax":
        architecture = "DeepseekV2ForCausalLM"
        experts = replace(experts, cluster_best=1)
    config = replace(
        config,
        architecture=architecture,
        n_kv_heads=1,
        head_dim=latent.rank + rotated,
        ropes=(replace(rope, dims=0),),
        query_scalar=latent.query_dim / temperature**4,
        latent=latent,
        experts=experts,
    )
    return _with_query_factor(fields, config)


def mistral4(fields: TensorFields, config: ModelConfig) -> ModelConfig:
    """Mistral Small 4, whose files leave out by what queries grow."""
    config = _with_query_factor(fields, deepseek2(fields, config), _MISTRAL4_BETA)
    assert config.experts is not None
    experts = replace(config.experts, cluster_best=2)
    return replace(config, architecture="Mistral4ForCausalLM", experts=experts)


def gemma4(fields: TensorFields, config: ModelConfig) -> ModelConfig:
    """Gemma 4; sizes of heads under the usual keys are those of layers that see all."""
    window = fields.integer("attention.sliding_window", 1, MOST.context)
    pattern = fields.get("attention.sliding_window_pattern")
    if (
        not isinstance(pattern, list)
        or len(pattern) != config.n_layers
        or set(map(type, pattern)) != {bool}
        or False not in pattern
        or True not in pattern
    ):
        expected = f"{config.n_layers} times true or false, each once at least"
        fields.reject("attention.sliding_window_pattern", pattern, expected)
    local, full = pattern.index(True), pattern.index(False)
    dim = fields.integer("attention.key_length_swa", 2, MOST.width)
    heads = FullHeads(
        max(1, fields.size("attn_k.weight", 0, full) // config.head_dim),
        config.head_dim,
        1 + (full in fields.layers_with("attn_v.weight")),
    )
    rope = config.rope(0)
    assert rope is not None
    pairs = config.head_dim // 2
    if rope.scaling is not None:
        pairs = sum(factor < _NOT_ROTATED for factor in rope.scaling.factors)
    rope = replace(rope, scaling=RopeScaling("proportional", rotated_pairs=pairs), dims=0)
    inner = max(1, fields.size("ffn_down.weight"))
    experts = None
    if fields.get("expert_count", 0):
        experts = replace(_experts(fields, config), shared_size=inner, shared_gate=False)
    config = replace(
        config,
        windows=tuple(window if own else 0 for own in pattern),
        n_kv_heads=max(1, fields.size("attn_k.weight", 0, local) // dim),
        head_dim=dim,
        full_heads=heads,
        ropes=(rope,),
        activation="gelu_tanh",
        qk_norm=True,
        query_scalar=1.0,
        logit_softcap=fields.number_or_zero("final_logit_softcapping"),
        n_kv_readers=fields.integer("attention.shared_kv_layers", 0, config.n_layers, default=0),
        reader_width=fields.size("ffn_down.weight", layer=config.n_layers - 1) // inner,
        layer_input_size=fields.integer(
            "embedding_length_per_layer_input", 0, MOST.width, default=0
        ),
        experts=experts,
    )
    own = RopeConfig(fields.number("rope.freq_base_swa", 10000.0))
    return replace(config, ropes=ropes_by_window(config, own))


def _layers_with(fields: TensorFields, config: ModelConfig, name: str) -> frozenset[int]:
    """Numbers of the model's layers with this tensor."""
    return fields.layers_with(name) & frozenset(range(config.n_layers))


def _mamba(fields: TensorFields, layers: frozenset[int]) -> MambaConfig:
    heads = fields.integer("ssm.time_step_rank", 1, MOST.width)
    return MambaConfig(
        layers,
        groups=fields.integer("ssm.group_count", 1, MOST.width),
        heads=heads,
        head_dim=fields.integer("ssm.inner_size", heads, MOST.width) // heads,
        state_size=fields.integer("ssm.state_size", 1, MOST.width),
        taps=fields.integer("ssm.conv_kernel", 2, MOST.taps),
        conv_bias=bool(fields.layers_with("ssm_conv1d.bias")),
    )
