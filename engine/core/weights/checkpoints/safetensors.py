"""Untrusted Hugging Face checkpoints: one safetensors file or an index of shards; jax-free."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import msgspec
import numpy as np

from jitney.engine.common.errors import ModelError
from jitney.engine.core.weights.checkpoints.files import Shape, read_json, safe_file
from jitney.engine.core.weights.checkpoints.names import is_read, long_name

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
#: Types of plain numbers; 8-bit and packed tensors would need scales.
_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in its file, of which parts can be read in its stored dtype (bfloat16 and fp8 by
    ml_dtypes).
    """

    path: Path
    #: That file, as the safetensors library opens it.
    file: Any
    #: The tensor's name there.
    name: str
    #: Row-major.
    shape: Shape
    #: safetensors' name of its dtype.
    kind: str

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, index: Any) -> np.ndarray:
        """See `jitney.engine.core.weights.slices.Sliceable`."""
        if self.kind == "F8_E4M3":
            return self._mapped()[index]
        if index is ...:
            return self.file.get_tensor(self.name)
        return self.file.get_slice(self.name)[index]

    def _mapped(self) -> np.ndarray:
        """The tensor, mapped: safetensors 0.8 fails at fp8, as numpy has no type of that name."""
        with open(self.path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            first, _ = json.loads(file.read(size))[self.name]["data_offsets"]
        return np.memmap(self.path, ml_dtypes.float8_e4m3fn, "r", 8 + size + first, self.shape)


@dataclass(eq=False)
class SafetensorsFolder:
    """The tensors of a model folder, by the names of the model with its head (`long_name`).

    shards: the files that hold them; empty: the model's. Raises ModelError for missing, damaged or
    outside files.
    """

    #: dtypes that are read.
    types: ClassVar[tuple[str, ...]] = _DTYPES

    folder: str | Path
    tensors: dict[str, StoredTensor] = field(default_factory=dict, init=False)
    #: By the names that the model's weights have.
    shapes: dict[str, Shape] = field(default_factory=dict, init=False)
    shards: tuple[str, ...] = ()
    #: Endings of tensors that are not read, which may be of any type.
    unread: tuple[str, ...] = ()
    #: See `is_read`.
    part: str = ""
    #: Bytes of the tensors that are read.
    stored_bytes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        for name in self.shards or _shard_names(Path(self.folder), self.part):
            self._add(name)
        self.shapes = {name: tensor.shape for name, tensor in self.tensors.items()}

    def _add(self, shard: str) -> None:
        """Open one file and note what it holds."""
        with _one_line_errors(shard):
            path, file = _opened(Path(self.folder), shard)
            for stored in file.keys():  # noqa: SIM118 - safe_open is no mapping
                if not is_read(stored, self.part):
                    continue
                name = long_name(stored)
                if name in self.tensors:
                    raise ModelError(f"{name[:100]} is stored twice, the second time in {shard}")
                piece = file.get_slice(stored)
                shape, kind = tuple(piece.get_shape()), piece.get_dtype()
                self.tensors[name] = StoredTensor(path, file, stored, shape, kind)
                if not name.endswith(self.unread):
                    self._check_kind(shard, name, kind)
                    bits = int(re.sub(r"^\D+(\d+).*", r"\1", kind))
                    self.stored_bytes += math.prod(shape) * bits // 8

    def _check_kind(self, shard: str, name: str, kind: str) -> None:
        """Raise ModelError for a tensor with a dtype that is not read."""
        if kind not in self.types:
            raise ModelError(
                f"{shard}: {name[:100]} has type {kind}, not one of {', '.join(self.types)}"
            )

    def read(self, name: str) -> np.ndarray:
        """The whole of one tensor."""
        return self.tensors[name][...]


class _ShardIndex(msgspec.Struct):
    """The fields of model.safetensors.index.json that are read."""

    #: Name of a tensor -> file that holds it.
    weight_map: dict[str, str]


def tensor_names(folder: Path) -> set[str]:
    """The names of a folder's tensors as stored; none of one without safetensors. Raises
    ModelError.
    """
    if safe_file(folder, _INDEX, missing_ok=True) is not None:
        return {*_read_index(folder).weight_map}
    if safe_file(folder, _SINGLE, missing_ok=True) is not None:
        with _one_line_errors(_SINGLE):
            return {*_opened(folder, _SINGLE)[1].keys()}
    return set()


def lacks_head(folder: Path) -> bool:
    """Whether a folder holds a base model or the text model of another without an output head.
    Raises ModelError.
    """
    names = tensor_names(folder)
    if not names:
        return False
    long_names = {long_name(name) for name in names}
    return "lm_head.weight" not in long_names and long_names != names


@contextmanager
def _one_line_errors(shard: str) -> Iterator[None]:
    """Raise ModelError for what the safetensors library finds wrong with a file."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{shard}: not a sound safetensors file: {str(error)[:200]}") from error


def _opened(folder: Path, shard: str) -> tuple[Path, Any]:
    """A file of the folder, and what the safetensors library makes of it."""
    from safetensors import safe_open

    path = safe_file(folder, shard)
    return path, safe_open(path, framework="numpy")


def _shard_names(folder: Path, part: str) -> list[str]:
    if safe_file(folder, _INDEX, missing_ok=True) is not None:
        places = _read_index(folder).weight_map
        return sorted({shard for name, shard in places.items() if is_read(name, part)})
    if safe_file(folder, _SINGLE, missing_ok=True) is None:
        raise ModelError(
            f"the model folder has neither {_SINGLE} nor {_INDEX}; other weight formats are "
            "not read"
        )
    return [_SINGLE]


def _read_index(folder: Path) -> _ShardIndex:
    try:
        return msgspec.convert(read_json(folder, _INDEX), _ShardIndex)
    except msgspec.ValidationError:
        raise ModelError(f"{_INDEX}: weight_map must name a file for each tensor") from None
