"""The int8 folder that is made for vLLM: its matrices mean what the plain ones do."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jitney.engine.bench.w8a8 import write_w8a8
from jitney.engine.errors import ModelError

MATRIX = "model.layers.0.mlp.down_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"


def plain_folder(folder: Path, **config: object) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {MATRIX: (8, 16), NORM: (16,), EMBEDDING: (32, 16)}
    tensors = {
        name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    (folder / "tokenizer.json").write_text("{}")
    return tensors


def test_matrices_of_layers_are_int8_with_a_scale_for_each_output(tmp_path: Path):
    plain = plain_folder(tmp_path / "plain")
    write_w8a8(tmp_path / "plain", tmp_path / "w8a8")
    made = load_file(tmp_path / "w8a8" / "model.safetensors")
    codes, scales = made[MATRIX], made[f"{MATRIX}_scale"].astype(np.float32)
    assert codes.dtype == np.int8 and scales.shape == (8, 1)
    wide = plain[MATRIX].astype(np.float32)
    assert np.abs(codes * scales - wide).max() <= 0.51 * scales.max()
    assert np.abs(codes).max(axis=1).min() >= 126, "each output uses all of its range"
    for name in (NORM, EMBEDDING):
        assert np.array_equal(made[name], plain[name]) and f"{name}_scale" not in made
    config = json.loads((tmp_path / "w8a8" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert (tmp_path / "w8a8" / "tokenizer.json").exists()


def test_a_quantised_folder_is_refused(tmp_path: Path):
    plain_folder(tmp_path / "plain", quantization_config={"quant_method": "gptq"})
    with pytest.raises(ModelError, match="quantised already"):
        write_w8a8(tmp_path / "plain", tmp_path / "w8a8")
