"""The shapes that a small engine serves with its kernels."""

from __future__ import annotations

import jax.numpy as jnp

from jitney.engine.core.executor.program import StateSizes
from jitney.engine.core.executor.proving import served_by
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.kernels.proof_shapes import ServedShapes


def shapes_served(model: Model, config: ModelConfig) -> ServedShapes:
    """The shapes of an engine with two seats and this model in float32; config: of one device."""
    buckets = Buckets.of(max_seats=2, token_budget=16)
    sizes = StateSizes(
        seats=2, n_pages=16, page_size=16, context_length=64, kv_dtype=jnp.dtype("float32")
    )
    return served_by(model, config, sizes, buckets, jnp.float32)
