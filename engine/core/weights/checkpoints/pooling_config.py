"""The pooling that a model's files define, for vectors of texts; jax-free.

A sentence-transformers folder lists its modules (the model, a pooling, often a norm) in
`modules.json`; a GGUF file has one number.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jitney.engine.common.errors import ModelError
from jitney.engine.common.requests import JsonObject, Pooling
from jitney.engine.core.weights.checkpoints.files import read_json, read_json_list, safe_folder

_MODULES = "modules.json"
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
#: Values of `pooling_mode` that encoders and decoders compute here.
_OF_ENCODERS: Mapping[str, Pooling] = {"cls": "cls", "mean": "mean"}
_OF_DECODERS: Mapping[str, Pooling] = {"lasttoken": "last", "mean": "mean"}
#: The same of `pooling_type` in GGUF files (llama.cpp's enum llama_pooling_type); 0 is none.
_OF_GGUF: Mapping[int, Pooling | None] = {0: None, 1: "mean", 3: "last"}
#: Files before sentence-transformers 6 have a flag for each mode.
_FLAGS: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def read_pooling(folder: Path) -> Pooling:
    """The pooling of an encoder's folder; mean if the files do not say. Raises ModelError."""
    return _stated(folder, _OF_ENCODERS) or "mean"


def folder_pooling(folder: Path) -> Pooling | None:
    """The same of a decoder's folder; None where its files do not say. Raises ModelError."""
    return _stated(folder, _OF_DECODERS)


def gguf_pooling(metadata: JsonObject) -> Pooling | None:
    """The same of a GGUF file's key-values."""
    key = f"{metadata.get('general.architecture')}.pooling_type"
    kind = metadata.get(key, 0)
    if type(kind) is not int or kind not in _OF_GGUF:
        raise ModelError(
            f"GGUF: {key} {str(kind)[:40]} is not supported; known: 1 (mean), 3 (last)"
        )
    return _OF_GGUF[kind]


def folder_dimensions(folder: Path) -> tuple[int, ...] | None:
    """Lengths that vectors may be cut to by config.json, with vLLM's keys: `matryoshka_dimensions`,
    or any (empty) with `is_matryoshka`. None: it does not say. Raises ModelError.
    """
    config = read_json(folder, "config.json")
    listed = config.get("matryoshka_dimensions")
    if listed is None:
        return () if config.get("is_matryoshka") is True else None
    if not isinstance(listed, list) or not all(type(size) is int and size > 0 for size in listed):
        raise ModelError(
            f"config.json: matryoshka_dimensions must list lengths, found {str(listed)[:60]!r}"
        )
    return tuple(sorted(set(listed)))


def _stated(folder: Path, supported: Mapping[str, Pooling]) -> Pooling | None:
    """The pooling that a folder's files name, one of `known`'s values."""
    modules: dict[str, JsonObject] = {}
    for module in read_json_list(folder, _MODULES):
        if not isinstance(module, dict):
            raise ModelError(f"{_MODULES} must list objects, found {str(module)[:60]!r}")
        # The class's own name: its package differs from release to release.
        modules[str(module.get("type")).rpartition(".")[2]] = module
    others = [kind for kind in modules if kind not in _KNOWN_MODULES]
    if others:
        raise ModelError(
            f"{_MODULES}: the module {others[0][:60]!r} is not supported; known: "
            f"{', '.join(_KNOWN_MODULES)}"
        )
    if "Pooling" not in modules:
        return None
    path = modules["Pooling"].get("path")
    if not isinstance(path, str):
        raise ModelError(
            f"{_MODULES}: the path of Pooling must name a folder, found {str(path)[:60]!r}"
        )
    config = read_json(safe_folder(folder, path), "config.json")
    return _pooling(config, f"{path}/config.json", supported)


def _pooling(config: JsonObject, where: str, supported: Mapping[str, Pooling]) -> Pooling:
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _FLAGS.items() if config.get(flag)]
    if not isinstance(modes, list):
        modes = [modes]
    shown = ", ".join(map(str, modes))
    if shown not in supported:
        raise ModelError(
            f"{where}: the pooling must be {' or '.join(supported)}, found {shown[:60] or 'none'}"
        )
    return supported[shown]
