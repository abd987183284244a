"""What a request gets that names no temperature, top_p, top_k, min_p or repetition_penalty;
jax-free.

The settings of [sampling] come before what the model's publisher recommends, which stands in
`generation_config.json` (Hugging Face) or under `general.sampling.` (GGUF). What such a file asks
for and we do not do is said in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from jitney.engine.common.errors import ConfigError, ModelError, RequestError
from jitney.engine.common.requests import JsonObject, JsonValue, SamplingParams
from jitney.engine.config import SamplingSection
from jitney.engine.core.weights.checkpoints.config_fields import Fields
from jitney.engine.core.weights.checkpoints.files import read_json
from jitney.engine.core.weights.checkpoints.gguf import GGUFFile
from jitney.engine.core.weights.checkpoints.sources import ModelSource

_log = logging.getLogger("jitney.core")

#: Field of `SamplingParams` -> number.
type _Defaults = dict[str, int | float]

_HF_FILE = "generation_config.json"
#: Temperature as the publisher of the built-in model recommends; its GGUF file does not say. The
#: others are ours. A token that has half of the probability is taken: with top_p 0.9, 12 of 32
#: answers named another capital of France than Paris, with 0.5 none, and stories stay as varied.
#: In 4 bits, 14 of 48 answers ended in a loop without the penalty, 2 with it.
_BUILT_IN: Mapping[str, float] = {"temperature": 0.2, "top_p": 0.5, "repetition_penalty": 1.05}
#: Fields of `SamplingParams` that a model may bring its own defaults of.
_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
#: Our name -> the file's.
_HF_NAMES = {name: name for name in _FIELDS}
_GGUF_NAMES = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_GGUF_PREFIX = "general.sampling."
#: Keys that ask for something that we do not do -> the values that ask for nothing (null always
#: does).
_HF_OTHERS: Mapping[str, tuple[JsonValue, ...]] = {
    "do_sample": (True,),
    "max_new_tokens": (),
    "max_length": (20,),
    "min_new_tokens": (),
    "min_length": (0,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "length_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "bad_words_ids": ([],),
    "sequence_bias": ([], {}),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "stop_strings": ([],),
    "renormalize_logits": (False,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
}
_GGUF_OTHERS: Mapping[str, tuple[JsonValue, ...]] = {
    "sequence": (),
    "xtc_probability": (0.0,),
    "mirostat": (0,),
    "penalty_last_n": (-1,),
}


def sampling_defaults(settings: SamplingSection, source: ModelSource) -> _Defaults:
    """Field of `SamplingParams` -> its default for this model, for those that have one.

    Raises ConfigError naming the file and the field.
    """
    own = {name: getattr(settings, name) for name in _FIELDS}
    defaults = _recommended(settings.generation_config, source)
    defaults.update((name, value) for name, value in own.items() if value != -1)
    if defaults:
        shown = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        _log.info("a request that does not say otherwise is sampled with %s", shown)
    return defaults


def _recommended(generation_config: str, source: ModelSource) -> _Defaults:
    """What the model's file says, or the one that is named instead."""
    if generation_config == "none":
        return {}
    if generation_config != "auto":
        return _from_path(Path(generation_config).expanduser())
    if source.is_built_in:
        return dict(_BUILT_IN)
    return _from_model(source)


def _from_model(source: ModelSource) -> _Defaults:
    """What the model's own file says."""
    if source.kind == "hf":
        values = read_json(Path(source.path), _HF_FILE, missing_ok=True)
        return _from_values(values, _HF_FILE, _HF_NAMES, _HF_OTHERS)
    if source.kind == "gguf":
        return _from_gguf(Path(source.path))
    return {}


def _from_gguf(path: Path) -> _Defaults:
    where = f"{path.name} ({_GGUF_PREFIX}*)"
    own = Fields(GGUFFile(path).metadata, path.name).under(_GGUF_PREFIX, where)
    return _from_values(own.values, own.where, _GGUF_NAMES, _GGUF_OTHERS)


def _from_path(path: Path) -> _Defaults:
    """Of a file in the form of `generation_config.json`, or of a folder with one."""
    if path.is_dir():
        path /= _HF_FILE
    try:
        values = read_json(path.parent, path.name)
    except ModelError as error:
        raise ConfigError(f"generation_config: {error}") from error
    return _from_values(values, str(path), _HF_NAMES, _HF_OTHERS)


def _from_values(
    values: JsonObject,
    file: str,
    names: Mapping[str, str],
    others: Mapping[str, tuple[JsonValue, ...]],
) -> _Defaults:
    """The defaults among a file's values; what else they ask for goes to the log, once."""
    ignored = [name for name, neutral in others.items() if values.get(name) not in (None, *neutral)]
    if ignored:
        _log.warning("%s also asks for %s, which is not done here", file, ", ".join(ignored))
    defaults = {}
    for name, key in names.items():
        if values.get(key) is not None:
            defaults[name] = _checked(name, values[key], file, key)
    return defaults


def _checked(name: str, value: object, file: str, key: str) -> int | float:
    """A value of the file; ConfigError if it is no number or out of range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{file}: {key} must be a number, not {str(value)[:40]!r}")
    if name == "top_k":
        if not float(value).is_integer():
            raise ConfigError(f"{file}: {key} must be a whole number, not {value}")
        value = int(value)
    try:
        msgspec.structs.replace(SamplingParams(), **{name: value}).validate(vocab_size=1)
    except RequestError as error:
        raise ConfigError(
            f"{file}: {str(error).replace(name, key, 1)}; mend it, or start with generation_config "
            "none"
        ) from error
    return value
