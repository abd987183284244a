"""How a sentence-transformers folder makes vectors of its encoder's rows; jax-free.

`modules.json` lists what a text goes through: the encoder, a pooling with a config.json in a folder
of its own, and often a norm to length 1, which every vector gets here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jitney.engine.checkpoints.files import read_json, read_json_list
from jitney.engine.errors import ModelError
from jitney.engine.types import JsonObject, Pooling

_MODULES = "modules.json"
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
#: Values of `pooling_mode` that are computed here.
_POOLINGS: Mapping[str, Pooling] = {"cls": "cls", "mean": "mean"}
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
    """What the folder's files say of its vectors; the mean, as sentence-transformers takes it,
    where they say nothing. Raises ModelError for what is not computed here.
    """
    modules: dict[str, JsonObject] = {}
    for module in read_json_list(folder, _MODULES, missing_ok=True):
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
        return "mean"
    path = modules["Pooling"].get("path")
    if not isinstance(path, str) or Path(path).name != path:
        raise ModelError(
            f"{_MODULES}: the path of Pooling must name a folder, found {str(path)[:60]!r}"
        )
    return _pooling(read_json(folder / path, "config.json"), f"{path}/config.json")


def _pooling(config: JsonObject, where: str) -> Pooling:
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _FLAGS.items() if config.get(flag)]
    if not isinstance(modes, list):
        modes = [modes]
    shown = ", ".join(map(str, modes))
    if shown not in _POOLINGS:
        raise ModelError(f"{where}: the pooling must be cls or mean, found {shown[:60] or 'none'}")
    return _POOLINGS[shown]
