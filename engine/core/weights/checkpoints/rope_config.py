"""Rotary positions as `config.json` and GGUF metadata describe them; jax-free."""

from __future__ import annotations

import math

from jitney.engine.common.errors import ModelError
from jitney.engine.core.weights.checkpoints.config_fields import MOST, Fields
from jitney.engine.core.weights.checkpoints.model_config import RopeScaling


def hf_rope(fields: Fields, context: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_parameters` (transformers 5) or its two older keys."""
    settings = fields.get("rope_parameters", fields.get("rope_scaling", {}))
    if not isinstance(settings, dict) or any(isinstance(v, dict) for v in settings.values()):
        fields.reject("rope_parameters", settings, "one flat table for all layers")
    settings = {"rope_theta": fields.get("rope_theta"), **settings}
    rope = Fields(settings, "config.json: rope_parameters")
    theta = rope.number("rope_theta", 10000.0)
    original = rope.integer("original_max_position_embeddings", 1, MOST.context, default=context)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("config.json: partial_rotary_factor other than 1 is not supported")
    return theta, _hf_scaling(rope, original)


def _hf_scaling(rope: Fields, original: int) -> RopeScaling | None:
    """The scaling that a table of rotary settings names; original: context without it."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    match kind:
        case "default":
            return None
        case "linear":
            return RopeScaling("linear", rope.number("factor"))
        case "llama3":
            return _hf_llama3(rope, original)
        case "yarn":
            return _hf_yarn(rope, original)
    raise ModelError(
        f"config.json: rope scaling {str(kind)[:40]!r} is not supported; "
        "known: default, linear, llama3, yarn"
    )


def _hf_llama3(rope: Fields, original: int) -> RopeScaling:
    return RopeScaling(
        "llama3",
        rope.number("factor"),
        original,
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
    )


def _hf_yarn(rope: Fields, original: int) -> RopeScaling:
    factor = rope.number("factor")
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", _hf_temperature(rope, factor)),
    )


def _hf_temperature(rope: Fields, factor: float) -> float:
    """YaRN's on cos and sin: 0.1 ln(factor) + 1 unless the file says otherwise."""
    if not (rope.get("mscale") and rope.get("mscale_all_dim")):
        return _yarn_temperature(factor, 1.0)
    over = _yarn_temperature(factor, rope.number("mscale"))
    return over / _yarn_temperature(factor, rope.number("mscale_all_dim"))


def _yarn_temperature(factor: float, scale: float) -> float:
    if factor <= 1:
        return 1.0
    return 0.1 * scale * math.log(factor) + 1.0


def gguf_rope(
    fields: Fields, context: int, head_dim: int, factors: tuple[float, ...]
) -> RopeScaling | None:
    """Scaling by key-values, or by the tensor of divisors that Llama 3.1 files carry instead."""
    if factors:
        return _divisors(factors, head_dim)
    kind = fields.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = fields.number("rope.scaling.factor")
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind != "yarn":
        raise ModelError(
            f"GGUF: rope scaling {str(kind)[:40]!r} is not supported; known: none, linear, yarn"
        )
    for key in ("yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor"):
        if fields.get(f"rope.scaling.{key}") is not None:
            raise ModelError(f"GGUF: rope.scaling.{key} is not supported")
    original = fields.integer(
        "rope.scaling.original_context_length", 1, MOST.context, default=context
    )
    attention = fields.number("rope.scaling.attn_factor", 1.0) * _yarn_temperature(factor, 1.0)
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=attention,
    )


def _divisors(factors: tuple[float, ...], head_dim: int) -> RopeScaling:
    """The numbers of `rope_freqs.weight`, checked."""
    sound = all(math.isfinite(value) and value > 0 for value in factors)
    if len(factors) != head_dim // 2 or not sound:
        raise ModelError(f"GGUF: rope_freqs.weight must hold {head_dim // 2} positive numbers")
    return RopeScaling("factors", factors=factors)


def extended_context(context: int, scaling: RopeScaling | None) -> int:
    """The served context: YaRN models often state the trained one, of which it is factor times."""
    if scaling is None or scaling.kind != "yarn":
        return context
    return min(max(context, scaling.extended_context), MOST.context)
