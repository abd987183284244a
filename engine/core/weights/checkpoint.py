"""The tensors of every kind of checkpoint, as floats or as they are stored."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from jitney.engine.core.weights import repack
from jitney.engine.core.weights.checkpoints.files import read_json
from jitney.engine.core.weights.checkpoints.gguf import GGUFFile
from jitney.engine.core.weights.checkpoints.hf_config import read_packing
from jitney.engine.core.weights.checkpoints.names import WeightMap
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.plain_folder import PlainFolder
from jitney.engine.core.weights.slices import DecodedTensor, Sliceable
from jitney.engine.core.weights.stored_matrix import Along, Field, StoredMatrix

#: Block formats of GGUF that need not become floats: inputs of a block, its bytes, and what lays
#: them out.
_GGUF_FORMATS = {
    "Q4_0": (32, 18, repack.q4_0),
    "Q4_1": (32, 20, repack.q4_1),
    "Q4_K": (256, 144, repack.q4_k),
}


class Checkpoint(Protocol):
    """A file or folder of named tensors, of which no more is read than is asked for."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors in the file or folder."""
        ...

    def sliced(self, name: str) -> Sliceable:
        """A tensor as floats."""
        ...

    def matrix(self, name: str) -> StoredMatrix | None:
        """A matrix as it is stored, if that is one of our schemes."""
        ...


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


def may_keep(source: ModelSource, schemes: frozenset[str]) -> bool:
    """Whether a model's files may hold matrices in one of the schemes. No file of weights is
    read.
    """
    if source.kind == "gguf":
        return bool(schemes - {"mxfp4"})
    packing = read_packing(read_json(Path(source.path), "config.json"))
    if packing is None:
        return False
    own = schemes & {"mxfp4"} if packing.method == "mxfp4" else schemes - {"mxfp4"}
    return bool(own)


def open_checkpoint(source: ModelSource, weights: WeightMap) -> Checkpoint:
    """The tensors of a folder or file; weights: what is wanted of it."""
    if source.kind == "gguf":
        return _BlockGGUF(source.path)
    packing = read_packing(read_json(Path(source.path), "config.json"))
    if packing is None or packing.method == "mxfp4":
        return PlainFolder(source.path, unread=weights.ignored, part=weights.part)
    # Its formats are loaded for such a folder alone.
    from jitney.engine.core.weights.quantised_folder import QuantisedFolder

    return QuantisedFolder(source.path, packing, weights.pieces, weights.part)
