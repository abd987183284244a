"""GGUF files with tensors under the names and shapes of the weight map.

llama.cpp stores the matrices of all experts in one tensor, [X, O, I]: here each goes by a name of
its own, `ffn_up_exps.3.weight` [O, I]. Small tensors that it lays out otherwise than Hugging Face's
folders are brought into their shape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jitney.engine.common.errors import ModelError
from jitney.engine.core.weights import repack
from jitney.engine.core.weights.checkpoints.config_fields import MOST
from jitney.engine.core.weights.checkpoints.files import Shape
from jitney.engine.core.weights.checkpoints.gguf import GGUFFile
from jitney.engine.core.weights.slices import DecodedTensor, Sliceable
from jitney.engine.core.weights.stored_matrix import Along, Field, StoredMatrix

#: Block formats of GGUF that are kept quantised: inputs per block, bytes per block, layout
#: function.
_FORMATS = {
    "Q4_0": (32, 18, repack.q4_0),
    "Q4_1": (32, 20, repack.q4_1),
    "Q4_K": (256, 144, repack.q4_k),
}
#: The same of experts alone.
_EXPERT_FORMATS = _FORMATS | {"MXFP4": (32, 17, repack.gguf_mxfp4)}
#: Names of tensors of all experts, in three pieces: before the matrices, these, and what is stored
#: of them.
_STACK = re.compile(r"(.+\.ffn_)(gate|up|down|gate_up)_exps\.(weight|bias)")


class _Layout(NamedTuple):
    """Conversion of a small tensor to the layout of Hugging Face's folders."""

    #: Numbers of axes of what is stored.
    axes: tuple[int, ...]
    shape: Callable[[Shape], Shape]
    values: Callable[[np.ndarray], np.ndarray] = np.asarray


def _flat(shape: Shape) -> Shape:
    return (math.prod(shape),)


def _taps(shape: Shape) -> Shape:
    """[C, W] -> [C, 1, W]."""
    return shape[0], 1, shape[1]


_TAPS = _Layout((2,), _taps)
_NUMBERS = _Layout((1, 2), _flat)
#: Tensors of layers that Hugging Face's folders lay out otherwise, by the end of their name.
_LAYOUTS = {
    "ssm_conv1d.weight": _TAPS,
    "shortconv.conv.weight": _TAPS,
    "ssm_d": _NUMBERS,
    "ssm_norm.weight": _NUMBERS,
    # The negative exponential of A_log.
    "ssm_a": _Layout((1, 2), _flat, lambda stored: np.log(-stored)),
    "ffn_gate_inp_shexp.weight": _Layout((1, 2), lambda shape: (1, math.prod(shape))),
}
#: Matrices of each head that make keys, turned, and values of latents: [H, R, N] and [H, V, R], of
#: which a row of heads [H, N + V, R] is one matrix in Hugging Face's folders.
_KEYS, _VALUES, _BOTH = "attn_k_b.weight", "attn_v_b.weight", "attn_kv_b.weight"


class _Part(NamedTuple):
    """An expert's matrix or bias as a part of a tensor of all experts."""

    stored: str  # its name
    #: As `GGUFFile.part` takes them.
    rows: slice
    columns: slice


