"""Hugging Face checkpoints: one safetensors file or an index of shards; jax-free.

A checkpoint folder is untrusted: shards must be plain names inside it, and the safetensors library checks every header
(length, overlaps, offsets) before it maps a tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jitney.engine.errors import ModelError
from jitney.engine.weights.files import read_json, safe_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Types whose values mean what they say; an 8-bit or packed tensor needs scales this engine does not apply.
DTYPES = ("F64", "F32", "F16", "BF16")


class SafetensorsFolder:
    """The tensors of a model folder: `shapes` and `read(name)`.

    Raises ModelError when the folder holds no safetensors, the index names a file outside it or one that is not there,
    or a file is damaged.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.files: dict[str, Any] = {}
        for name in shard_names(self.folder):
            self.add(name)

    def add(self, shard: str) -> None:
        """Open one file and note what it holds."""
        from safetensors import SafetensorError, safe_open

        try:
            file = safe_open(safe_file(self.folder, shard), framework="numpy")
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                if name in self.files:
                    raise ModelError(f"{name[:100]} is stored in two files, the second is {shard}")
                piece = file.get_slice(name)
                if (dtype := piece.get_dtype()) not in DTYPES:
                    raise ModelError(f"{shard}: {name[:100]} has type {dtype}, not one of {', '.join(DTYPES)}")
                self.shapes[name] = tuple(piece.get_shape())
                self.files[name] = file
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{shard}: not a sound safetensors file: {str(error)[:200]}") from error

    def read(self, name: str) -> np.ndarray:
        """One tensor in its stored dtype (bfloat16 as ml_dtypes' type) and row-major shape."""
        return self.files[name].get_tensor(name)


def shard_names(folder: Path) -> list[str]:
    """Names of the safetensors files that make up the model."""
    if safe_file(folder, INDEX, missing_ok=True) is not None:
        weight_map = read_json(folder, INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{INDEX}: weight_map must name a file for each tensor")
        return sorted(set(weight_map.values()))
    if safe_file(folder, SINGLE, missing_ok=True) is not None:
        return [SINGLE]
    raise ModelError(f"the model folder has neither {SINGLE} nor {INDEX}; other weight formats are not read")
