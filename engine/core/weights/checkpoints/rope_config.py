"""Rotary positions as `config.json` and GGUF metadata describe them; jax-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from jitney.engine.common.errors import ModelError
from jitney.engine.common.requests import JsonObject
from jitney.engine.core.weights.checkpoints.config_fields import MOST, Fields
from jitney.engine.core.weights.checkpoints.layer_configs import (
    RopeConfig,
    RopeScaling,
)

_NEW = "rope_parameters"
_WHERE = f"config.json: {_NEW}"


#: Reads the rotation of layers from config.json, given the context and the numbers of a head.
type RopeReader = Callable[[Fields, int, int], RopeConfig]


def hf_rope(fields: Fields, context: int, head_dim: int) -> RopeConfig:
    """One rotation for all layers, from `rope_parameters` (transformers 5) or its older keys."""
    settings = _hf_settings(fields)
    if any(isinstance(value, dict) for value in settings.values()):
        fields.reject("rope_parameters", settings, "one flat table for all layers")
    return _read_rope(settings, fields, context, head_dim)


def hf_part_rope(fields: Fields, context: int, head_dim: int) -> RopeConfig:
    """The rotation of a head's rotated part (`head_dim`), all of which is rotated; the configured
    share of a head is ignored.
    """
    settings = dict(_hf_settings(fields)) | {"partial_rotary_factor": 1.0}
    return _read_rope(settings, fields, context, head_dim)


def hf_full_rope(fields: Fields, context: int, head_dim: int) -> RopeConfig:
    """The rotation of layers that see all, where `rope_parameters` may have a table for each kind;
    older keys are of these layers.
    """
    settings = Fields(_hf_settings(fields), _WHERE)
    if settings.get("full_attention") is None:
        return hf_rope(fields, context, head_dim)
    return _read_rope(settings.table("full_attention"), fields, context, head_dim)


def hf_local_rope(fields: Fields, context: int, head_dim: int, theta: float) -> RopeConfig:
    """The same of layers with a window; theta: unless their table has one. Older keys are not of
    these layers.
    """
    tables = Fields(_hf_settings(fields), _WHERE)
    settings = {"rope_theta": theta} | dict(tables.table("sliding_attention"))
    return _read_rope(settings, fields, context, head_dim)


def _hf_settings(fields: Fields) -> JsonObject:
    """The table of rotary settings, under its new name or its old one."""
    return fields.table("rope_scaling" if fields.get("rope_parameters") is None else _NEW)


def _read_rope(settings: JsonObject, fields: Fields, context: int, head_dim: int) -> RopeConfig:
    """The rotation that a flat table describes. fields: config.json, where older files have some of
    its keys. Raises ModelError.
    """
    outer = ("rope_theta", "partial_rotary_factor")
    rope = Fields({key: fields.get(key) for key in outer} | dict(settings), _WHERE)
    # Phi-3 has the original context beside the table; transformers reads it there first.
    key = "original_max_position_embeddings"
    original = rope.integer(key, 1, MOST.context, default=context)
    original = fields.integer(key, 1, MOST.context, default=original)
    share = rope.number("partial_rotary_factor", 1.0)
    if rope.get("rope_type") == "proportional":
        pairs = _rotated(share, head_dim) // 2
        scaling = RopeScaling("proportional", rope.number("factor", 1.0), rotated_pairs=pairs)
        return RopeConfig(rope.number("rope_theta", 10000.0), scaling)
    dims = _rotated(share, head_dim)
    config = RopeConfig(
        rope.number("rope_theta", 10000.0),
        _hf_scaling(rope, original, context, dims),
        0 if dims == head_dim else dims,
    )
    if rope.get("llama_4_scaling_beta") is None:
        return config
    return replace(config, query_beta=rope.number("llama_4_scaling_beta"), query_context=original)


def _rotated(share: float, head_dim: int) -> int:
    """Numbers of a head that are rotated, an even one."""
    if share == 1:
        return head_dim
    dims = int(head_dim * share)
    dims += dims % 2
    if not 2 <= dims <= head_dim:
        raise ModelError(
            f"config.json: partial_rotary_factor {share:g} rotates {dims} of {head_dim} numbers of "
            "a head; it must be at most 1 and leave at least 2"
        )
    return dims


def _hf_scaling(rope: Fields, original: int, context: int, dims: int) -> RopeScaling | None:
    """The scaling that a table of rotary settings names; original: context without it; dims:
    numbers of a head that are rotated.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    match kind:
        case "default" | "mrope":  # of text alone, m-rope is plain
            return None
        case "linear":
            return RopeScaling("linear", rope.number("factor"))
        case "dynamic":
            return RopeScaling("dynamic", rope.number("factor"), original)
        case "llama3":
            return _hf_llama3(rope, original)
        case "yarn":
            return _hf_yarn(rope, original)
        case "longrope" | "su":
            return _hf_longrope(rope, original, context, dims)
    raise ModelError(
        f"config.json: rope scaling {str(kind)[:40]!r} is not supported; "
        "known: default, linear, dynamic, llama3, yarn, longrope, proportional"
    )


