"""Adapters come, go and are replaced while an engine answers.

The oracle is an engine that was started with the adapter, or the model with it merged into its
weights (`test_adapters`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import write_adapter
from cpu_library import packs_here
from oracle import prompt
from safetensors.numpy import load_file, save_file

from jitney.engine import LLM, SamplingParams
from jitney.engine.common.messages import AdaptersSet, SetAdapters
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.weights.checkpoints.sources import ModelSource

pytestmark = pytest.mark.usefixtures("programs_when_used", "kernels_unproved")

PROMPTS = [prompt(number, 7 + 16 * number) for number in range(4)]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_seats": 8,
    "token_budget": 64,
    "context": 256,
    "seat_buckets": [8],
    "token_buckets": [64],
}
CONFIG = ModelSource.resolve("tiny-random").config


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three adapters; all change every matrix, and need as much room."""
    home = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("fr", "de", "es"), 1):
        write_adapter(home / name, CONFIG, seed)
    return home


def engine(folders: dict[str, Path], **settings: Any) -> LLM:
    named = tuple(f"{name}={folder}" for name, folder in folders.items())
    return LLM("tiny-random", **(SETTINGS | settings), adapters=named)


def tokens_of(folders: dict[str, Path], **settings: Any) -> dict[str, list[list[int]]]:
    """The answers of an engine that was started with these adapters, by adapter."""
    llm = engine(folders, **settings)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    return {
        name: [one.outputs[0].token_ids for one in llm.generate(PROMPTS, params, adapter=name)]
        for name in ("", *folders)
    }


@pytest.fixture(scope="module")
def expected(
    programs_when_used: None, kernels_unproved: None, home: Path
) -> dict[str, list[list[int]]]:
    return tokens_of({name: home / name for name in ("fr", "de", "es")})


@dataclass
class Serving:
    """The core of an engine, step by step."""

    llm: LLM
    outputs: dict[str, list[SequenceOutput]] = field(default_factory=dict)
    answers: list[AdaptersSet] = field(default_factory=list)

    def add(self, id: str, number: int, which: int, n_tokens: int = 40) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)
        request = EngineRequest(
            id=id, prompt=PROMPTS[which], sampling=sampling, arrival=0.0, adapter=number
        )
        self.outputs[id] = []
        self.llm.core.add(request)

    def step(self) -> None:
        """And let what it began beside the steps come to its end."""
        report = self.llm.core.step()
        if self.llm.core.intake.adapters is not None:
            self.llm.core.intake.adapters._thread.submit(int).result()
        for output in report.outputs:
            self.outputs[output.request_id].append(output)
        self.answers += [answer for answer in report.answers if isinstance(answer, AdaptersSet)]

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            assert self.llm.core.has_work
            self.step()

    def finish(self) -> None:
        while self.llm.core.has_work:
            self.step()
        self.llm.core.check()

    def tokens(self, id: str) -> list[int]:
        return [token for output in self.outputs[id] for token in output.tokens]

    def set(self, folders: dict[str, Path]) -> AdaptersSet:
        """Have these adapters, from a step between others on."""
        texts = {name: str(folder) for name, folder in folders.items()}
        ticket = 1 + len(self.answers)
        assert self.llm.core.set_adapters(SetAdapters(ticket, texts, 0)) is None
        self.until(lambda: len(self.answers) == ticket)
        return self.answers[-1]


def test_one_that_comes_answers_as_if_it_had_been_there(
    home: Path, expected: dict[str, list[list[int]]]
):
    serving = Serving(engine({"fr": home / "fr"}, adapter_room=4))
    for number in range(4):
        serving.add(f"base {number}", 0, number)
        serving.add(f"fr {number}", 1, number)
    serving.until(lambda: len(serving.tokens("fr 3")) > 4)
    compiles = serving.llm.core.runner.compiles
    answer = serving.set({"fr": home / "fr", "de": home / "de"})
    assert (answer.added, answer.removed, answer.replaced) == (["de"], [], [])
    assert answer.adapters == {"fr": 1, "de": 2}
    for number in range(4):
        serving.add(f"de {number}", 2, number)
    serving.finish()
    for name in ("base", "fr", "de"):
        got = [serving.tokens(f"{name} {number}") for number in range(4)]
        assert got == expected["" if name == "base" else name], name
    assert serving.llm.core.runner.compiles == compiles


