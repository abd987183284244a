"""Matrices of quantised checkpoints as stored, of which a part can be laid out by itself.

Tensors are read by windows of outputs and inputs that hold whole words, bytes and groups; the
surplus is cut off once the part is laid out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jitney.engine.core.models.quantization import Packed, widened
from jitney.engine.core.weights.slices import Sliceable

#: Result of `StoredMatrix.read`: a window of each tensor.
type Tensors = tuple[np.ndarray, ...]
#: The same on the device, and the beginning of the part.
type _Read = tuple[tuple[Array, ...], Array]


@dataclass(frozen=True)
class Along:
    """An axis of a stored tensor that runs along the matrix's outputs or inputs."""

    axis: int
    #: `indices` steps along this axis cover `numbers` outputs or inputs (1 and 8: eight in a word).
    indices: int = 1
    numbers: int = 1

    def of(self, part: slice) -> slice:
        """The range of indices that holds these outputs or inputs."""
        first = part.start * self.indices // self.numbers
        return slice(first, part.stop * self.indices // self.numbers)


@dataclass(frozen=True)
class Field:
    """One tensor of a matrix as it is stored."""

    stored: Sliceable
    dtype: np.dtype
    #: None: no axis runs along them.
    outputs: Along | None
    inputs: Along | None

    def read(self, outputs: slice, inputs: slice) -> np.ndarray:
        """Read a part of the matrix, with one axis at least."""
        if self.outputs is None and self.inputs is None:
            return np.atleast_1d(self.stored[...])
        index = [slice(0, size) for size in self.stored.shape]
        if self.outputs is not None:
            index[self.outputs.axis] = self.outputs.of(outputs)
        if self.inputs is not None:
            index[self.inputs.axis] = self.inputs.of(inputs)
        return self.stored[tuple(index)]


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix in one of our schemes."""

    #: (O, I).
    shape: tuple[int, int]
    #: The arguments of `lay_out`, in its order.
    fields: tuple[Field, ...]
    #: Converts the stored tensors of a window to our layout. Equal ones must compare equal, so that
    #: JAX compiles each kind once.
    lay_out: Callable[..., Packed]
    #: So many outputs and inputs are read together.
    together: tuple[int, int] = (1, 1)
    #: The stored output that stands at each place; empty: as stored.
    order: tuple[int, ...] = ()

    def described(self) -> Packed:
        """The result of `packed`, as shapes."""
        shapes = [jax.ShapeDtypeStruct(one.stored.shape, one.dtype) for one in self.fields]
        return jax.eval_shape(self.lay_out, *shapes)

    @property
    def group(self) -> int:
        """Inputs that share a scale in 4 bits; else 0."""
        packed = self.described()
        return _inputs_of(packed) // packed.scale.shape[0] if packed.in_four_bits else 0

    def packed(self) -> Packed:
        """All of it, on the default device."""
        tensors = [field.stored[...] for field in self.fields]
        return _reordered(self.lay_out(*map(jnp.asarray, tensors)), self.order)

    def part(
        self, size: tuple[int, int], first: int = 0
    ) -> Callable[[_Read, Array | None], Packed]:
        """The function that lays out a part of so many outputs and inputs, of those read that
        `span` names; see `Shares.on_each`. first: its first output.
        """
        span = self.span(slice(first, first + size[0]))
        order = tuple(place - span.start for place in self.order[first : first + size[0]])
        return _LayOut(self.lay_out, (span.stop - span.start, size[1]), order)

    def span(self, outputs: slice) -> slice:
        """The stored outputs among which those of a part are."""
        places = self.order[outputs]
        return slice(min(places), max(places) + 1) if places else outputs

    def read(self, outputs: slice, inputs: slice) -> tuple[Tensors, np.ndarray]:
        """(the tensors of a window around this part, int32 [2]: the part's first output and input
        in it).

        Parts of one size that begin at multiples of it have windows of one size.
        """
        of_outputs = _window(outputs, self.shape[0], self.together[0])
        of_inputs = _window(inputs, self.shape[1], self.together[1])
        first = outputs.start - of_outputs.start, inputs.start - of_inputs.start
        tensors = tuple([field.read(of_outputs, of_inputs) for field in self.fields])
        return tensors, np.array(first, np.int32)

    def floats(self, outputs: slice, inputs: slice) -> np.ndarray:
        """A part as float32 [outputs, inputs] in the stored order; the default device holds it
        meanwhile.
        """
        tensors, (first_out, first_in) = self.read(outputs, inputs)
        wide = np.asarray(widened(self.lay_out(*map(jnp.asarray, tensors)))).T
        rows = slice(first_out, first_out + outputs.stop - outputs.start)
        return wide[rows, first_in : first_in + inputs.stop - inputs.start]


@dataclass(frozen=True)
class _LayOut:
    """Converts a part from `StoredMatrix.read` to the layout of the model."""

    lay_out: Callable[..., Packed]
    #: Outputs and inputs of the part.
    size: tuple[int, int]
    #: See `StoredMatrix`, of the part's outputs.
    order: tuple[int, ...] = ()

    def __call__(self, read: _Read, scale: Array | None) -> Packed:
        tensors, first = read
        return _reordered(_cropped(self.lay_out(*tensors), first, self.size), self.order)


def _reordered(packed: Packed, order: tuple[int, ...]) -> Packed:
    """A matrix with its outputs in this order; empty: as they are."""
    if not order:
        return packed
    places = np.array(order)
    return jax.tree.map(lambda array: array[..., places], packed)


def _cropped(packed: Packed, first: Array, size: tuple[int, int]) -> Packed:
    """Some of a matrix: from the output and the input on that `first` names, int32 [2], so many."""
    outputs, inputs = size
    n_inputs = _inputs_of(packed)

    def part(array: Array) -> Array:
        if array.ndim == 1:
            return jax.lax.dynamic_slice_in_dim(array, first[0], outputs)
        rows = array.shape[0]
        start = first[1] * rows // n_inputs
        return jax.lax.dynamic_slice(array, (start, first[0]), (inputs * rows // n_inputs, outputs))

    return jax.tree.map(part, packed)


def _inputs_of(packed: Packed) -> int:
    """I."""
    return packed.kernel.shape[0] * (2 if packed.in_four_bits else 1)


def _window(part: slice, size: int, together: int) -> slice:
    """The range to read of `size` numbers, `together` of which are never parted, for this part."""
    count = part.stop - part.start
    first = part.start // together * together
    if count % together or first != part.start:
        whole = -(-count // together) * together
        count = min(size, whole + together)
        first = min(first, size - count)
    return slice(first, first + count)
