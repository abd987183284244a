"""The tensors of every kind of checkpoint, as floats or as they are stored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp

from jitney.engine.checkpoints.files import read_json
from jitney.engine.checkpoints.gguf import GGUFFile
from jitney.engine.checkpoints.names import WeightMap
from jitney.engine.checkpoints.quantization_config import read_packing
from jitney.engine.checkpoints.safetensors import SafetensorsFolder
from jitney.engine.checkpoints.sources import ModelSource
from jitney.engine.loading import repack
from jitney.engine.loading.quantised_folder import QuantisedFolder
from jitney.engine.loading.slices import DecodedTensor, Sliceable, StoredTensor
from jitney.engine.models.quantization import Packed

#: Block formats of GGUF that need not become floats.
_GGUF_FORMATS: dict[str, Callable[[jax.Array], Packed]] = {
    "Q4_0": repack.q4_0,
    "Q4_1": repack.q4_1,
    "Q4_K": repack.q4_k,
}


class Checkpoint(Protocol):
    """A file or folder of named tensors."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def sliced(self, name: str) -> Sliceable:
        """A tensor as floats, of which no more is read than is asked for if its format allows."""
        ...

    def packed(self, name: str) -> Packed | None:
        """A matrix as it is stored, on the default device, if that is one of our schemes."""
        ...

    def packed_on_host(self, name: str) -> Packed | None:
        """The same in numpy, of which no more is read than is used; None where only a device makes
        it.
        """
        ...


class _PlainFolder(SafetensorsFolder):
    """A Hugging Face folder of floats."""

    def sliced(self, name: str) -> StoredTensor:
        return StoredTensor(self.files[name], name, self.shapes[name])

    def packed(self, name: str) -> Packed | None:
        return None

    def packed_on_host(self, name: str) -> Packed | None:
        return None


class _BlockGGUF(GGUFFile):
    """A GGUF file whose 4-bit blocks can be had as they are."""

    def sliced(self, name: str) -> DecodedTensor:
        return DecodedTensor(partial(self.part, name), self.tensors[name].shape)

    def packed(self, name: str) -> Packed | None:
        """The matrix in 4 bits, on the default device; None for other types."""
        convert = _GGUF_FORMATS.get(self.tensors[name].kind_name)
        if convert is None:
            return None
        return convert(jnp.asarray(self.rows(name)))

    def packed_on_host(self, name: str) -> Packed | None:
        return None


def open_checkpoint(source: ModelSource, weights: WeightMap) -> Checkpoint:
    """The tensors of a folder or file; weights: what is wanted of it."""
    if source.kind == "gguf":
        return _BlockGGUF(source.path)
    config = read_json(Path(source.path), "config.json")
    packing = read_packing(config.get("quantization_config"))
    if packing is None:
        return _PlainFolder(source.path)
    return QuantisedFolder(source.path, packing, weights.pieces)
