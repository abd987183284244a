"""Default sampling parameters of a model: those of [sampling], else those of the model's files.

Files have them in `generation_config.json` (Hugging Face) or under `general.sampling.` (GGUF).
Jax-free.
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
#: Fields of `SamplingParams` whose defaults a model may set.
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
#: Keys of unsupported options -> the neutral value, besides null.
_HF_IGNORED: Mapping[str, JsonValue] = {
    "do_sample": True,
    "max_length": 20,
    **dict.fromkeys(("num_beams", "num_beam_groups", "typical_p", "length_penalty"), 1),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale"), 1),
    **dict.fromkeys(("min_length", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size"), 0),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "diversity_penalty", "penalty_alpha"), 0),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "renormalize_logits"), 0),
    "bad_words_ids": [],
    "sequence_bias": [],
    "stop_strings": [],
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "exponential_decay_length_penalty")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id")),
}
_GGUF_IGNORED: Mapping[str, JsonValue] = {
    "sequence": None,
    "xtc_probability": 0,
    "mirostat": 0,
    "penalty_last_n": -1,
}


def sampling_defaults(settings: SamplingSection, source: ModelSource) -> _Defaults:
    """Default of each `SamplingParams` field that has one. Raises ConfigError naming the field."""
    own = {name: getattr(settings, name) for name in _FIELDS}
    defaults = _recommended(settings.generation_config, source)
    defaults.update((name, value) for name, value in own.items() if value != -1)
    if defaults:
        shown = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        _log.info("default sampling: %s", shown)
    return defaults


def _recommended(generation_config: str, source: ModelSource) -> _Defaults:
    """The defaults of the model's file, or of the file that is named instead."""
    if generation_config == "none":
        return {}
    if generation_config != "auto":
        return _from_path(Path(generation_config).expanduser())
    if source.is_built_in:
        return dict(_BUILT_IN)
    path = Path(source.path)
    if source.kind == "hf":
        values = read_json(path, _HF_FILE, missing_ok=True)
        return _from_values(values, _HF_FILE, _HF_NAMES, _HF_IGNORED)
    if source.kind == "gguf":
        from jitney.engine.core.weights.checkpoints.gguf import GGUFFile

        where = f"{path.name} ({_GGUF_PREFIX}*)"
        own = Fields(GGUFFile(path).metadata, path.name).under(_GGUF_PREFIX, where)
        return _from_values(own.values, where, _GGUF_NAMES, _GGUF_IGNORED)
    return {}


def _from_path(path: Path) -> _Defaults:
    """The defaults of a file like `generation_config.json`, or of a folder with one."""
    if path.is_dir():
        path /= _HF_FILE
    try:
        values = read_json(path.parent, path.name)
    except ModelError as error:
        raise ConfigError(f"generation_config: {error}") from error
    return _from_values(values, str(path), _HF_NAMES, _HF_IGNORED)


def _from_values(
    values: JsonObject,
    file: str,
    names: Mapping[str, str],
    ignored_keys: Mapping[str, JsonValue],
) -> _Defaults:
    """The defaults among a file's values; unsupported options are logged once."""
    ignored = [
        name for name, neutral in ignored_keys.items() if values.get(name) not in (None, neutral)
    ]
    if ignored:
        _log.warning("%s also asks for %s, which is not done here", file, ", ".join(ignored))
    defaults = {}
    for name, key in names.items():
        if values.get(key) is not None:
            defaults[name] = _checked(name, values[key], file, key)
    return defaults


def _checked(name: str, value: object, file: str, key: str) -> int | float:
    """A value of the file. Raises ConfigError if it is no number or out of range."""
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
            f"{file}: {str(error).replace(name, key, 1)}; correct it, or start with "
            "generation_config none"
        ) from error
    return value
