"""Tensors of a checkpoint of which a part can be had without reading the rest."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any, Protocol

import numpy as np

from jitney.engine.checkpoints.files import Shape

type _Index = tuple[slice, ...] | EllipsisType


class Sliceable(Protocol):
    """What numpy arrays can do, and tensors that still lie in their file."""

    @property
    def shape(self) -> Shape: ...
    @property
    def ndim(self) -> int: ...

    def __getitem__(self, index: Any, /) -> np.ndarray:
        """index: a slice for each axis, fewer for the first ones, or ... for all."""
        ...


class StoredTensor:
    """A tensor in a safetensors file."""

    def __init__(self, file: Any, name: str, shape: Shape):
        """file: as the safetensors library opens it."""
        self._file = file
        self._name = name
        self.shape = shape
        self.ndim = len(shape)

    def __getitem__(self, index: _Index) -> np.ndarray:
        if index is ...:
            return self._file.get_tensor(self._name)
        return self._file.get_slice(self._name)[index]


class Stacked:
    """Tensors one behind the other, along their first axis."""

    def __init__(self, parts: Sequence[Sliceable]):
        """parts: alike but for the length of the first axis."""
        self._parts = parts
        self.shape = (sum([part.shape[0] for part in parts]), *parts[0].shape[1:])
        self.ndim = len(self.shape)

    def __getitem__(self, index: _Index) -> np.ndarray:
        if index is ...:
            return np.concatenate([part[...] for part in self._parts])
        rows, *rest = index
        start, stop, _ = rows.indices(self.shape[0])
        pieces = []
        for part in self._parts:
            count = part.shape[0]
            low, high = max(start, 0), min(stop, count)
            if low < high:
                pieces.append(part[(slice(low, high), *rest)])
            start -= count
            stop -= count
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces)
