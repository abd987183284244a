"""Hugging Face folders whose matrices are quantised: GPTQ, AWQ, compressed-tensors, fp8 (see
`jitney.engine.core.weights.checkpoints.quantization_config`).

A matrix is stored as several tensors; here it goes by the name it would have unquantised,
`...weight`, and its shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from jitney.engine.common.errors import ModelError
from jitney.engine.core.weights import repack
from jitney.engine.core.weights.checkpoints.files import Shape
from jitney.engine.core.weights.checkpoints.quantization_config import Packing
from jitney.engine.core.weights.checkpoints.safetensors import SafetensorsFolder
from jitney.engine.core.weights.slices import DecodedTensor, Sliceable, StoredTensor
from jitney.engine.core.weights.stored_matrix import Along, Field, StoredMatrix
from jitney.kernels.int4 import Int4

#: Endings of the tensors that hold a matrix in 4-bit words, by method.
_CODES = {"gptq": ".qweight", "awq": ".qweight", "compressed-tensors": ".weight_packed"}
#: Endings of what goes with it, and of what only matters to activations and KV in 8 bits.
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
    """`SafetensorsFolder` of unquantised names; `matrix(name)` is the matrix as it is stored,
    `sliced(name)` its floats.

    Raises ModelError as that does, and when parts of a matrix are missing or do not fit each other.
    """

    types = (*SafetensorsFolder.types, *_EIGHT_BITS, "I32", "I64")

    def __init__(self, folder: str | Path, packing: Packing, wanted: Container[str]):
        """wanted: names of the model's tensors. GPTQ's tools store a bias of zeros for layers that
        have none.
        """
        super().__init__(folder)
        self.packing = packing
        self.stored = self.shapes
        self.shapes = {}
        for name, shape in self.stored.items():
            if not name.endswith(_PARTS) and (name in wanted or not self._is_zero_bias(name)):
                self.shapes[name] = shape
        self.shapes |= dict(self._matrices())

    def _is_zero_bias(self, name: str) -> bool:
        return name.endswith(".bias") and not super().read(name).any()

    def _matrices(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """(name, shape [O, I]) of each matrix in words."""
        ending = _CODES.get(self.packing.method)
        if ending is None:
            return
        for name, shape in self.stored.items():
            if name.endswith(ending):
                matrix = f"{name.removesuffix(ending)}.weight"
                yield matrix, self._sizes(*_two_axes(name, shape))

    def _sizes(self, rows: int, columns: int) -> tuple[int, int]:
        """(O, I) of a matrix in words; a word has eight numbers of one axis."""
        match self.packing.method:
            case "gptq":
                return columns, 8 * rows
            case "awq":
                return 8 * columns, rows
        return rows, 8 * columns

    def matrix(self, name: str) -> StoredMatrix | None:
        """A matrix as it is stored; None for floats and for scales of blocks."""
        base = name.removesuffix(".weight")
        if self.kinds.get(name) in _EIGHT_BITS:
            if f"{base}.weight_scale_inv" in self.stored:
                return None
            return self._eight_bits(base)
        if name in self.stored or not name.endswith(".weight"):
            return None
        match self.packing.method:
            case "gptq":
                return self._gptq(base)
            case "awq":
                return self._awq(base)
        return self._packed_rows(base)

    def sliced(self, name: str) -> Sliceable:
        """One tensor as floats."""
        matrix = self.matrix(name)
        if matrix is not None:
            return DecodedTensor(matrix.floats, matrix.shape)
        if self.kinds.get(name) in _EIGHT_BITS:
            return DecodedTensor(self._block_scaled(name), self.stored[name])
        return self._tensor(name)

    def _tensor(self, name: str) -> Sliceable:
        """A tensor that stays in its file."""
        if self.kinds[name] == "F8_E4M3":
            return super().read(name)  # mapped
        place = self.places[name]
        return StoredTensor(place.file, place.name, self.stored[name])

    def _field(self, name: str, outputs: Along | None, inputs: Along | None) -> Field:
        return Field(self._tensor(name), _NUMPY_TYPES[self.kinds[name]], outputs, inputs)

    def _eight_bits(self, base: str) -> StoredMatrix:
        """int8 or fp8, [O, I], and a scale for the matrix or each output."""
        weights, scale = self._present(base, ".weight", ".weight_scale")
        outs, ins = _two_axes(weights, self.stored[weights])
        scales = self.stored[scale]
        if math.prod(scales) not in (1, outs):
            raise ModelError(
                f"{base[:100]}.weight_scale {list(scales)} is neither one number nor one for "
                f"each of {outs} outputs"
            )
        of_outputs = Along(scales.index(outs)) if outs in scales else None
        fields = (
            self._field(weights, Along(0), Along(1)),
            self._field(scale, of_outputs, None),
        )
        return StoredMatrix((outs, ins), fields, repack.eight_bits)

    def _gptq(self, base: str) -> StoredMatrix:
        """Words [I / 8, O], zero points [G, O / 8], scales [G, O]."""
        words, zeros, scales = self._parts(base, ".qweight", ".qzeros", ".scales")
        self._check_order(f"{base}.g_idx", self.stored[scales][0])
        (outs, ins), of_group, group = self._grouped(base, self.stored[scales][0])
        fields = (
            self._field(words, Along(1), Along(0, 1, 8)),
            self._field(zeros, Along(1, 1, 8), of_group(0)),
            self._field(scales, Along(1), of_group(0)),
        )
        lay_out = repack.Gptq(self.packing.zero_offset)
        return StoredMatrix((outs, ins), fields, lay_out, together=(8, group))

    def _awq(self, base: str) -> StoredMatrix:
        """Words [I, O / 8], zero points [G, O / 8], scales [G, O]."""
        words, zeros, scales = self._parts(base, ".qweight", ".qzeros", ".scales")
        (outs, ins), of_group, group = self._grouped(base, self.stored[scales][0])
        fields = (
            self._field(words, Along(1, 1, 8), Along(0)),
            self._field(zeros, Along(1, 1, 8), of_group(0)),
            self._field(scales, Along(1), of_group(0)),
        )
        return StoredMatrix((outs, ins), fields, repack.awq, together=(8, group))

    def _block_scaled(self, name: str) -> Callable[[slice, slice], np.ndarray]:
        """fp8 with a scale for each block of outputs and inputs: how a part becomes float32."""
        weights = super().read(name)
        scale = super().read(f"{name}_scale_inv").astype(np.float32)
        _two_axes(name, weights.shape)
        if 0 in _two_axes(f"{name}_scale_inv", scale.shape):
            raise ModelError(f"{name[:100]}_scale_inv is empty")
        tall, wide = map(_block_size, weights.shape, scale.shape)

        def part(rows: slice, columns: slice) -> np.ndarray:
            of_rows = np.arange(rows.start, rows.stop) // tall
            of_columns = np.arange(columns.start, columns.stop) // wide
            return weights[rows, columns].astype(np.float32) * scale[of_rows[:, None], of_columns]

        return part

    def _packed_rows(self, base: str) -> StoredMatrix:
        """compressed-tensors' words [O, I / 8], scales [O, G], perhaps zero points [O / 8, G]."""
        endings = [".weight_packed", ".weight_scale"]
        if f"{base}.weight_zero_point" in self.stored:
            endings.append(".weight_zero_point")
        words, scales, *zeros = self._parts(base, *endings)
        (outs, ins), of_group, group = self._grouped(base, self.stored[scales][1])
        fields = [
            self._field(words, Along(0), Along(1, 1, 8)),
            self._field(scales, Along(0), of_group(1)),
        ]
        fields += [self._field(name, Along(0, 1, 8), of_group(1)) for name in zeros]
        together = (8 if zeros else 1, group)
        return StoredMatrix((outs, ins), tuple(fields), repack.packed_rows, together)

    def _grouped(
        self, base: str, groups: int
    ) -> tuple[tuple[int, int], Callable[[int], Along | None], int]:
        """(O, I) of a matrix in words, how an axis with an index for each group runs along its
        inputs, and inputs of a group as it will be laid out.
        """
        outs, ins = self.shapes[f"{base}.weight"]

        def of_group(axis: int) -> Along | None:
            return Along(axis, 1, ins // groups) if groups > 1 else None

        return (outs, ins), of_group, _inputs_of_group(ins, groups)

    def _parts(self, base: str, *endings: str) -> list[str]:
        """Names of the tensors of a matrix in words, checked against each other."""
        names = self._present(base, *endings)
        shapes = {name.rpartition(".")[2]: self.stored[name] for name in names}
        if not self._parts_fit(self.shapes[f"{base}.weight"], shapes):
            raise ModelError(
                f"{base[:100]}: its quantised parts do not fit each other, or are not in groups of "
                f"{', '.join(map(str, Int4.group_sizes))} inputs: {shapes}"
            )
        return names

    def _parts_fit(self, sizes: Shape, shapes: dict[str, Shape]) -> bool:
        """Whether scales and zero points of these shapes belong to a matrix of sizes (O, I)."""
        outs, ins = sizes
        by_rows = self.packing.method == "compressed-tensors"
        scales = shapes["weight_scale" if by_rows else "scales"]
        if len(scales) != 2:
            return False
        groups = scales[1] if by_rows else scales[0]
        if not groups or ins % groups or outs % 8 or not _groups_fit(ins, groups):
            return False
        if by_rows:
            wanted = {"weight_scale": (outs, groups), "weight_zero_point": (outs // 8, groups)}
        else:
            wanted = {"scales": (groups, outs), "qzeros": (groups, outs // 8)}
        return all(shapes.get(name, shape) == shape for name, shape in wanted.items())

    def _present(self, base: str, *endings: str) -> list[str]:
        """Names of a matrix's tensors; ModelError for one that is missing."""
        names = [base + ending for ending in endings]
        missing = [name for name in names if name not in self.stored]
        if missing:
            raise ModelError(f"the quantised matrix {base[:100]} lacks {', '.join(missing)}")
        return names

    def kv_limits(self, layer: int) -> tuple[float, float] | None:
        """Largest magnitudes of a layer's keys and values by the scales that the checkpoint has for
        them, if any.
        """
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
        if name not in self.stored:
            return 0.0
        value = super().read(name)
        if value.size != 1:
            return 0.0
        return float(value.ravel()[0])

    def _check_order(self, name: str, groups: int) -> None:
        """ModelError for GPTQ's activation order, unless it is the order of the inputs."""
        if name in self.stored and not _is_in_order(super().read(name), groups):
            raise ModelError(
                f"{name[:100]} reorders inputs by activation (desc_act), which is not read: use a "
                "version of the model quantised without it"
            )


def _two_axes(name: str, shape: Shape) -> Shape:
    if len(shape) != 2:
        raise ModelError(f"{name[:100]} has {len(shape)} axes instead of 2")
    return shape


def _is_in_order(index: np.ndarray, groups: int) -> bool:
    """Whether the group of each input [I] rises with the inputs."""
    group = -(-len(index) // groups)
    return np.array_equal(index, np.arange(len(index)) // group)


def _block_size(size: int, count: int) -> int:
    """Of `count` blocks along an axis, a power of two; the last one may be cut short."""
    block = -(-size // count)
    return 1 << (block - 1).bit_length()


def _groups_fit(ins: int, groups: int) -> bool:
    """Whether so many inputs come in `groups` groups of a size that products take."""
    if groups == 1 and ins % repack.WHOLE_GROUP == 0:
        return True
    return ins // groups in Int4.group_sizes


def _inputs_of_group(inputs: int, groups: int) -> int:
    """How many of a matrix's inputs are laid out as one group, where so many groups are stored."""
    if groups == 1 and inputs > repack.WHOLE_GROUP:
        return repack.WHOLE_GROUP
    return inputs // groups
