"""Compiler options for a GPU that is not there, from data measured on such a GPU."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

from jitney.engine.core.executor.autotuning import _SHIPPED, RESULTS


def shipped_options(word: str, capability: str, shipped: Path = _SHIPPED) -> dict[str, str]:
    """Compiler options that make XLA use the data shipped for a card, without the card; empty if no
    data is shipped. word: part of the card's name, "h100".
    """
    release = re.escape(version("jaxlib"))
    pattern = re.compile(rf"(.*-)?{word}-(.*-)?{re.escape(capability)}-jaxlib-{release}")
    for folder in sorted(shipped.iterdir()):
        if folder.is_dir() and pattern.fullmatch(folder.name):
            return {
                RESULTS: str(folder),
                "xla_gpu_experimental_autotune_cache_mode": "AUTOTUNE_CACHE_MODE_READ",
            }
    return {}
