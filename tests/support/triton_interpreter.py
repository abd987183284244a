"""Runs Triton kernels on the CPU in Triton's interpreter, from jitted JAX code and without torch.

Import it first, in a process of its own: kernels are made for the interpreter or for a GPU when
they are decorated. The interpreter computes bfloat16 products wrongly and in silence: use float32
and float16.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from triton.runtime.interpreter import InterpretedFunction, InterpreterOptions, interpreter_builder

# Sums of whole numbers are computed a second time, wider, for an assertion that is never made: a
# quarter of all time. That they do not overflow is what `triton_sizes` asks.
interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)
_call_and_look = InterpretedFunction.__call__
#: Modules of Triton's own functions that one was called of.
_looked_through: set[str] = set()


def _call_inside(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A jitted function called by another. The launch has put the interpreter's functions in the
    place of those that ours see, and the first such call of those that Triton's own see, for good;
    to look for more at each call would take a third of all time.
    """
    module = self.fn.__module__
    if module.startswith("triton.") and module not in _looked_through:
        _looked_through.add(module)
        return _call_and_look(self, *args, **kwargs)
    return self.rewrite()(*args, **kwargs)


InterpretedFunction.__call__ = _call_inside


@dataclass(frozen=True)
class TypeName:
    """A dtype as the interpreter asks for it: by the name torch gives it."""

    name: str

    def __str__(self) -> str:
        return f"torch.{self.name}"


@dataclass(frozen=True)
class Storage:
    """The memory of an array, already on the host."""

    array: np.ndarray

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def cpu(self) -> Storage:
        return self

    def copy_(self, other: Storage) -> None:
        assert other.data_ptr() == self.data_ptr(), "the interpreter writes in place"


class Tensor:
    """As much of a torch tensor as Triton's interpreter touches, around a contiguous numpy
    array.
    """

    device = "cpu"

    def __init__(self, array: np.ndarray):
        assert array.flags.c_contiguous
        self.array = array
        self.dtype = TypeName("bool" if array.dtype == bool else array.dtype.name)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> Storage:
        return Storage(self.array)

    def new_empty(self, size: int, device: str) -> Tensor:
        return Tensor(self.array)

    def set_(self, storage: Storage, offset: int, size: Any, stride: Any) -> None:
        self.array = storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)


@dataclass(frozen=True)
class Interpreted:
    """A `jitney.kernels.triton_gpu.launch.Launch` that interprets; memory that a kernel must fill
    starts as rubbish.
    """

    sm: int = 90

    def __call__(
        self,
        kernel: Any,
        *args: Any,
        out: Any,
        grid: tuple[int, ...],
        warps: int,
        stages: int,
        **constants: Any,
    ) -> Any:
        refs = [i for i, arg in enumerate(args) if isinstance(arg, jax.Ref)]
        leaves, tree = jax.tree.flatten(out)
        values = [arg[...] if i in refs else arg for i, arg in enumerate(args)]
        shapes = [jax.ShapeDtypeStruct(values[i].shape, values[i].dtype) for i in refs] + leaves

        def run(*arrays: Any) -> list[np.ndarray]:
            inputs = [
                np.array(array) if i in refs else np.ascontiguousarray(array)
                for i, array in enumerate(arrays)
            ]
            outputs = [rubbish(leaf) for leaf in leaves]
            kernel[grid](*map(Tensor, inputs), *map(Tensor, outputs), **constants)
            return [inputs[i] for i in refs] + outputs

        results = jax.pure_callback(run, shapes, *values)
        for i, result in zip(refs, results, strict=False):
            args[i][...] = result
        return jax.tree.unflatten(tree, results[len(refs) :])


def rubbish(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    """Uninitialised memory at its worst: NaN, or -1 where there is none."""
    return np.full(leaf.shape, np.nan if np.issubdtype(leaf.dtype, np.floating) else -1, leaf.dtype)
