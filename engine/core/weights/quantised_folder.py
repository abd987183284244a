"""Hugging Face folders with quantised matrices: GPTQ, AWQ, compressed-tensors, fp8.

A matrix of several tensors goes by the name and shape it would have unquantised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jitney.engine.common.errors import ModelError
from jitney.engine.core.models.quantization import Packed
from jitney.engine.core.weights import repack
from jitney.engine.core.weights.checkpoints.files import Shape
from jitney.engine.core.weights.checkpoints.quantization_config import Packing
from jitney.engine.core.weights.checkpoints.safetensors import SafetensorsFolder
from jitney.engine.core.weights.slices import DecodedTensor, Sliceable
from jitney.engine.core.weights.stored_matrix import Along, Field, StoredMatrix
from jitney.kernels.int4 import Int4


class _Words(NamedTuple):
    """The format of a method's 4-bit matrices [O outputs, I inputs]: words of eight numbers."""

    #: Endings of the words, the scales and the zero points.
    words: str
    scales: str
    zeros: str
    #: How the axes of the words run along the outputs and the inputs.
    outputs: Along
    inputs: Along
    #: The axes of scales and zero points that have an index for each output and for each group of
    #: inputs; zero points have eight outputs in a word.
    output_axis: int
    group_axis: int
    #: Converts the stored tensors to `Packed`; None for GPTQ, which needs the checkpoint's zero
    #: offset (`repack.GPTQ`).
    lay_out: Callable[..., Packed] | None

    def groups(self, sizes: tuple[int, int], scales: Shape, zeros: Shape | None = None) -> int:
        """Number of groups of inputs in a matrix of sizes (O, I); 0 if its parts do not fit."""
        outs, ins = sizes
        count = scales[self.group_axis] if len(scales) == 2 else 0

        def shape(outputs: int) -> Shape:
            return (outputs, count) if self.output_axis == 0 else (count, outputs)

        if not count or ins % count or outs % 8 or scales != shape(outs):
            return 0
        if zeros is not None and zeros != shape(outs // 8):
            return 0
        group = ins // count
        is_whole = count == 1 and ins % repack.WHOLE_GROUP == 0
        return count if is_whole or group in Int4.group_sizes else 0


_WORDS = {
    "gptq": _Words(".qweight", ".scales", ".qzeros", Along(1), Along(0, 1, 8), 1, 0, None),
    "awq": _Words(".qweight", ".scales", ".qzeros", Along(1, 1, 8), Along(0), 1, 0, repack.awq),
    "compressed-tensors": _Words(
        ".weight_packed",
        ".weight_scale",
        ".weight_zero_point",
        Along(0),
        Along(1, 1, 8),
        0,
        1,
        repack.packed_rows,
    ),
}
#: Endings of the parts of quantised matrices, and of scales of activations and KV in 8 bits.
_PARTS = (
    ".qweight",
    ".qzeros",
    ".scales",
    ".g_idx",
    ".weight_packed",
    ".weight_shape",
    ".weight_zero_point",
    ".weight_g_idx",
    ".weight_scale",
    ".weight_scale_inv",
    ".input_scale",
    ".activation_scale",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
    ".q_scale",
    ".prob_scale",
)
#: Names of the scales of fp8 keys ("k") and values ("v") within a layer, by various tools.
_KV_SCALES = (
    "self_attn.{}_scale",
    "self_attn.attn.{}_scale",
    "self_attn.{}_proj.{}_scale",
    "self_attn.{}_proj.output_scale",
    "self_attn.kv_scale",
)
_FP8_LIMIT = 448.0
#: Types of numbers with a scale of their own.
_EIGHT_BITS = ("F8_E4M3", "I8")
#: safetensors' names of the types that parts of a matrix may have, as numpy has them.
_NUMPY_TYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}


