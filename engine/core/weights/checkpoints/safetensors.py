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
class _Stored:
    """The place of a tensor."""

    path: Path
    #: That file, as the safetensors library opens it.
    file: Any
    #: The tensor's name there.
    name: str


@dataclass(eq=False)
class SafetensorsFolder:
    """The tensors of a model folder: `shapes`, `kinds` (safetensors' dtypes) and `read(name)`.

    shards: the files that hold them; empty: the model's. Names are those of the model with its head
    (`long_name`). Raises ModelError for missing, damaged or outside files.
    """

    #: dtypes that are read.
    types: ClassVar[tuple[str, ...]] = _DTYPES

    folder: str | Path
    shapes: dict[str, Shape] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    places: dict[str, _Stored] = field(default_factory=dict)
    shards: tuple[str, ...] = ()
    #: Endings of tensors that are not read, which may be of any type.
    unread: tuple[str, ...] = ()
    #: See `is_read`.
    part: str = ""
    #: Bytes of the tensors that are read.
    stored_bytes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        for name in self.shards or _shard_names(Path(self.folder), self.part):
            self.add(name)

    def add(self, shard: str) -> None:
        """Open one file and note what it holds."""
        with _one_line_errors(shard):
            path, file = _opened(Path(self.folder), shard)
            for stored in file.keys():  # noqa: SIM118 - safe_open is no mapping
                if not is_read(stored, self.part):
                    continue
                name = long_name(stored)
                if name in self.places:
                    raise ModelError(f"{name[:100]} is stored twice, the second time in {shard}")
                self.places[name] = _Stored(path, file, stored)
                self._note(shard, name, file.get_slice(stored))

    def _note(self, shard: str, name: str, piece: Any) -> None:
        """Note a tensor's shape and dtype."""
        self.shapes[name] = tuple(piece.get_shape())
        self.kinds[name] = piece.get_dtype()
        self._check_kind(shard, name)
        if not name.endswith(self.unread):
            bits = int(re.sub(r"^\D+(\d+).*", r"\1", self.kinds[name]))
            self.stored_bytes += math.prod(self.shapes[name]) * bits // 8

    def _check_kind(self, shard: str, name: str) -> None:
        """Raise ModelError for a tensor with a dtype that is not read."""
        kind = self.kinds[name]
        if kind not in self.types and not name.endswith(self.unread):
            raise ModelError(
                f"{shard}: {name[:100]} has type {kind}, not one of {', '.join(self.types)}"
            )

    def read(self, name: str) -> np.ndarray:
        """One tensor in its stored dtype (bfloat16 and fp8 by ml_dtypes) and row-major shape."""
        if self.kinds[name] == "F8_E4M3":
            return self._read_fp8(name)
        place = self.places[name]
        return place.file.get_tensor(place.name)

    def _read_fp8(self, name: str) -> np.ndarray:
        # safetensors 0.8 fails here, as numpy has no type of that name.
        place = self.places[name]
        stored = _stored_bytes(place.path, place.name)
        return stored.view(ml_dtypes.float8_e4m3fn).reshape(self.shapes[name])


class _ShardIndex(msgspec.Struct):
    """The fields of model.safetensors.index.json that are read."""

    #: Name of a tensor -> file that holds it.
    weight_map: dict[str, str]


def _stored_bytes(path: Path, name: str) -> np.ndarray:
    """The bytes of one tensor of a file whose header the library has checked, mapped."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        first, end = json.loads(file.read(size))[name]["data_offsets"]
    return np.memmap(path, np.uint8, "r", 8 + size + first, (end - first,))


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
