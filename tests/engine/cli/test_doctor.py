"""`jitney doctor` proves kernels, and runs a tiny model with the settings of the configured one."""

from __future__ import annotations

from jitney.engine.cli import doctor
from jitney.engine.config.layers import load_config


def test_the_tiny_engine_takes_no_adapter_of_the_model():
    config = load_config(flags={"model": "tiny-random", "adapters": ("own=/nowhere",)})
    assert doctor._tiny(config).model.adapters == ()
