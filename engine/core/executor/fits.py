"""Finds settings that cannot fit a model from its configuration alone, before jax starts."""

from __future__ import annotations

import os
import re
from dataclasses import replace

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.machine import available_host_bytes
from jitney.engine.common.platforms import runs_on_device
from jitney.engine.config import Config, EngineSection
from jitney.engine.core.executor.memory import GIB, PoolShares
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig

#: Sources of the number of CPU devices: jax's environment variable, and XLA's flag.
_CPU_DEVICES = "JAX_NUM_CPU_DEVICES"
_XLA_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
#: Fewest bytes of a stored key or value, by `kv_dtype`, or for auto by `dtype`.
_KV_BYTES = {"int8": 1, "fp8": 1}
_DTYPE_BYTES = {"float32": 4}


def check_fits(config: Config, model: ModelConfig) -> None:
    """Raise ConfigError if the model cannot be served with this context, devices or KV pool."""
    context = context_of(config, model)
    engine = config.engine
    model = model.in_groups(engine.expert_parallel, engine.data_parallel)
    own = model.local(engine.tensor_parallel)
    if not runs_on_device(engine.platform):
        _check_cpu_devices(engine)
    if engine.speculative == "mtp" and not model.n_prediction_layers:
        raise ConfigError(
            f"speculative mtp: {model.architecture} has no layer behind its last that drafts "
            "(num_nextn_predict_layers or mtp_num_hidden_layers in config.json); leave it off, or "
            "choose ngram or draft"
        )
    if model.encoder is None:
        _check_pool(config, own, context)


def context_of(config: Config, model: ModelConfig) -> int:
    """The most tokens of a sequence; for an encoder, at most the rows of a step. Raises ConfigError
    for more tokens than the model was trained for.
    """
    context, budget = config.model.context, config.engine.token_budget
    if context > model.context_length:
        raise ConfigError(f"context {context} is more than the model's {model.context_length}")
    if model.encoder is None:
        return context or model.context_length
    if context > budget:
        raise ConfigError(
            f"context {context} is more than token_budget {budget}: an encoder computes a text in "
            "one step; set token_budget to as much"
        )
    return context or min(model.context_length, budget)


def _check_cpu_devices(engine: EngineSection) -> None:
    forced = _XLA_DEVICES.search(os.environ.get("XLA_FLAGS", ""))
    there = forced[1] if forced else os.environ.get(_CPU_DEVICES, "1")
    n_devices = engine.devices_here
    if there.isdecimal() and int(there) < n_devices:
        raise ConfigError(
            f"tensor_parallel {engine.tensor_parallel} needs {n_devices} devices here, and this "
            f"machine's CPU is {there}: leave it at 1"
        )


def _check_pool(config: Config, own: ModelConfig, context: int) -> None:
    """Raise ConfigError for a pool that is too small or too large. own: one device's configuration.
    It counts the fewest bytes that a page can have, so every refusal is right.
    """
    engine = config.engine
    own = replace(own, context_length=context)
    number = _KV_BYTES.get(engine.kv_dtype) or _DTYPE_BYTES.get(config.model.dtype, 2)
    least_bytes = tuple(width * number * engine.page_size for width in own.kv_numbers)
    if engine.speculative == "mtp":
        (head_width,) = own.prediction_head.kv_numbers
        first, *others = least_bytes
        least_bytes = first + head_width * number * engine.page_size, *others
    shares = PoolShares.of(own, least_bytes, engine, context)
    page_bytes = shares.whole_page_bytes
    kept_gib = shares.state_bytes() / GIB
    whole = engine.max_seats * -(-context // engine.page_size) + 1
    if engine.pages:
        name, fit = f"pages {engine.pages}", shares.counted(engine.pages)
        enough = f"pages {engine.max_seats + 1}"
    elif engine.memory_gib:
        name = f"memory_gib {engine.memory_gib:g}"
        fit = shares.fit(engine.memory_gib * GIB, whole)
        enough = f"memory_gib {(engine.max_seats + 1) * page_bytes / GIB + kept_gib:.3g}"
    else:
        return
    if fit.pages[0] <= engine.max_seats:
        raise ConfigError(
            f"{name}: less than a page for each of {engine.max_seats} seats, as one page is the "
            f"engine's own: give at least {enough}, or fewer seats (max_seats); {whole} pages hold "
            f"a whole context of {context} tokens for each"
        )
    free = available_host_bytes()
    takes = (shares.bytes_of(fit) + shares.state_bytes(fit.checkpoints)) / GIB
    if not runs_on_device(engine.platform) and takes * GIB > free:
        raise ConfigError(
            f"{name}: such a pool takes {takes:.1f} GiB, and this machine has "
            f"{free / GIB:.1f} GiB free: give less"
        )
