"""Tensors of a checkpoint that can be read in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any, Protocol

import numpy as np

from jitney.engine.core.weights.checkpoints.files import Shape

type _Index = tuple[slice, ...] | EllipsisType


class Sliceable(Protocol):
    """The operations shared by numpy arrays and tensors that still lie in their file."""

    @property
    def shape(self) -> Shape: ...
    @property
    def ndim(self) -> int: ...

    def __getitem__(self, index: Any, /) -> np.ndarray:
        """index: a slice for each axis, fewer for the first ones, or ... for all."""
        ...


class DecodedTensor:
    """A tensor in its file that becomes floats as it is read."""

    def __init__(self, decode: Callable[[slice, slice], np.ndarray], shape: Shape):
        """decode: the given rows and columns; a tensor with one axis is one row. shape: one or two
        axes.
        """
        self._decode = decode
        self.shape = shape
        self.ndim = len(shape)

    def __getitem__(self, index: _Index) -> np.ndarray:
        ranges = [slice(0, size) for size in self.shape]
        if index is not ...:
            for axis, part in enumerate(index):
                start, stop, _ = part.indices(self.shape[axis])
                ranges[axis] = slice(start, stop)
        if self.ndim == 1:
            return self._decode(slice(0, 1), ranges[0])[0]
        return self._decode(ranges[0], ranges[1])


class Reordered:
    """A tensor with its rows, or some of them, in another order; or its columns."""

    def __init__(self, stored: Sliceable, order: np.ndarray, axis: int = 0):
        """order: the stored row that stands at each place, [rows], or some of the rows. axis: 1 for
        columns.
        """
        self._stored = stored
        self._order = order
        self._axis = axis
        self.shape = (*stored.shape[:axis], len(order), *stored.shape[axis + 1 :])
        self.ndim = stored.ndim

    def __getitem__(self, index: _Index) -> np.ndarray:
        axis = self._axis
        if index is ... or len(index) <= axis:
            return self._stored[index].take(self._order, axis)
        order = self._order[index[axis]]
        first, last = order.min(), order.max()
        around = (*index[:axis], slice(first, last + 1), *index[axis + 1 :])
        return self._stored[around].take(order - first, axis)


class Stacked:
    """Tensors one behind the other, along their first axis."""

    def __init__(self, parts: Sequence[Sliceable]):
        """parts: alike but for the length of the first axis, one at least."""
        self._parts = parts
        self.shape = (sum([part.shape[0] for part in parts]), *parts[0].shape[1:])
        self.ndim = len(self.shape)

    def __getitem__(self, index: _Index) -> np.ndarray:
        if index is ...:
            return _concatenated([part[...] for part in self._parts])
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
        return _concatenated(pieces)


def _concatenated(pieces: list[np.ndarray]) -> np.ndarray:
    """Concatenate pieces; a single one is not copied."""
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces)
