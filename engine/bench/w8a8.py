"""A copy of a Hugging Face folder whose products are int8 by int8, as vLLM reads it, so that its
int8 can be measured beside ours.

The form is that of the compressed-tensors library, "int-quantized": every matrix of the layers as
whole numbers from -127 to 127 with one scale for each output, and rows rounded as they come, each
with its own scale. That is what `--weights int8` does here on a CPU. The embedding, the head and
the norms stay as they are.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from jitney.engine.checkpoints.files import read_json
from jitney.engine.checkpoints.safetensors import SafetensorsFolder
from jitney.engine.errors import ModelError
from jitney.engine.types import JsonDict

#: What stands beside the weights and is copied as it is.
_BESIDE = ("*.json", "*.jinja", "*.txt", "*.model")
_WEIGHTS = "model.safetensors"
_MOST = 127
_SCALED_INTS: JsonDict = {"num_bits": 8, "type": "int", "symmetric": True}


def write_w8a8(folder: Path, target: Path) -> None:
    """Make `target`, a new folder, of the model in `folder`. Raises ModelError where `folder` holds
    none that can be read, or one that is quantised already.
    """
    config = read_json(folder, "config.json")
    if "quantization_config" in config:
        raise ModelError(f"{folder.name} is quantised already")
    source = SafetensorsFolder(folder)
    tensors: dict[str, np.ndarray] = {}
    for name in source.shapes:
        tensors |= _stored(name, source.read(name))
    target.mkdir()
    for pattern in _BESIDE:
        for file in folder.glob(pattern):
            shutil.copyfile(file, target / file.name)
    (target / "model.safetensors.index.json").unlink(missing_ok=True)
    config["quantization_config"] = _scheme()
    (target / "config.json").write_text(json.dumps(config, indent=1))
    _save(tensors, target / _WEIGHTS)


def _stored(name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """A tensor as it is, or a matrix of a layer [O, I] as int8 with scales [O, 1]."""
    if ".layers." not in name or tensor.ndim != 2 or not name.endswith(".weight"):
        return {name: tensor}
    wide = tensor.astype(np.float32)
    scales = np.maximum(np.abs(wide).max(axis=1, keepdims=True), 1e-12) / _MOST
    scales = scales.astype(tensor.dtype)
    codes = np.rint(wide / scales.astype(np.float32))
    return {
        name: np.clip(codes, -_MOST, _MOST).astype(np.int8),
        f"{name}_scale": scales,
    }


def _scheme() -> JsonDict:
    """What config.json says of it."""
    weights = _SCALED_INTS | {"strategy": "channel", "dynamic": False}
    rows = _SCALED_INTS | {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _save(tensors: dict[str, np.ndarray], file: Path) -> None:
    from safetensors.numpy import save_file

    whole = {name: np.ascontiguousarray(each) for name, each in tensors.items()}
    save_file(whole, file, metadata={"format": "pt"})
