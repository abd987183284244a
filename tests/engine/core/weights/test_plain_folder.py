"""Folders in which one tensor holds a matrix of all experts, in floats or in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from reference_logits import DATA, SCRIPT
from safetensors.numpy import save_file

from jitney.engine.common.errors import ConfigError, ModelError
from jitney.engine.core.models.mixture import ExpertLinear
from jitney.engine.core.models.quantization import widened
from jitney.engine.core.models.registry import model_class
from jitney.engine.core.models.sharding import TENSOR, Shares
from jitney.engine.core.weights.checkpoint import open_checkpoint
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.describe import count_parameters
from jitney.engine.core.weights.load import (
    WeightStorage,
    _check_groups,
    load_model,
    load_shapes,
)

CASE = DATA["cases"]["gpt_oss_mxfp4"]
KEPT = WeightStorage("plain", frozenset({"mxfp4"}))
BLOCKS = "model.layers.1.mlp.experts.gate_up_proj_blocks"
SCALES = "model.layers.1.mlp.experts.gate_up_proj_scales"


def write(folder: Path, tensors: dict[str, np.ndarray] | None = None, **config: Any) -> ModelSource:
    """The case with some of its tensors and settings replaced."""
    stored = {
        name: SCRIPT.random_tensor(name, tuple(shape)) for name, shape in CASE["shapes"].items()
    }
    save_file(stored | (tensors or {}), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CASE["config"] | config))
    return ModelSource.resolve(str(folder))


def experts_of(source: ModelSource, storage: WeightStorage) -> list[ExpertLinear]:
    model = load_model(source, source.config, jnp.float32, storage=storage)
    return [one for one in model.linears() if isinstance(one, ExpertLinear)]


def test_mxfp4_is_kept_number_for_number(tmp_path: Path):
    source = write(tmp_path)
    kept, plain = experts_of(source, KEPT), experts_of(source, WeightStorage())
    assert len(kept) == 2 * source.config.n_layers
    for ours, floats in zip(kept, plain, strict=True):
        assert ours.packed.scheme == "mxfp4" and floats.packed.scheme == "plain"
        np.testing.assert_array_equal(widened(ours.packed), floats.kernel[...])
    without = load_shapes(source, source.config, 1, jnp.float32, KEPT)
    loaded = load_model(source, source.config, jnp.float32, storage=KEPT)
    for shape, ours in zip(without.linears(), loaded.linears(), strict=True):
        for one, other in zip(shape.packed, ours.packed, strict=True):
            assert (one is None) == (other is None)
            assert one is None or (one.shape, one.dtype) == (other.shape, other.dtype)
    assert count_parameters(loaded) == count_parameters(
        load_model(source, source.config, jnp.float32)
    )


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_other_formats_that_are_asked_for_are_made_of_it(tmp_path: Path, scheme: str):
    source = write(tmp_path)
    asked = WeightStorage.choose(scheme, "cpu", None)  # pyright: ignore[reportArgumentType]
    for ours, floats in zip(
        experts_of(source, asked), experts_of(source, WeightStorage()), strict=True
    ):
        assert ours.packed.scheme == scheme
        off = np.asarray(widened(ours.packed)) - np.asarray(floats.kernel[...])
        assert 0 < np.abs(off).max() < 0.2 * np.abs(floats.kernel[...]).max()


def test_a_part_of_an_expert_is_read_where_it_lies(tmp_path: Path):
    """Gates are every second output, ups the others; of floats [X, I, O] too."""
    source = write(tmp_path)
    weights = model_class(source.config.architecture).weight_map(source.config, "hf")
    checkpoint = open_checkpoint(source, weights)
    name = "model.layers.0.mlp.experts.3.{}.weight"
    gate, up = (checkpoint.matrix(name.format(one)) for one in ("gate_proj", "up_proj"))
    assert gate is not None and up is not None
    whole = {one: matrix.fields[0].stored[...] for one, matrix in (("gate", gate), ("up", up))}
    stored = SCRIPT.random_tensor(
        "model.layers.0.mlp.experts.gate_up_proj_blocks",
        tuple(CASE["shapes"]["model.layers.0.mlp.experts.gate_up_proj_blocks"]),
    )[3]
    np.testing.assert_array_equal(whole["gate"], stored[0::2])
    np.testing.assert_array_equal(whole["up"], stored[1::2])
    part = up.fields[0].stored[5:9, 1:2]
    np.testing.assert_array_equal(part, stored[1::2][5:9, 1:2])


@pytest.mark.parametrize(
    "tensors,reason",
    [
        ({SCALES: np.zeros((8, 256, 1), np.uint8)}, r"gate_up_proj_blocks .* needs blocks of 16"),
        ({SCALES: np.zeros((8, 256, 2), np.float32)}, r"gate_up_proj_blocks .* scales U8"),
        ({BLOCKS: np.zeros((8, 255, 2, 16), np.uint8)}, "holds no gate_up_proj of experts"),
        ({BLOCKS: np.zeros((8, 256, 32), np.uint8)}, "holds no gate_up_proj of experts"),
        ({"model.norm.weight": np.zeros(64, np.uint8)}, "type U8, which is read of MXFP4 alone"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, tensors: dict[str, np.ndarray], reason: str
):
    source = write(tmp_path, tensors)
    with pytest.raises(ModelError, match=reason):
        load_model(source, source.config, jnp.float32)


def test_blocks_are_not_torn_apart(tmp_path: Path):
    """128 inputs of an expert are four blocks of 32: eight devices would have half of one each."""
    source = write(tmp_path)
    weights = model_class(source.config.architecture).weight_map(source.config, "hf")
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    matrix = open_checkpoint(source, weights).matrix(name)
    assert matrix is not None
    path = ("layers", 0, "mlp", "down", "kernel")

    def check(devices: int) -> None:
        mesh: Any = AbstractMesh((devices,), (TENSOR.name,))
        _check_groups(path, matrix, Shares(source.config, mesh))

    check(4)
    with pytest.raises(ConfigError, match=r"tensor_parallel 8 .* 4 groups .* expert_parallel"):
        check(8)
