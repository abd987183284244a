"""The digest of a configuration: what is part of it, and that nothing else moves it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from jitney.engine.common.engine_info import short_digest
from jitney.engine.config.digest import _LEFT_OUT, ConfigReport, configuration_digest
from jitney.engine.config.layers import ResolvedConfig, settings
from jitney.engine.config.schema import Config
from jitney.engine.core.weights.checkpoints import sources
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.engine.core.weights.checkpoints.sources import ModelSource


def digest(model: str = "m", file: Path | None = None, **flags: str) -> str:
    config = ResolvedConfig.load(file, flags=flags).config
    return configuration_digest(config, model=model)


def test_settings_that_are_left_out_are_settings_and_are_documented():
    assert set(settings()) > _LEFT_OUT
    text = (ROOT / "docs" / "rollout.md").read_text()
    assert not [name for name in _LEFT_OUT if f"`{settings()[name].key}`" not in text]


def test_model_version_and_settings_count(monkeypatch: pytest.MonkeyPatch):
    base = digest()
    with monkeypatch.context() as patch:
        patch.setattr("jitney.engine.config.digest.version", lambda name: "2")
        of_another_version = digest()
    assert len(base) == 64 and set(base) <= set("0123456789abcdef")
    assert short_digest(base) == base[:12]
    changed = [
        digest(model="other"),
        of_another_version,
        digest(max_seats="31"),
        digest(tool_call_parser="hermes"),
        digest(default_temperature="0.5"),
    ]
    assert len({base, *changed}) == 6


def test_what_is_left_out_does_not_count():
    same = digest(
        model="m",
        host="127.0.0.2",
        port="9000",
        log_level="debug",
        record="/tmp/trace.jsonl",
        api_key_file="/keys",
        order="fcfs",
        device="1",
    )
    assert same == digest()


def test_the_order_that_keys_bring_counts_as_one_that_is_given():
    assert digest(api_key_file="/keys") == digest(order="fair") != digest()


def test_the_order_of_a_file_and_of_numbers_does_not_count(tmp_path: Path):
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text(
        "[engine]\nmax_wait_ms = 100\nprefill_share = 1\nseat_buckets = [4, 8]\n"
        "[model]\ndtype = 'float32'\n"
    )
    two.write_text(
        "[model]\ndtype = 'float32'\n"
        "[engine]\nseat_buckets = [4, 8]\nprefill_share = 1.0\nmax_wait_ms = 100.0\n"
    )
    assert digest(file=one) == digest(file=two) != digest()


def test_it_survives_the_way_to_the_core():
    """The core's process gets its configuration as JSON."""
    config = ResolvedConfig.load(flags={"seat_buckets": "4,8", "max_wait_ms": "0.1"}).config
    sent = Config.model_validate(json.loads(config.model_dump_json()), strict=False)
    ours, theirs = [configuration_digest(c, model="m") for c in (config, sent)]
    assert ours == theirs


def test_it_is_the_same_in_every_process():
    code = (
        "from jitney.engine.config.digest import configuration_digest as digest\n"
        "from jitney.engine.config.layers import ResolvedConfig\n"
        "config = ResolvedConfig.load(flags={'max_seats': '8'}).config\n"
        "print(digest(config, model='m'))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "4242"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == digest(max_seats="8")


def test_what_stands_in_a_template_counts_and_not_where_it_lies(tmp_path: Path):
    one, two = tmp_path / "a.jinja", tmp_path / "b.jinja"
    one.write_text("{{ messages }}")
    two.write_text("{{ messages }}")
    before = digest(chat_template=str(one))
    assert before == digest(chat_template=str(two)) != digest()
    two.write_text("{{ other }}")
    assert digest(chat_template=str(two)) != before


def test_a_folder_is_its_files_and_not_its_name(tmp_path: Path):
    def source(name: str, **files: str) -> ModelSource:
        folder = tmp_path / name
        folder.mkdir()
        for stem, text in files.items():
            (folder / stem.replace("_", ".")).write_text(text)
        return ModelSource("hf", str(folder), name, tiny_config())

    base = source("a", config_json="{}", model_safetensors="abc")
    same = source("b", model_safetensors="abc", config_json="{}", README_md="hello")
    other = source("c", config_json="{}", model_safetensors="abd")
    assert base.identity() == same.identity() != other.identity()


def test_an_adapter_is_part_of_the_model_by_its_name_and_its_files(tmp_path: Path):
    source = ModelSource.local("tiny-random")
    assert source is not None
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}" if name == "c" else '{"r": 1}')
    a, b, c = (str(tmp_path / name) for name in ("a", "b", "c"))
    assert source.identity({"fr": a}) == source.identity({"fr": b})
    names = ({}, {"fr": a}, {"de": a}, {"fr": c}, {"fr": a, "de": c}, {"de": c, "fr": a})
    assert len({source.identity(each) for each in names}) == len(names)


def test_a_large_file_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(sources, "_BLOCKS", 4)
    monkeypatch.setattr(sources, "_BLOCK_BYTES", 10)
    blocks = list(sources._blocks(2000))
    assert blocks == [(0, 10), (663, 10), (1326, 10), (1990, 10)]
    assert list(sources._blocks(1000)) == [(0, 1000)]
    file = tmp_path / "m.gguf"
    source = ModelSource("gguf", str(file), "m", tiny_config())
    seen = set()
    for changed in (None, 0, 1999, 1330, 500):
        data = bytearray(2000)
        if changed is not None:
            data[changed] = 1
        file.write_bytes(data)
        seen.add(source.identity())
    assert len(seen) == 4  # byte 500 lies between two blocks
    file.write_bytes(bytes(2001))
    assert source.identity() not in seen


def test_origins_are_those_of_the_layers(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text("[engine]\nmax_seats = 8\npage_size = 32\n[server]\napi_keys = ['sesame']\n")
    resolved = ResolvedConfig.load(file, {"JITNEY_PAGE_SIZE": "64"}, {"order": "fair"})
    report = ConfigReport.of(resolved)
    origins = {name: value.origin for name, value in report.settings.items()}
    assert origins["max_seats"] == f"{file}: [engine] max_seats"
    assert (origins["page_size"], origins["order"]) == ("JITNEY_PAGE_SIZE", "--order")
    assert origins["policy"] == "default"
    assert report.settings["api_keys"].value == "1 set, not shown"
    assert "sesame" not in str(report)


def test_differences_fill_in_defaults_and_name_what_only_one_knows(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text("[engine]\nmax_seats = 8\nmax_waiting_requests = 256\n[server]\nport = 1\n")
    a = ConfigReport.of(ResolvedConfig.load(file))
    b = ConfigReport.of(ResolvedConfig.load())
    found = list(a.differences(b))
    assert [(one.name, one.counted) for one in found] == [("max_seats", True), ("port", False)]
    without = {name: value for name, value in b.settings.items() if name != "policy"}
    older = ConfigReport(version="0", config_digest="", settings=without)
    (policy,) = b.differences(older)
    assert (policy.name, policy.b) == ("policy", None)