def test_one_that_goes_finishes_what_it_has_and_leaves_its_room(
    home: Path, expected: dict[str, list[list[int]]]
):
    serving = Serving(engine({"fr": home / "fr"}))
    serving.add("open", 1, 0)
    serving.until(lambda: len(serving.tokens("open")) > 4)
    assert serving.set({}).removed == ["fr"]
    serving.add("late", 1, 1)
    serving.until(lambda: bool(serving.outputs["late"]))
    error = serving.outputs["late"][0].error
    assert error is not None and error.code == "model_not_found"
    assert len(serving.tokens("open")) < 40
    answer = serving.set({"es": home / "es"})
    [number] = answer.adapters.values()
    serving.add("next", number, 2)
    serving.until(lambda: bool(serving.tokens("next")))
    assert serving.tokens("open") == expected["fr"][0], "its columns were taken before its end"
    serving.finish()
    assert serving.tokens("next") == expected["es"][2]


@pytest.mark.parametrize("room", [0, 4])
def test_other_files_under_a_name_are_another_adapter(
    tmp_path: Path, home: Path, expected: dict[str, list[list[int]]], room: int
):
    """room: with it both are there at once; without it the new one waits for the old one's end."""
    folder = tmp_path / "own"
    shutil.copytree(home / "fr", folder)
    serving = Serving(engine({"own": folder}, adapter_room=room))
    serving.add("before", 1, 3, n_tokens=1)
    serving.finish()
    serving.add("open", 1, 3)
    serving.until(lambda: len(serving.tokens("open")) > 4)
    shutil.rmtree(folder)
    shutil.copytree(home / "de", folder)
    answer = serving.set({"own": folder})
    assert (answer.added, answer.removed, answer.replaced) == ([], [], ["own"])
    assert answer.adapters["own"] != 1
    serving.add("by the old number", 1, 3)
    serving.add("by the new number", answer.adapters["own"], 3)
    serving.until(lambda: bool(serving.tokens("by the old number")))
    assert (len(serving.tokens("open")) == 40) == (room == 0)
    serving.finish()
    assert serving.tokens("open") == expected["fr"][3]
    for name in ("by the old number", "by the new number"):
        assert serving.tokens(name) == expected["de"][3]
    first = serving.outputs["by the old number"][0]
    assert first.cached_tokens == 0, "pages of the old weights were used"
    assert serving.set({"own": folder}).replaced == []


def test_engines_that_share_experts_name_changed_files_and_serve_on(
    tmp_path: Path, home: Path, expected: dict[str, list[list[int]]]
):
    folder = tmp_path / "own"
    shutil.copytree(home / "fr", folder)
    serving = Serving(engine({"own": folder, "de": home / "de"}))
    assert serving.llm.core.intake.adapters is not None
    serving.llm.core.intake.adapters._fixed = True
    folders = {"own": folder, "de": home / "de"}
    assert serving.set(folders).needs_restart == []
    shutil.rmtree(folder)
    shutil.copytree(home / "es", folder)
    answer = serving.set(folders)
    assert (answer.needs_restart, answer.replaced, answer.error) == (["own"], [], None)
    serving.add("own", answer.adapters["own"], 3)
    serving.finish()
    assert serving.tokens("own") == expected["fr"][3]


