"""Sizes that were measured: kept by what they depend on, and a layer below what anybody gives."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from jitney.engine.cli import main
from jitney.engine.common.errors import ConfigError
from jitney.engine.config.layers import ResolvedConfig
from jitney.engine.config.schema import Config, EngineSection, _ModelSection
from jitney.engine.lab.server_sizes import ServerSizes
from jitney.engine.lab.tuned_sizes import _FROM_MEASURED, SizeValue, TunedSizes

SIZES = TunedSizes({"max_seats": 16, "token_budget": 128, "token_buckets": (32, 128)}, "2026-01-02")
HERE = "some processor, 2 threads"
#: A setting that nobody measures.
OTHER = b'{"values": {"page_size": 32}, "measured": "2026-01-02"}'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JITNEY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JITNEY_MEASURED_SIZES", raising=False)
    monkeypatch.setenv("JITNEY_PLATFORM", "cpu")
    return tmp_path / "cache"


def given(**engine: Any) -> ResolvedConfig:
    return ResolvedConfig.load(environ=os.environ, flags=engine)


def test_what_is_kept_is_read_again():
    assert TunedSizes.read(Config(), HERE) is None
    assert SIZES.keep(Config(), HERE) == ""
    assert TunedSizes.read(Config(), HERE) == SIZES


@pytest.mark.parametrize(
    ("config", "where"),
    [
        (Config(), "another processor, 2 threads"),
        (Config(model=_ModelSection(id="tiny-random")), HERE),
        (Config(model=_ModelSection(revision="main")), HERE),
        (Config(model=_ModelSection(dtype="float32")), HERE),
        (Config(engine=EngineSection(kernels="reference")), HERE),
        (Config(engine=EngineSection(threads=1)), HERE),
        (Config(engine=EngineSection(kv_dtype="int8")), HERE),
    ],
)
def test_sizes_hold_only_for_what_was_measured(config: Config, where: str):
    SIZES.keep(Config(), HERE)
    assert TunedSizes.read(config, where) is None


@pytest.mark.parametrize(
    "text", [b"", b"{", b'{"values": {}}', b'{"values": 3, "measured": ""}', OTHER]
)
def test_a_file_that_cannot_be_read_counts_as_none(text: bytes, cache: Path):
    SIZES.keep(Config(), HERE)
    (file,) = (cache / "sizes").iterdir()
    file.write_bytes(text)
    assert TunedSizes.read(Config(), HERE) is None


def test_a_folder_that_others_may_write_to_keeps_nothing(cache: Path):
    (cache / "sizes").mkdir(parents=True)
    (cache / "sizes").chmod(0o777)
    assert "can be written to by other users" in SIZES.keep(Config(), HERE)
    assert TunedSizes.read(Config(), HERE) is None


@pytest.mark.parametrize(
    ("engine", "measures"),
    [
        ({}, True),
        ({"threads": 1}, True),
        ({"order": "fair"}, True),
        ({"measured_sizes": False}, False),
        ({"compilation_cache": False}, False),
        ({"max_seats": 32}, False),
        ({"token_budget": 512}, False),
        ({"seat_buckets": "8,32"}, False),
        ({"platform": "cuda"}, False),
        ({"tensor_parallel": 2}, False),
    ],
)
def test_only_a_cpu_to_which_nobody_gives_sizes_measures(engine: dict[str, Any], measures: bool):
    assert TunedSizes.are_for(given(**engine)) is measures


def test_a_start_for_a_goal_measures_nothing():
    """The goal has its own number of seats."""
    resolved = ResolvedConfig.load(environ=os.environ, preset={"max_seats": 8})
    assert not TunedSizes.are_for(resolved)


def test_what_was_measured_is_a_layer_below_all_that_is_given():
    resolved = given(order="fair")
    SIZES.keep(resolved.config, ServerSizes(resolved).machine)
    served = ServerSizes(resolved).as_served()
    assert served.config.engine.max_seats == 16
    assert served.config.engine.token_buckets == (32, 128)
    assert served.origins["max_seats"] == _FROM_MEASURED
    assert served.origins["order"] == resolved.origins["order"]
    # Whoever gives one size decides on all.
    one_given = given(order="fair", max_seats=4)
    assert ServerSizes(one_given).as_served() is one_given


def test_values_on_top_of_layers_are_checked_and_say_where_they_come_from():
    assert given().with_values({}, "nowhere").config == given().config
    with pytest.raises(ConfigError, match=r"measured here: .*not 0"):
        given().with_values({"max_seats": 0}, _FROM_MEASURED)


@pytest.mark.parametrize("values", [{"max_seats": 0}, {"max_seats": 8, "token_budget": 4}])
def test_sizes_that_no_engine_can_have_count_as_none(values: dict[str, SizeValue]):
    resolved = given()
    TunedSizes(values, "2026-01-02").keep(resolved.config, ServerSizes(resolved).machine)
    assert ServerSizes(resolved).as_served() is resolved


def test_settings_shown_are_those_of_a_server_started_here(capsys: pytest.CaptureFixture[str]):
    resolved = given()
    SIZES.keep(resolved.config, ServerSizes(resolved).machine)
    assert main(["config", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    rows = shown["settings"]
    assert rows["max_seats"]["value"] == 16
    assert rows["max_seats"]["origin"] == _FROM_MEASURED
    assert rows["max_waiting_requests"]["origin"] != _FROM_MEASURED
