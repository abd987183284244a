"""Shapes of published models by name, from their config.json, so that planning needs no download.
`shapes.json` has the keys whose values differ from the defaults of transformers.
"""

from __future__ import annotations

import json
from pathlib import Path

from jitney.engine.core import ModelConfig, read_hf_config


def _read_shapes() -> dict[str, ModelConfig]:
    configs = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return {name: read_hf_config(config) for name, config in configs.items()}


SHAPES = _read_shapes()
