"""Readers of config.json: encoders, for embeddings and reranking."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from jitney.engine.common.errors import ModelError
from jitney.engine.common.requests import JsonObject
from jitney.engine.core.weights.checkpoints.config_fields import MOST, Fields
from jitney.engine.core.weights.checkpoints.families.shared import activation
from jitney.engine.core.weights.checkpoints.layer_configs import EncoderConfig
from jitney.engine.core.weights.checkpoints.model_config import Activation, ModelConfig

#: transformers' names of activations in encoders -> ours.
_ENCODER_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def bert(values: JsonObject) -> ModelConfig:
    fields = Fields(values, "config.json")
    token_types = fields.integer("type_vocab_size", 1, MOST.width, default=2)
    return _encoder(fields, EncoderConfig("mean", token_types))


def xlm_roberta(values: JsonObject) -> ModelConfig:
    """XLM-RoBERTa: positions begin behind the padding token's id; the table has rows for all."""
    fields = Fields(
        {"max_position_embeddings": 514, "pad_token_id": 1} | dict(values), "config.json"
    )
    padding = fields.integer("pad_token_id", 0, MOST.vocab)
    token_types = fields.integer("type_vocab_size", 1, MOST.width, default=1)
    return _encoder(fields, EncoderConfig("mean", token_types, first_position=padding + 1))


def scoring(read: Callable[[JsonObject], ModelConfig]) -> Callable[[JsonObject], ModelConfig]:
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
        activation=activation(fields, _ENCODER_ACTIVATIONS, "gelu"),
        encoder=encoder,
        bos_id=fields.token_id("bos_token_id"),
        eos_ids=fields.token_ids("eos_token_id"),
    )
