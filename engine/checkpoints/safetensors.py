"""Hugging Face checkpoints: one safetensors file or an index of shards; jax-free.

A checkpoint folder is untrusted: shards must be plain names inside it, and the safetensors library
checks every header (length, overlaps, offsets) before it maps a tensor.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import msgspec
import numpy as np

from jitney.engine.checkpoints.files import Shape, read_json, safe_file
from jitney.engine.errors import ModelError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
#: Types whose values mean what they say; an 8-bit or packed tensor needs scales this engine does
#: not apply.
_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(eq=False)
class SafetensorsFolder:
    """The tensors of a model folder: `shapes`, `kinds` (safetensors' names of dtypes) and
    `read(name)`. shards: the files that hold them; empty: the model's.

    Raises ModelError when the folder holds no safetensors, the index names a file outside it or one
    that is not there, or a file is damaged.
    """

    #: dtypes that are read.
    types: ClassVar[tuple[str, ...]] = _DTYPES

    folder: str | Path
    shapes: dict[str, Shape] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    shards: tuple[str, ...] = ()
    #: Endings of tensors that nobody reads, which may be of any type.
    unread: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.shards or _shard_names(Path(self.folder)):
            self.add(name)

    def add(self, shard: str) -> None:
        """Open one file and note what it holds."""
        from safetensors import SafetensorError, safe_open

        try:
            path = safe_file(Path(self.folder), shard)
            file = safe_open(path, framework="numpy")
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                if name in self.files:
                    raise ModelError(f"{name[:100]} is stored in two files, the second is {shard}")
                self.files[name], self.paths[name] = file, path
                self._note(shard, name, file.get_slice(name))
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{shard}: not a sound safetensors file: {str(error)[:200]}"
            ) from error

    def _note(self, shard: str, name: str, piece: Any) -> None:
        """Its shape and dtype."""
        self.shapes[name] = tuple(piece.get_shape())
        self.kinds[name] = piece.get_dtype()
        self._check_kind(shard, name)

    def _check_kind(self, shard: str, name: str) -> None:
        """ModelError unless it is one that is read."""
        kind = self.kinds[name]
        if kind not in self.types and not name.endswith(self.unread):
            raise ModelError(
                f"{shard}: {name[:100]} has type {kind}, not one of {', '.join(self.types)}"
            )

    def read(self, name: str) -> np.ndarray:
        """One tensor in its stored dtype (bfloat16 and fp8 as ml_dtypes' types) and row-major
        shape.
        """
        if self.kinds[name] == "F8_E4M3":
            return self._read_fp8(name)
        return self.files[name].get_tensor(name)

    def _read_fp8(self, name: str) -> np.ndarray:
        # safetensors 0.8 looks for numpy's own type of that name, which is not there.
        stored = _stored_bytes(self.paths[name], name)
        return stored.view(ml_dtypes.float8_e4m3fn).reshape(self.shapes[name])


class _ShardIndex(msgspec.Struct):
    """What is read of model.safetensors.index.json."""

    #: Name of a tensor -> file that holds it.
    weight_map: dict[str, str]


def _stored_bytes(path: Path, name: str) -> np.ndarray:
    """The bytes of one tensor of a file whose header the library has checked, mapped."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        first, end = json.loads(file.read(size))[name]["data_offsets"]
    return np.memmap(path, np.uint8, "r", 8 + size + first, (end - first,))


def _shard_names(folder: Path) -> list[str]:
    if safe_file(folder, _INDEX, missing_ok=True) is not None:
        return _indexed_shards(folder)
    if safe_file(folder, _SINGLE, missing_ok=True) is None:
        raise ModelError(
            f"the model folder has neither {_SINGLE} nor {_INDEX}; other weight formats are "
            "not read"
        )
    return [_SINGLE]


def _indexed_shards(folder: Path) -> list[str]:
    try:
        index = msgspec.convert(read_json(folder, _INDEX), _ShardIndex)
    except msgspec.ValidationError:
        raise ModelError(f"{_INDEX}: weight_map must name a file for each tensor") from None
    return sorted({*index.weight_map.values()})
