"""`--for`: fills in what nobody gave, says what it set, and gives way to every other layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from jitney.engine.cli import main
from jitney.engine.config.arguments import Arguments
from jitney.engine.config.flags import FOR, _add_flags, _add_settings, _Parser
from jitney.engine.config.layers import _FROM_PRESET, ResolvedConfig, settings
from jitney.engine.config.presets import GOALS, preset
from jitney.engine.config.schema import EngineSection

SEATS = {"latency": 8, "balanced": 16, "throughput": 32}


@pytest.fixture(autouse=True)
def _nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JITNEY_MEASURED_SIZES", raising=False)


def layers(*words: str) -> ResolvedConfig:
    parser = _Parser("serve", "")
    _add_flags(parser, [FOR])
    _add_settings(parser)
    return parser.parse(["--platform", "cpu", *words], Arguments).load_layers()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("goal", GOALS)
def test_what_a_preset_sets_can_be(goal, on_device: bool):
    values = preset(goal, (), on_device=on_device)
    assert not set(values) - set(settings())
    EngineSection.model_validate(values)
    assert values["max_seats"] == SEATS[goal] * (8 if on_device else 1)


@pytest.mark.parametrize("goal", GOALS)
def test_what_is_given_stands(goal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "run.toml"
    file.write_text("[engine]\nmemory_gib = 2.0\n")
    monkeypatch.setenv("JITNEY_MAX_PREDICTED_WAIT_S", "7")
    given = layers("--for", goal, "--config", str(file), "--max-seats", "20")
    engine = given.config.engine
    assert (engine.max_seats, engine.memory_gib, engine.max_predicted_wait_s) == (20, 2.0, 7.0)
    assert engine.memory_share == 0.0, "who says how much memory has said it all"
    assert engine.token_budget == 512, "who gives one of the sizes decides on all"
    assert _FROM_PRESET not in (given.origins["max_seats"], given.origins["max_predicted_wait_s"])


@pytest.mark.parametrize(
    "given", [("--seat-buckets", "1,24"), ("--batch-size", "24"), ("--token-budget", "40")]
)
def test_sizes_that_a_preset_would_contradict_are_no_error(given: Sequence[str]):
    assert layers("--for", "latency", *given).config.engine.max_seats == 32


def test_serve_says_what_was_set(capsys: pytest.CaptureFixture[str]):
    words = ["--print-config", "--platform", "cpu", "--max-waiting-requests", "9"]
    assert main(["serve", "--for", "latency", *words]) == 0
    said = capsys.readouterr()
    assert said.err == (
        "--for latency sets --max-predicted-wait-s 5.0, --memory-share 0.25, --max-seats 8\n"
    )
    assert "max_seats = 8\n" in said.out and "max_waiting_requests = 9\n" in said.out


def test_an_unknown_preset_lists_those_there_are(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--for", "speed"])
    assert ended.value.code == 2
    complaint = capsys.readouterr().err
    assert all(goal in complaint for goal in GOALS)