def _hf_longrope(rope: Fields, original: int, context: int, dims: int) -> RopeScaling:
    factor = rope.number("factor", context / original)
    return RopeScaling(
        "longrope",
        factor,
        original,
        attention_factor=rope.number("attention_factor", _longrope_temperature(factor, original)),
        factors=_pair_factors(rope.get("short_factor", ()), dims, "config.json: short_factor"),
        long_factors=_pair_factors(rope.get("long_factor", ()), dims, "config.json: long_factor"),
    )


def _longrope_temperature(factor: float, original: int) -> float:
    """LongRoPE's factor on cos and sin."""
    if factor <= 1 or original <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original))


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


def score_factor(fields: Fields, scaling: RopeScaling | None) -> float:
    """The factor of scores by YaRN's `mscale_all_dim`, in models that scale these, too."""
    settings = Fields(_hf_settings(fields), _WHERE)
    if scaling is None or not settings.get("mscale_all_dim"):
        return 1.0
    return _yarn_temperature(scaling.factor, settings.number("mscale_all_dim")) ** 2


def _yarn_temperature(factor: float, scale: float) -> float:
    if factor <= 1:
        return 1.0
    return 0.1 * scale * math.log(factor) + 1.0


#: Tensors of GGUF files with divisors of the frequencies: of all contexts (Llama 3.1), of those up
#: to the original one, and of longer ones.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


def gguf_rope(
    fields: Fields, context: int, dims: int, factors: Mapping[str, tuple[float, ...]]
) -> RopeScaling | None:
    """Scaling by key-values, or by tensors of divisors instead. dims: numbers of a head that are
    rotated; factors: of ROPE_TENSORS.
    """
    original = fields.integer(
        "rope.scaling.original_context_length", 1, MOST.context, default=context
    )
    own, short, long = [_pair_factors(factors.get(name), dims, name) for name in ROPE_TENSORS]
    if own:
        return RopeScaling("factors", factors=own)
    if short or long:
        attention = fields.number("rope.scaling.attn_factor", 1.0)
        return RopeScaling(
            "longrope",
            context / original,
            original,
            attention_factor=attention,
            factors=short,
            long_factors=long,
        )
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
    return _gguf_yarn(fields, factor, original)


def _gguf_yarn(fields: Fields, factor: float, original: int) -> RopeScaling:
    for key in ("yarn_ext_factor", "yarn_attn_factor"):
        if fields.get(f"rope.scaling.{key}") is not None:
            raise ModelError(f"GGUF: rope.scaling.{key} is not supported")
    attention = fields.number("rope.scaling.attn_factor", 1.0) * _yarn_temperature(factor, 1.0)
    if fields.get("rope.scaling.yarn_log_multiplier") is not None:
        multiplier = fields.number("rope.scaling.yarn_log_multiplier")
        attention /= _yarn_temperature(factor, multiplier)
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=attention,
    )


def latent_temperature(fields: Fields, scaling: RopeScaling | None) -> float:
    """YaRN's `mscale_all_dim` of a model with latents, of which its GGUF file has a tenth, as a
    temperature; 1: it has none.
    """
    key = "rope.scaling.yarn_log_multiplier"
    if scaling is None or fields.get(key) is None:
        return 1.0
    return _yarn_temperature(scaling.factor, 10 * fields.number(key))


def _pair_factors(factors: object, dims: int, name: str) -> tuple[float, ...]:
    """Divisors of the frequencies of all rotated pairs, checked; none where there are none."""
    if factors is None:
        return ()
    numbers = factors if isinstance(factors, (list, tuple)) else ()
    sound = all(
        type(value) in (int, float) and math.isfinite(value) and value > 0 for value in numbers
    )
    if len(numbers) != dims // 2 or not sound:
        raise ModelError(f"{name} must hold {dims // 2} positive numbers")
    return tuple(map(float, numbers))


def extended_context(context: int, scaling: RopeScaling | None) -> int:
    """The served context: models with YaRN or dynamic scaling often state the trained one, of which
    it is factor times.
    """
    if scaling is None or scaling.kind not in ("yarn", "dynamic"):
        return context
    return min(max(context, scaling.extended_context), MOST.context)