class QuantisedFolder(SafetensorsFolder):
    """`SafetensorsFolder` with unquantised names: `matrix(name)` as stored, `sliced(name)` floats.

    Raises ModelError also when parts of a matrix are missing or do not fit each other.
    """

    types = (*SafetensorsFolder.types, *_EIGHT_BITS, "I32", "I64")

    def __init__(self, folder: str | Path, packing: Packing, names: Container[str], part: str = ""):
        """wanted: names of the model's tensors; GPTQ stores zero biases for layers without one.
        part: see `is_read`.
        """
        super().__init__(folder, part=part)
        self.packing = packing
        self.shapes = {
            name: tensor.shape
            for name, tensor in self.tensors.items()
            if not name.endswith(_PARTS) and (name in names or not self._is_zero_bias(name))
        }
        self.shapes |= dict(self._matrices())

    def _is_zero_bias(self, name: str) -> bool:
        return name.endswith(".bias") and not self.read(name).any()

    def _matrices(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """(name, shape [O, I]) of each matrix in words."""
        own = _WORDS.get(self.packing.method)
        if own is None:
            return
        for name, tensor in self.tensors.items():
            if name.endswith(own.words):
                sizes = [
                    _two_axes(name, tensor.shape)[along.axis] * along.numbers
                    for along in (own.outputs, own.inputs)
                ]
                yield f"{name.removesuffix(own.words)}.weight", (sizes[0], sizes[1])

    def matrix(self, name: str) -> StoredMatrix | None:
        """A matrix as it is stored; None for floats and for scales of blocks."""
        base = name.removesuffix(".weight")
        if self._in_eight_bits(name):
            inverse = f"{base}.weight_scale_inv"
            if inverse not in self.tensors:
                return self._eight_bits(base, f"{base}.weight_scale")
            if math.prod(self.tensors[inverse].shape) == 1:
                return self._eight_bits(base, inverse)
            return None
        if name in self.tensors or not name.endswith(".weight"):
            return None
        return self._in_words(base, _WORDS[self.packing.method])

    def sliced(self, name: str) -> Sliceable:
        """One tensor as floats."""
        matrix = self.matrix(name)
        if matrix is not None:
            return DecodedTensor(matrix.floats, matrix.shape)
        tensor = self.tensors[name]
        if self._in_eight_bits(name):
            return DecodedTensor(self._block_scaled(name), tensor.shape)
        return tensor

    def _in_eight_bits(self, name: str) -> bool:
        return name in self.tensors and self.tensors[name].kind in _EIGHT_BITS

    def _field(self, name: str, outputs: Along | None, inputs: Along | None) -> Field:
        tensor = self.tensors[name]
        return Field(tensor, _NUMPY_TYPES[tensor.kind], outputs, inputs)

    def _eight_bits(self, base: str, scale: str) -> StoredMatrix:
        """int8 or fp8, [O, I], and a scale for the matrix or each output."""
        weights = f"{base}.weight"
        self._check_present(base, [scale])
        outs, ins = _two_axes(weights, self.tensors[weights].shape)
        scales = self.tensors[scale].shape
        if math.prod(scales) not in (1, outs):
            raise ModelError(
                f"{scale[:120]} {list(scales)} is neither one number nor one for "
                f"each of {outs} outputs"
            )
        of_outputs = Along(scales.index(outs)) if outs in scales else None
        fields = (
            self._field(weights, Along(0), Along(1)),
            self._field(scale, of_outputs, None),
        )
        return StoredMatrix((outs, ins), fields, repack.eight_bits)

    def _in_words(self, base: str, own: _Words) -> StoredMatrix:
        """A matrix in 4-bit words, with scales and zero points of groups of inputs."""
        names = [base + own.words, base + own.scales]
        if self.packing.method != "compressed-tensors" or base + own.zeros in self.tensors:
            names.append(base + own.zeros)
        self._check_present(base, names)
        outs, ins = self.shapes[f"{base}.weight"]
        shapes = {name: self.tensors[name].shape for name in names}
        groups = own.groups((outs, ins), *list(shapes.values())[1:])
        if not groups:
            raise ModelError(
                f"{base[:100]}: its quantised parts do not fit each other, or are not in groups of "
                f"{', '.join(map(str, Int4.group_sizes))} inputs: {shapes}"
            )
        self._check_order(f"{base}.g_idx", groups)
        of_groups = Along(own.group_axis, 1, ins // groups) if groups > 1 else None
        axes = [
            (own.outputs, own.inputs),
            (Along(own.output_axis), of_groups),
            (Along(own.output_axis, 1, 8), of_groups),
        ]
        fields = [self._field(name, *along) for name, along in zip(names, axes, strict=False)]
        together = (8 if len(names) > 2 else 1, _inputs_of_group(ins, groups))
        lay_out = own.lay_out or repack.GPTQ[self.packing.zero_offset]
        return StoredMatrix((outs, ins), tuple(fields), lay_out, together)

    def _block_scaled(self, name: str) -> Callable[[slice, slice], np.ndarray]:
        """fp8 with a scale for each block of outputs and inputs: how a part becomes float32."""
        weights = self.read(name)
        scale = self.read(f"{name}_scale_inv").astype(np.float32)
        _two_axes(name, weights.shape)
        if 0 in _two_axes(f"{name}_scale_inv", scale.shape):
            raise ModelError(f"{name[:100]}_scale_inv is empty")
        tall, wide = map(_block_size, weights.shape, scale.shape)

        def part(rows: slice, columns: slice) -> np.ndarray:
            of_rows = np.arange(rows.start, rows.stop) // tall
            of_columns = np.arange(columns.start, columns.stop) // wide
            return weights[rows, columns].astype(np.float32) * scale[of_rows[:, None], of_columns]

        return part

    def _check_present(self, base: str, names: list[str]) -> None:
        """Raise ModelError for tensors of a matrix that are missing."""
        missing = [name for name in names if name not in self.tensors]
        if missing:
            raise ModelError(f"the quantised matrix {base[:100]} lacks {', '.join(missing)}")

    def kv_limits(self, layer: int) -> tuple[float, float] | None:
        """Largest magnitudes of a layer's keys and values by the checkpoint's scales, or None."""
        keys, values = self._kv_scale(layer, "k"), self._kv_scale(layer, "v")
        if not keys or not values:
            return None
        return _FP8_LIMIT * keys, _FP8_LIMIT * values

    def _kv_scale(self, layer: int, part: str) -> float:
        """The scale of a layer's keys (k) or values (v); 0 if there is none."""
        for name in _KV_SCALES:
            scale = self._number(f"model.layers.{layer}.{name.format(part, part)}")
            if scale > 0:
                return scale
        return 0.0

    def _number(self, name: str) -> float:
        if name not in self.tensors:
            return 0.0
        value = self.read(name)
        if value.size != 1:
            return 0.0
        return float(value.ravel()[0])

    def _check_order(self, name: str, groups: int) -> None:
        """ModelError for GPTQ's activation order, unless it is the order of the inputs."""
        if name not in self.tensors:
            return
        index = self.read(name)  # the group of each input, [I]
        group = -(-len(index) // groups)
        if not np.array_equal(index, np.arange(len(index)) // group):
            raise ModelError(
                f"{name[:100]} reorders inputs by activation (desc_act), which is not read: use a "
                "version of the model quantised without it"
            )


def _two_axes(name: str, shape: Shape) -> Shape:
    if len(shape) != 2:
        raise ModelError(f"{name[:100]} has {len(shape)} axes instead of 2")
    return shape


def _block_size(size: int, count: int) -> int:
    """Size of `count` blocks along an axis, a power of two; the last one may be cut short."""
    block = -(-size // count)
    return 1 << (block - 1).bit_length()


def _inputs_of_group(inputs: int, groups: int) -> int:
    """Inputs per group of a matrix in memory, from the number of stored groups."""
    if groups == 1 and inputs > repack.WHOLE_GROUP:
        return repack.WHOLE_GROUP
    return inputs // groups
