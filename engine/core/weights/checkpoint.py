"""The tensors of every kind of checkpoint, as floats or as they are stored."""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from jitney.engine.core.weights import repack
from jitney.engine.core.weights.checkpoints.files import read_json
from jitney.engine.core.weights.checkpoints.gguf import GGUFFile
from jitney.engine.core.weights.checkpoints.hf_config import read_packing
from jitney.engine.core.weights.checkpoints.names import WeightMap
from jitney.engine.core.weights.checkpoints.safetensors import SafetensorsFolder
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.quantised_folder import QuantisedFolder
from jitney.engine.core.weights.slices import (
    DecodedTensor,
    Sliceable,
    StoredExpert,
    StoredTensor,
)
from jitney.engine.core.weights.stored_matrix import Along, Field, StoredMatrix

#: Block formats of GGUF that need not become floats: inputs of a block, its bytes, and what lays
#: them out.
_GGUF_FORMATS = {
    "Q4_0": (32, 18, repack.q4_0),
    "Q4_1": (32, 20, repack.q4_1),
    "Q4_K": (256, 144, repack.q4_k),
}
#: Tensors of all experts of a layer, [X, O, I] -> whose outputs each has, one behind the other.
_OF_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_AXES_OF_EXPERTS = 3


class Checkpoint(Protocol):
    """A file or folder of named tensors, of which no more is read than is asked for."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def sliced(self, name: str) -> Sliceable:
        """A tensor as floats."""
        ...

    def matrix(self, name: str) -> StoredMatrix | None:
        """A matrix as it is stored, if that is one of our schemes."""
        ...


class _PlainFolder(SafetensorsFolder):
    """A Hugging Face folder of floats. Experts that are stored as one tensor go by the names that
    they would have alone; wanted: names of the model's tensors.
    """

    def __init__(self, folder: str | Path, unread: tuple[str, ...], wanted: Container[str]):
        super().__init__(folder, unread=unread)
        #: Name of an expert's matrix -> that of the tensor that has it, and where.
        self._of_experts: dict[str, tuple[str, int, slice]] = {}
        for name, shape in list(self.shapes.items()):
            base, _, matrices = name.rpartition(".")
            parts = _OF_EXPERTS.get(matrices, ())
            if len(shape) == _AXES_OF_EXPERTS and parts and f"{base}.0.{parts[0]}.weight" in wanted:
                self._set_apart(name, base, parts)

    def _set_apart(self, name: str, base: str, parts: tuple[str, ...]) -> None:
        n_experts, rows, inputs = self.shapes.pop(name)
        size = rows // len(parts)
        for expert in range(n_experts):
            for number, part in enumerate(parts):
                own = f"{base}.{expert}.{part}.weight"
                self._of_experts[own] = name, expert, slice(number * size, (number + 1) * size)
                self.shapes[own] = size, inputs

    def sliced(self, name: str) -> Sliceable:
        if name in self._of_experts:
            whole, expert, rows = self._of_experts[name]
            place = self.places[whole]
            return StoredExpert(place.file, place.name, expert, rows, self.shapes[name])
        place = self.places[name]
        return StoredTensor(place.file, place.name, self.shapes[name])

    def matrix(self, name: str) -> StoredMatrix | None:
        return None


class _BlockGGUF(GGUFFile):
    """A GGUF file whose 4-bit blocks can be had as they are."""

    def sliced(self, name: str) -> DecodedTensor:
        return DecodedTensor(partial(self.part, name), self.tensors[name].shape)

    def matrix(self, name: str) -> StoredMatrix | None:
        """The matrix in 4 bits; None for other types."""
        info = self.tensors[name]
        if info.kind_name not in _GGUF_FORMATS:
            return None
        block, size, lay_out = _GGUF_FORMATS[info.kind_name]
        rows = Field(self.rows(name), np.dtype(np.uint8), Along(0), Along(1, size, block))
        outputs, inputs = info.shape
        return StoredMatrix((outputs, inputs), (rows,), lay_out, together=(1, block))


def open_checkpoint(source: ModelSource, weights: WeightMap) -> Checkpoint:
    """The tensors of a folder or file; weights: what is wanted of it."""
    if source.kind == "gguf":
        return _BlockGGUF(source.path)
    packing = read_packing(read_json(Path(source.path), "config.json"))
    if packing is None:
        return _PlainFolder(source.path, weights.ignored, weights.pieces)
    return QuantisedFolder(source.path, packing, weights.pieces)
