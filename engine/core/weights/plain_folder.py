"""Hugging Face folders of floats, and of experts that one tensor holds: Qwen3.5's, Granite 4's, and
gpt-oss's in floats or in MXFP4.

The matrices of an expert go by the names and shapes that they would have by themselves,
`experts.3.down_proj.weight` [O, I]; gates and ups, which one matrix has, are two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jitney.engine.common.errors import ModelError
from jitney.engine.core.weights import repack
from jitney.engine.core.weights.checkpoints.config_fields import MOST
from jitney.engine.core.weights.checkpoints.files import Shape
from jitney.engine.core.weights.checkpoints.safetensors import SafetensorsFolder, StoredTensor
from jitney.engine.core.weights.slices import DecodedTensor, Sliceable
from jitney.engine.core.weights.stored_matrix import Along, Field, StoredMatrix
from jitney.kernels.mxfp4 import Mxfp4

#: Names of tensors of all experts, in three pieces: before an expert's number, the matrix, and
#: what is stored of it, "" for floats.
_STACK = re.compile(r"(.+\.experts\.)(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")
#: The same of Granite 4, whose matrices go by the names of others.
_GRANITE_STACK = re.compile(r"(.+\.block_sparse_moe\.)(input|output)_linear\.weight")
_GRANITE_MATRICES = {"input": "gate_up_proj", "output": "down_proj"}
#: By that: how many axes the tensor has, and which of an expert's runs along its outputs. Floats
#: are [X, O, I], or, where experts have biases, [X, I, O], as `_TURNED`.
_TURNED = "_turned"
_AXES = {"": (3, 0), _TURNED: (3, 1), "_bias": (2, 0), "_blocks": (4, 0), "_scales": (3, 0)}
#: Matrices of an expert, by the stored one, which has gates before ups, or both in turns where
#: experts have biases.
_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
#: Bytes of a block of 32 weights.
_BLOCK_BYTES = Mxfp4.block // 2
#: How the second axis of blocks and scales runs along the inputs.
_BY_BLOCKS = Along(1, 1, Mxfp4.block)


class _Part(NamedTuple):
    """An expert's matrix or bias as a part of a tensor of all experts."""

    stored: str  # its name
    expert: int
    #: Which outputs.
    every: slice
    kind: str  # a key of `_AXES`


