"""Adapters as PEFT saves them: what is read, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import write_adapter
from safetensors.numpy import load_file, save_file

from jitney.engine.common.errors import ModelError
from jitney.engine.core.weights.checkpoints.adapter import Adapter
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
MODULE = "model.layers.1.mlp.down_proj"


@pytest.fixture
def config() -> ModelConfig:
    return tiny_config("llama")


@pytest.mark.parametrize(
    ("settings", "scale"), [({}, 2.0), ({"use_rslora": True}, 4.0), ({"lora_alpha": 1}, 0.25)]
)
def test_halves_have_the_scale_in_the_second(
    tmp_path: Path, config: ModelConfig, settings: dict[str, Any], scale: float
):
    folder = write_adapter(tmp_path / "fr", config, 1, **settings)
    stored = load_file(folder / TENSORS)
    adapter = Adapter.read("fr", str(folder))
    assert len(adapter.modules) == 7 * config.n_layers
    a, b = adapter.halves(MODULE, config.hidden_size, config.intermediate_size)
    prefix = f"base_model.model.{MODULE}"
    np.testing.assert_array_equal(a, stored[f"{prefix}.lora_A.weight"].T)
    np.testing.assert_allclose(b, scale * stored[f"{prefix}.lora_B.weight"].T)


@pytest.mark.parametrize(
    ("part", "other"), [(".weight", ".default.weight"), ("model.model.", "model.")]
)
def test_files_of_older_releases_and_of_base_models_have_the_same_modules(
    tmp_path: Path, config: ModelConfig, part: str, other: str
):
    folder = write_adapter(tmp_path / "fr", config, 1)
    whole = Adapter.read("fr", str(folder))
    stored = load_file(folder / TENSORS)
    save_file({name.replace(part, other): x for name, x in stored.items()}, folder / TENSORS)
    renamed = Adapter.read("fr", str(folder))
    assert renamed.modules.keys() == whole.modules.keys() and renamed.modules != whole.modules
    sizes = config.hidden_size, config.intermediate_size
    halves = [one.halves(MODULE, *sizes) for one in (renamed, whole)]
    for one, other_half in zip(*halves, strict=True):
        np.testing.assert_array_equal(one, other_half)


def test_a_half_under_two_names_is_refused(tmp_path: Path, config: ModelConfig):
    folder = write_adapter(tmp_path / "fr", config, 1)
    stored = load_file(folder / TENSORS)
    name = f"base_model.model.{MODULE}.lora_A.weight"
    save_file(stored | {name.replace("model.model.", "model."): stored[name]}, folder / TENSORS)
    with pytest.raises(ModelError, match="a second time"):
        Adapter.read("fr", str(folder))


def told(**settings: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | settings))

    return change


def stored(**changes: str | None) -> Callable[[Path], None]:
    """Tensors under other names (`of` -> `to`), or left out."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / TENSORS)
        of, to = changes["of"], changes.get("to")
        found = tensors.pop(of)  # type: ignore[arg-type]
        if to:
            tensors[to] = found
        save_file(tensors, folder / TENSORS)

    return change


