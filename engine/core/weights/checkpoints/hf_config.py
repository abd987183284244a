"""The configuration of a model from its untrusted `config.json`; jax-free."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from jitney.engine.common.errors import ModelError
from jitney.engine.common.requests import JsonObject
from jitney.engine.core.weights.checkpoints.config_fields import Fields
from jitney.engine.core.weights.checkpoints.families import FAMILIES, WRAPPERS
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.quantization_config import Packing

_log = logging.getLogger(__name__)

#: Keys of the whole model that go before those of its text_config.
_OUTER = ("tie_word_embeddings", "bos_token_id", "eos_token_id")


def read_hf_config(config: JsonObject, generation: JsonObject | None = None) -> ModelConfig:
    """Read `config.json`, and `generation_config.json`, which may name more end tokens.

    Raises ModelError for what is not supported, and for numbers that are missing or out of range.
    """
    architecture, values = _text_model(config)
    if "auto_map" in config:
        _log.warning(
            "config.json names custom code (auto_map); it is not run, the known architecture is "
            "used instead"
        )
    read_packing(config)  # refuses formats that are not read
    model = FAMILIES[architecture].from_hf(values)
    more_ends = Fields(generation or {}, "generation_config.json").token_ids("eos_token_id")
    return replace(model, architecture=architecture).with_ends(*more_ends)


def read_packing(config: JsonObject) -> Packing | None:
    """The packing of matrices by a `config.json`; None: floats. Raises ModelError."""
    settings = config.get("quantization_config")
    text = config.get("text_config")
    if settings is None and isinstance(text, Mapping):
        settings = text.get("quantization_config")
    older = config.get("compression_config")  # compressed-tensors' key of 2024
    if settings is None and isinstance(older, Mapping):
        settings = {"quant_method": "compressed-tensors"} | dict(older)
    return Packing.read(settings)


def _text_model(config: JsonObject) -> tuple[str, JsonObject]:
    """(class name of the text model, its keys), of the first class name in `architectures` that is
    served. Raises ModelError listing those.
    """
    names = config.get("architectures")
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and name in WRAPPERS:
            return _wrapped_model(name, config)
        if isinstance(name, str) and _with_head(name) in FAMILIES:
            return _with_head(name), config
    supported = ", ".join([*FAMILIES, *WRAPPERS])
    raise ModelError(f"config.json: unknown architecture {repr(names)[:100]}; known: {supported}")


def _wrapped_model(wrapper: str, config: JsonObject) -> tuple[str, JsonObject]:
    """The text model in a model that also sees or hears.

    Whether the embedding serves as the head is the wrapper's to say; where no file says, the
    checkpoint's tensors do.
    """
    text = Fields(config, "config.json").table("text_config")
    kind = text.get("model_type")
    families = WRAPPERS[wrapper]
    if not isinstance(kind, str) or kind not in families:
        raise ModelError(
            f"config.json: text_config of {wrapper} has model_type {str(kind)[:40]!r}; known: "
            f"{', '.join(families)}"
        )
    outer = {key: config[key] for key in _OUTER if config.get(key) is not None}
    return families[kind], {"tie_word_embeddings": False, **text, **outer}


def _with_head(name: str) -> str:
    """The class with an output head of a decoder's class, or of its base class such as
    MistralModel.
    """
    if name in FAMILIES:
        return name
    base = name.removesuffix("TextModel").removesuffix("Model")
    return name if base == name else f"{base}ForCausalLM"
