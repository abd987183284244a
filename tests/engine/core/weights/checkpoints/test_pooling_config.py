"""What a model's files say of its vectors: sentence-transformers folders and GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from jitney.engine.common.errors import ModelError
from jitney.engine.core.weights.checkpoints.fetch import _HUB_FILES, _HUB_IGNORED
from jitney.engine.core.weights.checkpoints.pooling_config import (
    folder_dimensions,
    folder_pooling,
    gguf_pooling,
)


def modules(*kinds: str, package: str = "sentence_transformers.models") -> list[dict[str, Any]]:
    """modules.json as sentence-transformers writes it."""
    return [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{kind}" if at else "",
            "type": f"{package}.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]


THREE = modules("Transformer", "Pooling", "Normalize")


def write_folder(folder: Path, listed: Any, pooling: dict[str, Any] | None = None) -> Path:
    (folder / "modules.json").write_text(json.dumps(listed))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode": "lasttoken", "include_prompt": True}, "last"),
        ({"pooling_mode": ["mean"]}, "mean"),
    ],
)
@pytest.mark.parametrize(
    "listed",
    [THREE, THREE[:2], modules("Transformer", "Pooling", package="sentence_transformers.a.b")],
)
def test_a_folder_says_how_it_pools(tmp_path: Path, listed: list, pooling: dict, kind: str):
    assert folder_pooling(write_folder(tmp_path, listed, pooling)) == kind


@pytest.mark.parametrize("listed", [None, [], THREE[:1]])
def test_a_folder_that_does_not_say(tmp_path: Path, listed: list | None):
    folder = tmp_path if listed is None else write_folder(tmp_path, listed)
    assert folder_pooling(folder) is None


@pytest.mark.parametrize(
    ("listed", "pooling", "words"),
    [
        (THREE, {"pooling_mode_cls_token": True}, "must be lasttoken or mean, found cls"),
        (THREE, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls, mean"),
        (THREE, {}, "found none"),
        (THREE, None, "lacks config.json"),
        (modules("Transformer", "Pooling", "Dense"), {"pooling_mode": "mean"}, "module 'Dense'"),
        ({"a": 1}, None, "must hold a JSON list"),
        ([1], None, "must list objects"),
        ([THREE[1] | {"path": 1}], None, "must name a folder"),
        ([THREE[1] | {"path": ".."}], None, "unsafe file name"),
        ([THREE[1] | {"path": "../other"}], None, "unsafe file name"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, listed: Any, pooling: dict | None, words: str
):
    with pytest.raises(ModelError, match=words) as caught:
        folder_pooling(write_folder(tmp_path, listed, pooling))
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_a_link_out_is_refused(tmp_path: Path):
    model, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    for folder in (model, elsewhere):
        folder.mkdir()
    (elsewhere / "config.json").write_text('{"pooling_mode": "mean"}')
    (model / "1_Pooling").symlink_to(elsewhere)
    with pytest.raises(ModelError, match="1_Pooling is a link that leads out"):
        folder_pooling(write_folder(model, THREE))


def test_a_gguf_file_says_how_it_pools():
    metadata = {"general.architecture": "qwen3"}
    kinds = [gguf_pooling(metadata | {"qwen3.pooling_type": kind}) for kind in (0, 1, 3)]
    assert kinds == [None, "mean", "last"] and gguf_pooling(metadata) is None
    for kind in (2, 4, "mean", True):
        with pytest.raises(ModelError, match=r"qwen3\.pooling_type"):
            gguf_pooling(metadata | {"qwen3.pooling_type": kind})


def test_the_files_of_a_repository_that_are_fetched():
    """The pooling's configuration, and of all other folders nothing."""
    files = ["config.json", "model.safetensors", "modules.json", "1_Pooling/config.json"]
    others = [
        "onnx/model.json",
        "original/a.safetensors",
        "1_Dense/model.safetensors",
        "a/1/b.json",
    ]
    kept = filter_repo_objects(
        [*files, *others], allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED
    )
    assert [*kept] == files


@pytest.mark.parametrize(
    ("config", "lengths"),
    [
        ({}, None),
        ({"is_matryoshka": False}, None),
        ({"is_matryoshka": True}, ()),
        ({"matryoshka_dimensions": [256, 64, 64]}, (64, 256)),
        ({"is_matryoshka": True, "matryoshka_dimensions": [8]}, (8,)),
    ],
)
def test_a_config_says_how_far_vectors_may_be_cut(
    tmp_path: Path, config: dict[str, Any], lengths: tuple[int, ...] | None
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert folder_dimensions(tmp_path) == lengths


@pytest.mark.parametrize("listed", [64, ["64"], [0], [True]])
def test_lengths_that_are_none_are_refused(tmp_path: Path, listed: Any):
    (tmp_path / "config.json").write_text(json.dumps({"matryoshka_dimensions": listed}))
    with pytest.raises(ModelError, match="matryoshka_dimensions"):
        folder_dimensions(tmp_path)
