"""Compiling for a card that is not there, with what was measured on one."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

from jitney.engine.core.executor.autotuning import _SHIPPED, RESULTS


def shipped_options(word: str, capability: str, shipped: Path = _SHIPPED) -> dict[str, str]:
    """What tells XLA to compile with what was shipped for a card, without the card: options of the
    compiler, none if nothing was shipped. word: in the card's name, "h100".
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
