"""Checked access to the key-values of an untrusted file; jax-free."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jitney.engine.common.errors import ModelError
from jitney.engine.common.requests import JsonObject


class _Most(NamedTuple):
    """Largest accepted values: far beyond any model, so a file with larger ones is broken or
    hostile.
    """

    layers: int = 1024
    width: int = 1 << 20  # of any axis of a weight but the vocabulary
    vocab: int = 1 << 24
    context: int = 1 << 26  # tokens
    experts: int = 1 << 12
    taps: int = 64  # of a convolution


MOST = _Most()


class Fields:
    """Key-values of a file, each checked for type and range when read; null counts as left out."""

    def __init__(self, values: JsonObject, where: str):
        self.values = values
        self.where = where

    def under(self, prefix: str, where: str) -> Fields:
        """The values under keys with this prefix, without it."""
        keys = [key for key in self.values if key.startswith(prefix)]
        return Fields({key.removeprefix(prefix): self.values[key] for key in keys}, where)

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int or not low <= value <= high:
            self.reject(key, value, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            self.reject(key, value, "a positive number")
        return float(value)

    def number_or_zero(self, key: str) -> float:
        """A positive number; 0 when left out."""
        return 0.0 if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            self.reject(key, value, "true or false")
        return value

    def table(self, key: str) -> JsonObject:
        """A table of key-values; empty when left out."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            self.reject(key, value, "a table")
        return value

    def token_ids(self, *keys: str) -> tuple[int, ...]:
        """All token ids under some keys, each once in the order first seen; a key has one or a
        list.
        """
        token_ids: dict[int, None] = {}
        for key in keys:
            value = self.get(key, [])
            ids = value if isinstance(value, list) else [value]
            if not set(map(type, ids)) <= {int}:
                self.reject(key, value, "a token id or a list of them")
            token_ids |= dict.fromkeys(ids)
        return tuple(token_ids)

    def token_id(self, key: str) -> int | None:
        """The first of them."""
        return next(iter(self.token_ids(key)), None)

    def reject(self, key: str, value: object, expected: str) -> None:
        """Raise ModelError for a value."""
        raise ModelError(f"{self.where}: {key} must be {expected}, found {str(value)[:60]!r}")


class TensorFields(Fields):
    """Key-values of a GGUF file, and the shapes (row-major) of its tensors."""

    def __init__(self, values: JsonObject, where: str, shapes: Mapping[str, tuple[int, ...]]):
        super().__init__(values, where)
        self.shapes = shapes
        #: Names of tensors of layers, without their beginning -> shapes by the number of the layer.
        self._of_layers: dict[str, dict[int, tuple[int, ...]]] = {}
        for name, shape in shapes.items():
            match = re.fullmatch(r"blk\.(\d{1,4})\.(.+)", name)
            if match is not None:
                self._of_layers.setdefault(match[2], {})[int(match[1])] = shape

    def layers_with(self, name: str) -> frozenset[int]:
        """Numbers of the layers that have a tensor with this name."""
        return frozenset(self._of_layers.get(name, ()))

    def size(self, name: str, axis: int = -1, layer: int | None = None) -> int:
        """An axis of this tensor in a layer, or in the first layer that has one; 0: none has."""
        shapes = self._of_layers.get(name, {})
        shape = shapes.get(min(shapes, default=0) if layer is None else layer)
        if shape is None:
            return 0
        return Fields({name: shape[axis]}, self.where).integer(name, 1, MOST.width)
