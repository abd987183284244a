"""Keys of config.json that families share: widths, windows, layers of several kinds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jitney.engine.common.errors import ModelError
from jitney.engine.common.requests import JsonObject
from jitney.engine.core.weights.checkpoints.config_fields import MOST, Fields
from jitney.engine.core.weights.checkpoints.layer_configs import ExpertsConfig
from jitney.engine.core.weights.checkpoints.layer_patterns import windows_of
from jitney.engine.core.weights.checkpoints.model_config import Activation, ModelConfig
from jitney.engine.core.weights.checkpoints.rope_config import RopeReader, extended_context, hf_rope

#: transformers' names of activations -> ours.
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def read_decoder(
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
        activation=activation(fields),
        bos_id=fields.token_id("bos_token_id"),
        eos_ids=fields.token_ids("eos_token_id"),
    )


def activation(
    fields: Fields, supported: Mapping[str, Activation] = _ACTIVATIONS, default: str = "silu"
) -> Activation:
    """`hidden_activation` goes before `hidden_act`: Gemma's first files name another there."""
    key = "hidden_act" if fields.get("hidden_activation") is None else "hidden_activation"
    name = fields.get(key, default)
    if not isinstance(name, str) or name not in supported:
        names = ", ".join(supported)
        raise ModelError(f"config.json: {key} {str(name)[:40]!r} is not supported; known: {names}")
    return supported[name]


def window_of(fields: Fields) -> int:
    """`sliding_window`; 0 for none."""
    if fields.get("sliding_window") is None:
        return 0
    return fields.integer("sliding_window", 1, MOST.context)


def check_kinds(
    fields: Fields, key: str, kinds: Any, layers: int, supported: Sequence[str]
) -> None:
    """Raise ModelError unless `kinds`, the value of `key`, has one of these words per layer."""
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or any(kind not in supported for kind in kinds)
    ):
        fields.reject(key, kinds, f"{layers} times {' or '.join(supported)}")


def windows_by_type(fields: Fields, layers: int) -> tuple[int, ...] | None:
    """Windows of the layers as `layer_types` names them; None if it is left out."""
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    check_kinds(fields, "layer_types", kinds, layers, ("full_attention", "sliding_attention"))
    windows = {"full_attention": 0, "sliding_attention": window_of(fields)}
    return tuple(windows[kind] for kind in kinds)


def windows_from(fields: Fields, layers: int, every: int) -> tuple[int, ...]:
    """Windows by `layer_types`; without them each `every`-th layer, counted from 1, sees all, or by
    `sliding_window_pattern`.
    """
    typed = windows_by_type(fields, layers)
    if typed is not None:
        return typed
    pattern = fields.integer("sliding_window_pattern", 1, MOST.layers, default=every)
    return windows_of(pattern, window_of(fields), layers)


def dense_among(experts: ExpertsConfig, fields: Fields, dense: Iterable[int]) -> ExpertsConfig:
    """With one feed-forward of `intermediate_size` in these layers."""
    layers = frozenset(dense)
    if not layers:
        return experts
    size = fields.integer("intermediate_size", 1, MOST.width)
    return replace(experts, dense_layers=layers, dense_size=size)


def clustered_experts(fields: Fields, shared_size: int) -> ExpertsConfig:
    """The mixture by the keys of DeepSeek's files, but for how experts are scored; shared_size: see
    `ExpertsConfig`.
    """
    return ExpertsConfig(
        fields.integer("n_routed_experts", 1, MOST.experts),
        fields.integer("num_experts_per_tok", 1, MOST.experts),
        fields.flag("norm_topk_prob", True),
        shared_size=shared_size,
        shared_gate=False,
        clusters=fields.integer("n_group", 1, MOST.experts, default=1),
        chosen_clusters=fields.integer("topk_group", 1, MOST.experts, default=1),
        share_factor=fields.number("routed_scaling_factor", 1.0),
    )


def recurrent_layers(fields: Fields, kinds: Any, layers: int, name: str) -> frozenset[int]:
    """The numbers of the layers that `layer_types` calls `name`."""
    check_kinds(fields, "layer_types", kinds, layers, ("full_attention", name))
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == name)
