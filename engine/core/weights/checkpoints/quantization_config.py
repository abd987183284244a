"""The packing of a checkpoint's tensors by `quantization_config` of config.json; jax-free.

Known: GPTQ and AWQ (4 bits), compressed-tensors (4 or 8), fp8 with a scale per tensor, output or
block, and MXFP4 of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jitney.engine.common.errors import ModelError
from jitney.engine.common.requests import JsonObject

_Method = Literal["gptq", "awq", "fp8", "compressed-tensors", "mxfp4"]
_METHODS: tuple[_Method, ...] = ("gptq", "awq", "fp8", "compressed-tensors", "mxfp4")
#: Formats of compressed-tensors: one number each, or eight 4-bit numbers in a word.
_WHOLE_NUMBERS, _PACKED = ("float-quantized", "int-quantized", "naive-quantized"), "pack-quantized"


@dataclass(frozen=True, slots=True)
class Packing:
    """The storage format of a checkpoint's quantised matrices."""

    method: _Method
    #: What GPTQ's first format leaves out of the zero points that it stores.
    zero_offset: int = 0

    @classmethod
    def read(cls, settings: object) -> Packing | None:
        """The packing that `quantization_config` names; None for floats. Raises ModelError."""
        if settings is None:
            return None
        if not isinstance(settings, Mapping):
            raise _refusal("is not a table")
        method = str(settings.get("quant_method"))
        # compressed-tensors' own tools have written its name with an underscore, too.
        match method.lower().replace("_", "-"):
            case "gptq":
                return _gptq(settings)
            case "awq":
                _demand(settings, "bits", 4, settings.get("w_bit"))
                _demand(settings, "version", "gemm", "gemm")
                return cls("awq")
            case "fp8":
                _demand(settings, "fmt", "e4m3", "e4m3")
                return cls("fp8")
            case "compressed-tensors":
                return _compressed(settings)
            case "mxfp4":
                return cls("mxfp4")
        raise _refusal(f"names the method {method[:40]!r}; known: {', '.join(_METHODS)}")


def _gptq(settings: JsonObject) -> Packing:
    """GPTQ; its first format stores zero points less one."""
    _demand(settings, "bits", 4)
    layout = settings.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise _refusal(f"names the GPTQ format {str(layout)[:40]!r}; known: gptq, gptq_v2")
    return Packing("gptq", zero_offset=int(layout == "gptq"))


def _compressed(settings: JsonObject) -> Packing:
    """compressed-tensors; every group of layers must hold 8-bit numbers, or 4-bit ones in words."""
    layout = settings.get("format")
    if layout not in (*_WHOLE_NUMBERS, _PACKED):
        raise _refusal(
            f"names the compressed-tensors format {str(layout)[:40]!r}; known: "
            f"{', '.join((*_WHOLE_NUMBERS, _PACKED))}"
        )
    bits = 4 if layout == _PACKED else 8
    for group in _table(settings.get("config_groups")).values():
        weights = _table(group).get("weights")
        if isinstance(weights, Mapping):
            _demand(weights, "num_bits", bits)
            if weights.get("actorder") not in (None, "weight", "static"):
                raise _refusal("reorders inputs by activation (actorder group), which is not read")
    return Packing("compressed-tensors")


def _table(value: object) -> JsonObject:
    """The value, if it is a table; else an empty one."""
    if isinstance(value, Mapping):
        return value
    return {}


def _demand(settings: JsonObject, key: str, expected: str | int, default: object = None) -> None:
    """ModelError unless the setting has the one value that is read."""
    value = settings.get(key, default)
    if isinstance(value, str):
        value = value.lower()
    if value != expected:
        method = str(settings.get("quant_method", "compressed-tensors"))[:40]
        raise _refusal(f"has {key} {str(value)[:40]}; only {expected} is read (method {method})")


def _refusal(reason: str) -> ModelError:
    return ModelError(
        f"config.json: quantization_config {reason}; use another version of the model, or a GGUF "
        "file"
    )