@dataclass(frozen=True)
class _OfExpert:
    """A part of a tensor of all experts, read lazily."""

    tensor: StoredTensor
    part: _Part

    @property
    def shape(self) -> Shape:
        shape = list(self.tensor.shape[1:])
        shape[self._outputs] = len(range(*self.part.every.indices(shape[self._outputs])))
        return tuple(shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def _outputs(self) -> int:
        """The axis that runs along them."""
        return _AXES[self.part.kind][1]

    def __getitem__(self, index: Any) -> np.ndarray:
        """See `Sliceable`."""
        slices: tuple[slice, ...] = () if index is ... else index
        places = [slice(0, size) for size in self.shape]
        for axis, place in enumerate(slices):
            places[axis] = slice(*place.indices(self.shape[axis])[:2])
        outputs, every = places[self._outputs], self.part.every
        first = every.start + every.step * outputs.start
        places[self._outputs] = slice(first, first + every.step * (outputs.stop - outputs.start))
        places = [slice(self.part.expert, self.part.expert + 1), *places]
        rows = self.tensor[tuple(_within(places, self.tensor.shape))][0]
        return rows[(slice(None),) * self._outputs + (slice(None, None, every.step),)]


class PlainFolder(SafetensorsFolder):
    """`SafetensorsFolder` with names for each expert's matrices: `matrix(name)` of MXFP4 as stored,
    `sliced(name)` floats. Raises ModelError also for tensors of experts that do not fit.
    """

    types: ClassVar[tuple[str, ...]] = (*SafetensorsFolder.types, "U8", "I64")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shapes = {}
        #: By the name of an expert's tensor.
        self.parts: dict[str, _Part] = {}
        for name, tensor in self.tensors.items():
            shape = tensor.shape
            match = _STACK.fullmatch(name)
            granite = _GRANITE_STACK.fullmatch(name)
            if match is not None:
                self._take_apart(name, shape, *match.groups())
            elif granite is not None:
                prefix, matrix = granite.groups()
                self._take_apart(name, shape, f"{prefix}experts.", _GRANITE_MATRICES[matrix], "")
            else:
                self.shapes[name] = shape

    def _check_kind(self, shard: str, name: str, kind: str) -> None:
        """Bytes are read of MXFP4 alone, integers of the tokens that a head drafts."""
        super()._check_kind(shard, name, kind)
        if kind == "I64" and not name.endswith("d2t"):
            raise ModelError(f"{shard}: {name[:100]} has type I64, which is read of d2t alone")
        if kind == "U8" and not name.endswith(("_blocks", "_scales")):
            raise ModelError(f"{shard}: {name[:100]} has type U8, which is read of MXFP4 alone")

    def _take_apart(self, name: str, shape: Shape, prefix: str, matrix: str, kind: str) -> None:
        """Note the parts of a tensor of all experts by names of their own."""
        parts = _MATRICES[matrix]
        in_turns = f"{prefix}{matrix}_bias" in self.tensors
        if kind == "" and in_turns:
            kind = _TURNED
        axes, outputs = _AXES[kind]
        fits = len(shape) == axes and 0 not in shape and shape[0] <= MOST.experts
        if not fits or shape[1 + outputs] % len(parts):
            raise ModelError(f"{name[:100]} {list(shape)} holds no {matrix} of experts")
        if kind == "_scales":
            return  # they go with their blocks
        size_out = shape[1 + outputs] // len(parts)
        own: Shape = (size_out,)
        if kind == "_blocks":
            self._check_blocks(name, shape)
            own = size_out, shape[2] * Mxfp4.block
        elif kind != "_bias":
            own = size_out, shape[2 - outputs]
        ending = "bias" if kind == "_bias" else "weight"
        for number, part in enumerate(parts):
            every = slice(number * size_out, (number + 1) * size_out, 1)
            if in_turns:
                every = slice(number, None, len(parts))
            for expert in range(shape[0]):
                own_name = f"{prefix}{expert}.{part}.{ending}"
                self.shapes[own_name] = own
                self.parts[own_name] = _Part(name, expert, every, kind)

    def _check_blocks(self, name: str, shape: Shape) -> None:
        scales = _scales_of(name)
        found = [(one.kind, one.shape) for one in map(self.tensors.get, (name, scales)) if one]
        if found != [("U8", (*shape[:3], _BLOCK_BYTES)), ("U8", shape[:3])]:
            raise ModelError(
                f"{name[:100]} {list(shape)} needs blocks of {_BLOCK_BYTES} bytes, and scales U8 "
                f"{list(shape[:3])} under {scales[-60:]}"
            )

    def matrix(self, name: str) -> StoredMatrix | None:
        """A matrix as it is stored; None for floats."""
        part = self.parts.get(name)
        if part is None or part.kind != "_blocks":
            return None
        scales = part._replace(stored=_scales_of(part.stored), kind="_scales")
        fields = [
            Field(self._of_expert(one), np.dtype(np.uint8), Along(0), _BY_BLOCKS)
            for one in (part, scales)
        ]
        outputs, inputs = self.shapes[name]
        return StoredMatrix((outputs, inputs), tuple(fields), repack.mxfp4, (1, Mxfp4.block))

    def sliced(self, name: str) -> Sliceable:
        """One tensor as floats."""
        if name not in self.parts:
            return self.tensors[name]
        matrix = self.matrix(name)
        if matrix is not None:
            return DecodedTensor(matrix.floats, matrix.shape)
        stored = self._of_expert(self.parts[name])
        if self.parts[name].kind != _TURNED:
            return stored
        return DecodedTensor(lambda rows, columns: stored[columns, rows].T, self.shapes[name])

    def _of_expert(self, part: _Part) -> _OfExpert:
        return _OfExpert(self.tensors[part.stored], part)


def _scales_of(blocks: str) -> str:
    """The name of the scales that go with blocks."""
    return f"{blocks.removesuffix('_blocks')}_scales"


def _within(places: list[slice], shape: Shape) -> list[slice]:
    """Slices that end where the axes do."""
    return [
        slice(place.start, min(place.stop, size)) for place, size in zip(places, shape, strict=True)
    ]
