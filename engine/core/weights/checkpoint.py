"""The tensors of every kind of checkpoint, as floats or as they are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from jitney.engine.core.weights.checkpoints.files import read_json
from jitney.engine.core.weights.checkpoints.hf_config import read_packing
from jitney.engine.core.weights.checkpoints.names import WeightMap
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.plain_folder import PlainFolder
from jitney.engine.core.weights.slices import Sliceable
from jitney.engine.core.weights.stored_matrix import StoredMatrix


class Checkpoint(Protocol):
    """A file or folder of named tensors, which are read on demand."""

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
        """A matrix as stored, if that is a supported scheme; else None."""
        ...


def may_keep(source: ModelSource, schemes: frozenset[str]) -> bool:
    """Whether a model's files may hold matrices in one of the schemes. No file of weights is
    read.
    """
    if source.kind == "gguf":
        return bool(schemes)
    packing = read_packing(read_json(Path(source.path), "config.json"))
    if packing is None:
        return False
    own = schemes & {"mxfp4"} if packing.method == "mxfp4" else schemes - {"mxfp4"}
    return bool(own)


def open_checkpoint(source: ModelSource, weights: WeightMap) -> Checkpoint:
    """The tensors of a folder or file; weights: what is wanted of it. The readers that few models
    need are imported here.
    """
    if source.kind == "gguf":
        from jitney.engine.core.weights.gguf_tensors import GGUFTensors

        return GGUFTensors(source.path)
    packing = read_packing(read_json(Path(source.path), "config.json"))
    if packing is None or packing.method == "mxfp4":
        return PlainFolder(source.path, unread=weights.ignored, part=weights.part)
    from jitney.engine.core.weights.quantised_folder import QuantisedFolder

    return QuantisedFolder(source.path, packing, weights.pieces, weights.part)
