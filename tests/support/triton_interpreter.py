"""Runs Triton kernels on the CPU in Triton's interpreter, from jitted JAX code and without torch.

Import it first, in a separate process: kernels are made for the interpreter or for a GPU when they
are decorated. The interpreter silently computes wrong bfloat16 products: use float32 and float16.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ptx
import triton.language as tl
from triton.runtime.interpreter import (
    InterpretedFunction,
    InterpreterOptions,
    TensorHandle,
    interpreter_builder,
)

# The interpreter would compute integer sums a second time in a wider type, for an assertion that it
# never makes: a quarter of all time. `triton_sizes` checks for overflow.
interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)
_call_and_look = InterpretedFunction.__call__
#: Modules whose Triton functions were called and are prepared for the interpreter.
_looked_through: set[str] = set()


def _call_inside(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a jitted function from another. The launch replaces the functions in our kernels'
    modules by the interpreter's; the first call into a module of Triton replaces those there, for
    good. Searching for more at each call would take a third of all time.
    """
    module = self.fn.__module__
    if module.startswith("triton.") and module not in _looked_through:
        _looked_through.add(module)
        return _call_and_look(self, *args, **kwargs)
    return self.rewrite()(*args, **kwargs)


InterpretedFunction.__call__ = _call_inside
_convert_floats = interpreter_builder.create_fp_to_fp


def _convert(src: Any, dst_type: Any, rounding_mode: Any) -> TensorHandle:
    """Convert floats. numpy rounds to e4m3: the interpreter is wrong if the exponent grows."""
    if dst_type.scalar != tl.float8e4nv:
        return _convert_floats(src, dst_type, rounding_mode)
    codes = src.data.astype(jnp.float8_e4m3fn)
    return TensorHandle(codes.view(np.uint8), dst_type.scalar)


interpreter_builder.create_fp_to_fp = _convert


@dataclass(frozen=True)
class _Results:
    """The results of an operation that has several."""

    handles: list[TensorHandle]

    def get_result(self, index: int) -> TensorHandle:
        return self.handles[index]


def _assemble(
    assembly: str,
    constraints: str,
    values: list[TensorHandle],
    types: list[Any],
    is_pure: bool,
    pack: int,
) -> _Results:
    """Inline assembly over words of `pack` elements; results have as many bytes an element."""
    words = [np.ascontiguousarray(value.data).view(np.uint32) for value in values]
    outputs = ptx.run(assembly, words, len(types))
    handles = []
    for output, kind in zip(outputs, types, strict=True):
        data = output.view(np.dtype(kind.scalar.name.replace("fp", "float")))
        assert data.shape == values[0].data.shape
        handles.append(TensorHandle(data, kind.scalar))
    return _Results(handles)


interpreter_builder.create_inline_asm = _assemble  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True)
class TypeName:
    """A dtype as the interpreter reads it: by its name in torch."""

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
    """The part of torch's tensor interface that Triton's interpreter uses, around a contiguous
    numpy array.
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
    starts with garbage.
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
        registers: int = 0,
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
    """An array like the worst uninitialised memory: NaN, or -1 for dtypes without NaN."""
    return np.full(leaf.shape, np.nan if np.issubdtype(leaf.dtype, np.floating) else -1, leaf.dtype)
