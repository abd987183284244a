"""The configuration of a model from the metadata of its GGUF file; jax-free."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jitney.engine.common.errors import ModelError
from jitney.engine.common.requests import JsonObject
from jitney.engine.core.weights.checkpoints.config_fields import MOST, Fields, TensorFields
from jitney.engine.core.weights.checkpoints.families import FAMILIES, Family
from jitney.engine.core.weights.checkpoints.gguf import GGUFFile
from jitney.engine.core.weights.checkpoints.layer_configs import RopeConfig
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.rope_config import (
    ROPE_TENSORS,
    extended_context,
    gguf_rope,
)
from jitney.engine.core.weights.checkpoints.turn_ends import turn_ends

#: Token types: control tokens are special; user-defined ones are matched whole but shown.
CONTROL, USER_DEFINED = 3, 4
#: Names of models that are read as those of other names: their text models, or without experts.
_ALIASES = {"qwen3vl": "qwen3", "nemotron_h_moe": "nemotron_h"}
#: Keys that may have a number of each layer, 0 where it has none.
_BY_LAYER = ("attention.head_count", "attention.head_count_kv")
_NAMED_ENDS = tuple(f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom"))


def config_of(file: GGUFFile) -> ModelConfig:
    """The model's configuration; ModelError if it cannot be served."""
    return _read_gguf_config(file.metadata, file.shapes, _rope_factors(file))


def _rope_factors(file: GGUFFile) -> dict[str, tuple[float, ...]]:
    """Divisors of rotary frequencies, by the name of their tensor."""
    return {
        name: tuple(map(float, file.read(name).ravel()))
        for name in ROPE_TENSORS
        if name in file.tensors
    }


def _read_gguf_config(
    metadata: JsonObject,
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Mapping[str, tuple[float, ...]] = MappingProxyType({}),
) -> ModelConfig:
    """Read GGUF key-values; shapes (row-major) tell which optional tensors exist.

    rope_factors: contents of tensors of ROPE_TENSORS, if any. Raises ModelError as `read_hf_config`
    does.
    """
    name = metadata.get("general.architecture")
    architecture, family = _family_named(name)
    fields = _fields_of(metadata, str(name), shapes)
    tokens = Fields(metadata, "GGUF")
    heads = fields.integer("attention.head_count", 1, MOST.width)
    hidden = fields.integer("embedding_length", 1, MOST.width)
    behind = fields.integer("nextn_predict_layers", 0, MOST.layers, default=0)
    layers = fields.integer("block_count", 1 + behind, MOST.layers) - behind
    head_dim = _head_dim(fields, hidden // heads)
    context = fields.integer("context_length", 1, MOST.context)
    dims = fields.integer("rope.dimension_count", 2, head_dim, default=head_dim)
    scaling = gguf_rope(fields, context, dims, rope_factors)
    theta = fields.number("rope.freq_base", 10000.0)
    vocab = Fields({"rows": shapes.get("token_embd.weight", (None,))[0]}, "GGUF token_embd.weight")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab.integer("rows", 2, MOST.vocab),
        hidden_size=hidden,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=fields.integer("attention.head_count_kv", 1, heads, default=heads),
        head_dim=head_dim,
        intermediate_size=_inner(fields),
        windows=(0,) * layers,
        context_length=extended_context(context, scaling),
        ropes=(RopeConfig(theta, scaling, 0 if dims == head_dim else dims),),
        rms_eps=fields.number(
            "attention.layer_norm_rms_epsilon",
            fields.number("attention.layer_norm_epsilon", 1e-6),
        ),
        tie_embeddings="output.weight" not in shapes,
        qkv_bias=bool(fields.layers_with("attn_q.bias")),
        o_bias=bool(fields.layers_with("attn_output.bias")),
        mlp_bias=bool(fields.layers_with("ffn_gate.bias")),
        qk_norm=fields.size("attn_q_norm.weight") == head_dim,
        bos_id=tokens.token_id("tokenizer.ggml.bos_token_id"),
        eos_ids=tokens.token_ids(*_NAMED_ENDS),
    )
    assert family.from_gguf is not None
    config = family.from_gguf(fields, config.with_ends(*_turn_ends(metadata, config)))
    if fields.get("expert_count", 0) and config.experts is None:
        raise ModelError(f"{fields.where}: mixture-of-experts models are not supported")
    if not config.attending_layers:
        raise ModelError(f"{fields.where}: a model in which no layer attends is not supported")
    return config


def _turn_ends(metadata: JsonObject, config: ModelConfig) -> list[int]:
    """Tokens that end a turn by their text, in the vocabulary of the file."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not isinstance(kinds, list):
        return []
    by_kind: dict[int, dict[str, int]] = {CONTROL: {}, USER_DEFINED: {}}
    for id, (text, kind) in enumerate(zip(tokens, kinds, strict=False)):
        if kind in (CONTROL, USER_DEFINED) and isinstance(text, str) and id < config.vocab_size:
            by_kind[kind][text] = id
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str):
        template = ""
    return turn_ends(by_kind[CONTROL], by_kind[USER_DEFINED], template, config.eos_ids)


def _family_named(name: object) -> tuple[str, Family]:
    """(architecture, family) of the name that GGUF files use."""
    name = _ALIASES.get(str(name), name)
    readable = {key: family for key, family in FAMILIES.items() if family.from_gguf is not None}
    for architecture, family in readable.items():
        if family.gguf_name == name:
            return architecture, family
    names = ", ".join(family.gguf_name for family in readable.values())
    raise ModelError(f"GGUF: unknown architecture {str(name)[:40]!r}; known: {names}")


def _fields_of(
    metadata: JsonObject, name: str, shapes: Mapping[str, tuple[int, ...]]
) -> TensorFields:
    """The keys of the architecture, without its name, and with the largest number of any layer."""
    values = dict(Fields(metadata, "GGUF").under(f"{name}.", "").values)
    for key in _BY_LAYER:
        numbers = values.get(key)
        if isinstance(numbers, list) and numbers and set(map(type, numbers)) == {int}:
            values[key] = max(numbers)
    return TensorFields(values, f"GGUF {name}", shapes)


def _inner(fields: TensorFields) -> int:
    """Columns of an expert's feed-forward, or of that of all rows."""
    width = fields.size("ffn_down_exps.weight") or fields.size("ffn_down.weight")
    return width or fields.integer("feed_forward_length", 1, MOST.width)


def _head_dim(fields: Fields, default: int) -> int:
    """Size of a head, which keys and values must share unless they are products of latents."""
    head_dim = fields.integer("attention.key_length", 2, MOST.width, default=default)
    if fields.get("attention.kv_lora_rank") is not None:
        return head_dim
    values = fields.get("attention.value_length", head_dim)
    if values != head_dim:
        raise ModelError(
            f"{fields.where}: attention.value_length {str(values)[:20]} must equal the head size "
            f"{head_dim}"
        )
    return head_dim