def holding(half: str, value: float) -> Callable[[Path], None]:
    """One number of one tensor is another."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / TENSORS)
        tensors[f"base_model.model.{MODULE}.lora_{half}.weight"][1, 2] = value
        save_file(tensors, folder / TENSORS)

    return change


def empty(folder: Path) -> None:
    save_file({}, folder / TENSORS)


FIRST = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (told(peft_type="LOHA"), "peft_type is LOHA; only LORA is served"),
        (told(use_dora=True), "use_dora is not served"),
        (told(bias="all"), "bias all is not served, only none"),
        (told(modules_to_save=["lm_head"]), "modules_to_save is not served; train without it"),
        (told(rank_pattern={"q_proj": 2}), "rank_pattern is not served"),
        (told(alora_invocation_tokens=[5, 6]), "alora_invocation_tokens is not served"),
        (told(layer_replication=[[0, 4], [2, 5]]), "layer_replication is not served"),
        (told(target_parameters=["experts.down_proj"]), "target_parameters is not served"),
        (told(trainable_token_indices=[3]), "trainable_token_indices is not served"),
        (told(use_qalora=True), "use_qalora is not served"),
        (told(use_bdlora={"nblocks": 2}), "use_bdlora is not served"),
        (told(kasa_config={"beta": 1}), "kasa_config is not served"),
        (told(arrow_config={"top_k": 3}), "arrow_config is not served"),
        (told(lora_bias=True), "lora_bias is not served"),
        (told(init_lora_weights="pissa"), "init_lora_weights pissa is not served"),
        (told(init_lora_weights="pissa_niter_16"), "init_lora_weights pissa_niter_16 is not"),
        (told(init_lora_weights="olora"), "path_initial_model_for_weight_conversion"),
        (told(init_lora_weights="corda"), "init_lora_weights corda is not served"),
        (told(init_lora_weights="loftq"), "init_lora_weights loftq is not served"),
        (told(init_lora_weights="lora_ga"), "init_lora_weights lora_ga is not served"),
        (told(lora_alpha=0), f"{CONFIG}: lora_alpha 0 with r 4 scales by 0; it must be"),
        (told(r=0), "r must be at least 1"),
        (told(r="many"), "adapter_config.json: Expected `int`, got `str`"),
        (told(r=64), f"{TENSORS}: base_model.model.model.layers.0.mlp.down_proj.lora_A.weight has"),
        (told(lora_alpha=float("nan")), f"{CONFIG}: lora_alpha nan with r 4 scales by nan"),
        (told(lora_alpha=float("inf")), f"{CONFIG}: lora_alpha inf"),
        (told(lora_alpha=-1e308), f"{CONFIG}: lora_alpha -1e+308"),
        (told(lora_alpha=10**400), f"{CONFIG}: Number out of range"),
        (told(r=10**400), f"{CONFIG}: r must be at least 1"),
        (stored(of=FIRST), "has only one half for model.layers.0.mlp.up_proj"),
        (stored(of=FIRST, to="lm_head.weight"), "holds lm_head.weight, which is no half of a"),
        (empty, "adapter_model.safetensors is empty"),
        (lambda folder: (folder / CONFIG).unlink(), "lacks adapter_config.json"),
        (lambda folder: (folder / TENSORS).unlink(), "lacks adapter_model.safetensors"),
        (lambda folder: (folder / TENSORS).write_bytes(b"no"), "not a sound safetensors file"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, config: ModelConfig, change: Callable[[Path], None], message: str
):
    folder = write_adapter(tmp_path / "fr", config, 1)
    change(folder)
    with pytest.raises(ModelError) as raised:
        Adapter.read("fr", str(folder))
    assert str(raised.value).startswith("adapter fr: ")
    assert message in str(raised.value)


@pytest.mark.parametrize("initial", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_fields_that_matter_only_for_training_are_accepted(
    tmp_path: Path, config: ModelConfig, initial: object
):
    folder = write_adapter(
        tmp_path / "fr",
        config,
        1,
        init_lora_weights=initial,
        lora_dropout=0.1,
        velora_config={"num_groups": 2},
        monteclora_config={"num_samples": 8},
        loftq_config={},
        use_qalora=False,
        qalora_group_size=16,
        layer_replication=None,
        layers_to_transform=[0, 1],
        megatron_core="megatron.core",
        target_modules=["q_proj"],
    )
    assert Adapter.read("fr", str(folder)).scale == 2.0


@pytest.mark.parametrize("half", ["A", "B"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_numbers_that_would_spoil_every_row_are_refused(
    tmp_path: Path, config: ModelConfig, half: str, value: float
):
    folder = write_adapter(tmp_path / "fr", config, 1)
    holding(half, value)(folder)
    adapter = Adapter.read("fr", str(folder))
    with pytest.raises(ModelError) as raised:
        adapter.halves(MODULE, config.hidden_size, config.intermediate_size)
    tensor = f"base_model.model.{MODULE}.lora_{half}.weight"
    assert str(raised.value).startswith(f"adapter fr: {TENSORS}: {tensor}, ")


def test_a_folder_that_is_not_there(tmp_path: Path):
    with pytest.raises(ModelError, match=r"^adapter fr: .*/none is not a folder"):
        Adapter.read("fr", str(tmp_path / "none"))