class GGUFTensors(GGUFFile):
    """`GGUFFile` with tensors as floats (`sliced`) or in 4 bits as they are stored (`matrix`)."""

    def __init__(self, path: str | Path):
        super().__init__(path)
        #: By the name of an expert's tensor.
        self.parts: dict[str, _Part] = {}
        #: Tensors that are laid out otherwise, each read as a whole.
        self.laid_out: dict[str, Callable[[], np.ndarray]] = {}
        self._shapes: dict[str, Shape] = {}
        for name, tensor in self.tensors.items():
            match = _STACK.fullmatch(name)
            layout = _LAYOUTS.get(name.split(".", 2)[-1])
            if match is not None:
                self._take_apart(name, tensor.shape, *match.groups())
            elif layout is not None and len(tensor.shape) in layout.axes:
                self._lay_out(name, layout.shape(tensor.shape), partial(self._read, name, layout))
            elif name.endswith(_KEYS) and len(tensor.shape) == 3:
                self._join(name.removesuffix(_KEYS), tensor.shape)
            elif not name.endswith(_VALUES) or len(tensor.shape) != 3:
                self._shapes[name] = tensor.shape

    @property
    def shapes(self) -> dict[str, Shape]:
        return self._shapes

    def _lay_out(self, name: str, shape: Shape, read: Callable[[], np.ndarray]) -> None:
        self.laid_out[name] = read
        self._shapes[name] = shape

    def _read(self, name: str, layout: _Layout) -> np.ndarray:
        return layout.values(self.read(name))

    def _join(self, prefix: str, keys: Shape) -> None:
        """Note the matrices of keys and values of all heads as one."""
        heads, rank, plain = keys
        tensor = self.tensors.get(prefix + _VALUES)
        values = () if tensor is None else tensor.shape
        if len(values) != 3 or values[::2] != (heads, rank):
            raise ModelError(
                f"{self.name}: {prefix}{_KEYS} {list(keys)} has no {_VALUES} beside it"
            )

        def read() -> np.ndarray:
            turned = self.read(prefix + _KEYS).swapaxes(1, 2)
            return np.concatenate([turned, self.read(prefix + _VALUES)], axis=1)

        self._lay_out(prefix + _BOTH, (heads * (plain + values[1]), rank), read)

    def _take_apart(self, name: str, shape: Shape, prefix: str, matrix: str, ending: str) -> None:
        """Note the parts of a tensor of all experts by names of their own."""
        kinds, axes = matrix.split("_"), 3 if ending == "weight" else 2
        if len(shape) != axes or shape[0] > MOST.experts or shape[1] % len(kinds):
            raise ModelError(
                f"{self.name}: {name[:100]} {list(shape)} holds no {ending} of experts"
            )
        outputs = shape[1] // len(kinds)
        for number in range(shape[0] * len(kinds)):
            expert, place = divmod(number, len(kinds))
            own_name = f"{prefix}{kinds[place]}_exps.{expert}.{ending}"
            if axes == 3:
                rows, columns = slice(number * outputs, (number + 1) * outputs), slice(0, shape[2])
            else:
                rows = slice(expert, expert + 1)
                columns = slice(place * outputs, (place + 1) * outputs)
            self._shapes[own_name] = outputs, *shape[2:]
            self.parts[own_name] = _Part(name, rows, columns)

    def sliced(self, name: str) -> Sliceable:
        """A tensor as floats."""
        if name in self.laid_out:
            return self.laid_out[name]().reshape(self._shapes[name])
        part = self.parts.get(name)
        decode = partial(self.part, name) if part is None else partial(self._decode, part)
        return DecodedTensor(decode, self.shapes[name])

    def _decode(self, part: _Part, rows: slice, columns: slice) -> np.ndarray:
        """As `GGUFFile.part`, of an expert's tensor."""
        return self.part(part.stored, _within(part.rows, rows), _within(part.columns, columns))

    def matrix(self, name: str) -> StoredMatrix | None:
        """The matrix in 4 bits; None for other types."""
        part, stored, formats = self.parts.get(name), name, _FORMATS
        if part is not None:
            stored, formats = part.stored, _EXPERT_FORMATS
        if stored not in self.tensors or stored in self.laid_out:
            return None
        if self.tensors[stored].kind_name not in formats:
            return None
        block, size, lay_out = formats[self.tensors[stored].kind_name]
        bytes_of_rows = self.rows(stored)
        if part is not None:
            bytes_of_rows = bytes_of_rows[part.rows]
        rows = Field(bytes_of_rows, np.dtype(np.uint8), Along(0), Along(1, size, block))
        outputs, inputs = self.shapes[name]
        return StoredMatrix((outputs, inputs), (rows,), lay_out, together=(1, block))


def _within(whole: slice, part: slice) -> slice:
    """A part of a range, which is counted from the beginning of that."""
    return slice(whole.start + part.start, whole.start + part.stop)
