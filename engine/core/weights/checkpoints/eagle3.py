"""The configuration of an EAGLE-3 head from the files of its folder; jax-free.

Two forms are read: the one of SafeAILab's and SpecForge's files, and the one of speculators, which
has the layer's keys in `transformer_layer_config`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from jitney.engine.common.errors import ConfigError, ModelError
from jitney.engine.core.weights.checkpoints.config_fields import MOST, Fields
from jitney.engine.core.weights.checkpoints.families import FAMILIES
from jitney.engine.core.weights.checkpoints.files import read_json
from jitney.engine.core.weights.checkpoints.layer_configs import Eagle3Config
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig

_PREFIX = "midlayer."
#: Of the form of speculators, as `long_name` has it.
_LONG_PREFIX = "model.layers.0."
_KEY = "eagle_aux_hidden_state_layer_ids"


def read_eagle3(folder: Path, target: ModelConfig) -> ModelConfig:
    """Read the head of a folder, to draft for this model. Raises ModelError and ConfigError."""
    from jitney.engine.core.weights.checkpoints.safetensors import tensor_names

    values = read_json(folder, "config.json")
    outer = Fields(values, "config.json")
    fields = Fields({**values, **outer.table("transformer_layer_config")}, "config.json")
    config = FAMILIES["LlamaForCausalLM"].from_hf(fields.values)
    if config.n_layers != 1:
        raise ModelError(f"config.json: an EAGLE-3 head has one layer, found {config.n_layers}")
    names = tensor_names(folder)
    size = fields.integer("target_hidden_size", 1, MOST.width, default=config.hidden_size)
    own = Eagle3Config(
        vocab_size=fields.integer(
            "draft_vocab_size", 1, config.vocab_size, default=config.vocab_size
        ),
        target_size=size,
        layers=_layers(fields, target.n_layers),
        adds_to_normed=fields.flag("norm_before_residual"),
        prefix=_LONG_PREFIX if any("layers.0." in name for name in names) else _PREFIX,
        embeds=any(name.endswith("embed_tokens.weight") for name in names),
    )
    _check(config, own, target)
    return replace(
        config,
        architecture="LlamaForCausalLM:eagle3",
        tie_embeddings=False,
        context_length=target.context_length,
        eos_ids=(),
        eagle3=own,
    )


def _layers(fields: Fields, n_layers: int) -> tuple[int, ...]:
    """The layers of the model whose inputs the head reads.

    vLLM counts inputs, as we do. Files of SGLang have the key in `eagle_config` and name layers by
    what comes out of them.
    """
    eagle = Fields(fields.table("eagle_config"), "config.json: eagle_config")
    if not eagle.flag("use_aux_hidden_state", default=True):
        raise ModelError("config.json: EAGLE-3 heads without use_aux_hidden_state are not read")
    outer, inner = fields.get(_KEY), eagle.get(_KEY)
    if outer is not None:
        layers = _numbers(fields, outer, n_layers, 0)
    elif inner is not None:
        layers = _numbers(eagle, inner, n_layers, 1)
    else:
        layers = 2, n_layers // 2, n_layers - 3
    if not 0 <= min(layers) <= max(layers) < n_layers:
        raise ConfigError(
            f"draft_model reads layers {', '.join(map(str, layers))}, and the model has {n_layers}"
        )
    return layers


def _numbers(fields: Fields, numbers: Any, n_layers: int, more: int) -> tuple[int, ...]:
    if not isinstance(numbers, list) or len(numbers) != 3 or {*map(type, numbers)} != {int}:
        fields.reject(_KEY, numbers, "the numbers of three layers")
    return tuple(number + more for number in numbers)


def _check(config: ModelConfig, own: Eagle3Config, target: ModelConfig) -> None:
    """Raise ConfigError for a head of another model."""
    sizes = [("hidden_size", own.target_size, target.hidden_size)]
    sizes.append(("vocab_size", config.vocab_size, target.vocab_size))
    if not own.embeds:
        sizes.append(("hidden_size", config.hidden_size, target.hidden_size))
    for name, size, expected in sizes:
        if size != expected:
            raise ConfigError(
                f"draft_model is the head of a model with {name} {size}, not {expected}: give the "
                "EAGLE-3 head that was trained with this model"
            )