def test_a_request_that_waits_for_its_adapter_can_be_given_up(home: Path):
    serving = Serving(engine({"fr": home / "fr"}))
    serving.add("open", 1, 0)
    answer = serving.set({"de": home / "de"})
    serving.add("waits", answer.adapters["de"], 1)
    serving.step()
    serving.llm.core.abort("waits")
    serving.until(lambda: bool(serving.outputs["waits"]))
    assert serving.outputs["waits"][0].finish == "abort"
    assert len(serving.tokens("open")) < 40
    serving.finish()


def spoil(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = np.nan
    save_file(tensors, file)


def test_one_that_is_damaged_is_refused_by_name_and_nothing_changes(
    tmp_path: Path, home: Path, expected: dict[str, list[list[int]]]
):
    shutil.copytree(home / "de", tmp_path / "de")
    spoil(tmp_path / "de")
    serving = Serving(engine({"fr": home / "fr"}, adapter_room=4))
    serving.add("open", 1, 0)
    answer = serving.set({"es": home / "es", "de": tmp_path / "de"})
    assert answer.error is not None and answer.error.message.startswith("adapter de: adapter_model")
    serving.add("fr", 1, 1)
    serving.finish()
    assert [serving.tokens("open"), serving.tokens("fr")] == expected["fr"][:2]
    gone = serving.set({"fr": home / "fr", "none": tmp_path / "none"}).error
    assert gone is not None and gone.message.startswith("adapter none: ")


def test_more_than_there_is_room_for_are_refused_with_the_setting(tmp_path: Path, home: Path):
    serving = Serving(engine({"fr": home / "fr"}, adapter_room=4))
    wide = write_adapter(tmp_path / "wide", CONFIG, 9, rank=8)
    error = serving.set({"fr": home / "fr", "wide": wide}).error
    assert error is not None and "adapter wide does not fit" in error.message
    assert "qkv has 32 columns for adapters, 4 too few" in error.message
    assert "adapter_room (4)" in error.message
    assert serving.set({"wide": wide}).error is None


def test_an_engine_without_room_says_so(home: Path):
    llm = engine({})
    answer = llm.core.set_adapters(SetAdapters(1, {"fr": str(home / "fr")}, 0))
    assert answer is not None and answer.error is not None
    assert "adapter_room" in answer.error.message


def test_an_engine_that_began_with_none_takes_some(
    home: Path, expected: dict[str, list[list[int]]]
):
    serving = Serving(engine({}, adapter_room=8))
    answer = serving.set({"fr": home / "fr", "de": home / "de"})
    for name, number in answer.adapters.items():
        serving.add(name, number, 0)
    serving.add("", 0, 0)
    serving.finish()
    for name in ("", "fr", "de"):
        assert serving.tokens(name) == expected[name][0]


@pytest.mark.skipif(not packs_here(), reason="this CPU's weights are not packed in pairs")
def test_in_pairs_too(home: Path):
    folders = {"fr": home / "fr", "de": home / "de"}
    serving = Serving(engine({"fr": home / "fr"}, dtype="bfloat16", adapter_room=4))
    serving.add("fr", 1, 1)
    serving.until(lambda: bool(serving.tokens("fr")))
    number = serving.set(folders).adapters["de"]
    serving.add("de", number, 1)
    serving.finish()
    wanted = tokens_of(folders, dtype="bfloat16")
    for name in folders:
        assert serving.tokens(name) == wanted[name][1]


def test_the_canary_computes_with_the_adapter_that_answered(tmp_path: Path, home: Path):
    folder = tmp_path / "own"
    shutil.copytree(home / "fr", folder)
    serving = Serving(engine({"own": folder}, canary_every=1))
    serving.add("old", 1, 0, n_tokens=8)
    serving.until(lambda: bool(serving.tokens("old")))
    shutil.rmtree(folder)
    shutil.copytree(home / "de", folder)
    number = serving.set({"own": folder}).adapters["own"]
    serving.add("new", number, 1, n_tokens=8)
    findings = []
    while serving.llm.core.has_work:
        findings += serving.llm.core.step().canary
    assert len(findings) == 2 and all(finding.right for finding in findings)
