"""Hugging Face folders of floats, and of experts that one tensor holds: gpt-oss's, in floats or in
MXFP4.

The matrix of an expert goes by the name and shape that it would have by itself,
`experts.3.down_proj.weight` [O, I].
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jitney.engine.common.errors import ModelError
from jitney.engine.core.weights import repack
from jitney.engine.core.weights.checkpoints.config_fields import MOST
from jitney.engine.core.weights.checkpoints.files import Shape
from jitney.engine.core.weights.checkpoints.safetensors import SafetensorsFolder
from jitney.engine.core.weights.slices import DecodedTensor, Sliceable, StoredTensor
from jitney.engine.core.weights.stored_matrix import Along, Field, StoredMatrix
from jitney.kernels.mxfp4 import Mxfp4

#: Names of tensors of all experts: before and behind the place of an expert's number; "" is
#: floats [X, I, O].
_STACK = re.compile(r"(.+\.experts\.)([a-z_]+_proj)(|_bias|_blocks|_scales)")
#: Axes of a tensor of all experts, by the ending of its name.
_AXES = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}
#: Bytes of a block of 32 weights.
_BLOCK_BYTES = Mxfp4.block // 2
#: How the second axis of blocks and scales runs along the inputs.
_BY_BLOCKS = Along(1, 1, Mxfp4.block)


@dataclass(frozen=True)
class _OfExpert:
    """A tensor [X, ...] of which one expert's part is to be had."""

    tensor: StoredTensor
    expert: int

    @property
    def shape(self) -> Shape:
        return self.tensor.shape[1:]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, index: Any) -> np.ndarray:
        """As of `Sliceable`."""
        rest = () if index is ... else index
        return self.tensor[(slice(self.expert, self.expert + 1), *rest)][0]


class PlainFolder(SafetensorsFolder):
    """`SafetensorsFolder` with a name for each expert's matrices: `matrix(name)` of MXFP4 as
    stored, `sliced(name)` floats. Raises ModelError also for tensors of experts that do not fit.
    """

    types: ClassVar[tuple[str, ...]] = (*SafetensorsFolder.types, "U8")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stored = self.shapes
        self.shapes = {}
        #: Name of an expert's tensor -> the one that it is part of, and its number.
        self.experts: dict[str, tuple[str, int]] = {}
        for name, shape in self.stored.items():
            found = _STACK.fullmatch(name)
            if found is None:
                self.shapes[name] = shape
            else:
                self._part(name, shape, *found.groups())

    def _check_kind(self, shard: str, name: str) -> None:
        """Bytes are read of MXFP4 alone."""
        super()._check_kind(shard, name)
        if self.kinds[name] == "U8" and not name.endswith(("_blocks", "_scales", *self.unread)):
            raise ModelError(f"{shard}: {name[:100]} has type U8, which is read of MXFP4 alone")

    def _part(self, name: str, shape: Shape, prefix: str, matrix: str, ending: str) -> None:
        """Note the parts of a tensor of all experts by names of their own."""
        if len(shape) != _AXES[ending] or 0 in shape or shape[0] > MOST.experts:
            raise ModelError(f"{name[:100]} {list(shape)} holds no {matrix} of experts")
        own = shape[1:]
        match ending:
            case "":
                own = shape[2], shape[1]
            case "_blocks":
                self._check_blocks(name, shape)
                own = shape[1], shape[2] * Mxfp4.block
            case "_scales":
                return  # they go with their blocks
        kind = "bias" if ending == "_bias" else "weight"
        for expert in range(shape[0]):
            part = f"{prefix}{expert}.{matrix}.{kind}"
            self.shapes[part] = own
            self.experts[part] = name, expert

    def _check_blocks(self, name: str, shape: Shape) -> None:
        scales = _scales_of(name)
        kinds = self.kinds[name], self.kinds.get(scales)
        wanted = (*shape[:3], _BLOCK_BYTES), shape[:3]
        if kinds != ("U8", "U8") or (shape, self.stored[scales]) != wanted:
            raise ModelError(
                f"{name[:100]} {list(shape)} needs blocks of {_BLOCK_BYTES} bytes, and scales U8 "
                f"{list(shape[:3])} under {scales[-60:]}"
            )

    def matrix(self, name: str) -> StoredMatrix | None:
        """A matrix as it is stored; None for floats."""
        stored, expert = self.experts.get(name, ("", 0))
        if not stored.endswith("_blocks"):
            return None
        blocks, scales = (
            Field(_OfExpert(self._tensor(one), expert), np.dtype(np.uint8), Along(0), _BY_BLOCKS)
            for one in (stored, _scales_of(stored))
        )
        outputs, inputs = self.shapes[name]
        return StoredMatrix((outputs, inputs), (blocks, scales), repack.mxfp4, (1, Mxfp4.block))

    def sliced(self, name: str) -> Sliceable:
        """One tensor as floats."""
        if name not in self.experts:
            return self._tensor(name)
        matrix = self.matrix(name)
        if matrix is not None:
            return DecodedTensor(matrix.floats, matrix.shape)
        stored, expert = self.experts[name]
        part = _OfExpert(self._tensor(stored), expert)
        if part.ndim == 1:
            return part
        return DecodedTensor(lambda rows, columns: part[columns, rows].T, self.shapes[name])

    def _tensor(self, name: str) -> StoredTensor:
        place = self.places[name]
        return StoredTensor(place.file, place.name, self.stored[name])


def _scales_of(blocks: str) -> str:
    """The name of the scales that go with blocks."""
    return f"{blocks.removesuffix('_blocks')}_scales"
