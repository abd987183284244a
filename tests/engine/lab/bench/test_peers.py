"""Engines in turn over HTTP: same requests, checked lengths, interleaved repetitions, medians, and
nothing left.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from places import SUPPORT
from safetensors.numpy import load_file, save_file

from jitney.engine.cli import main
from jitney.engine.common.errors import ModelError
from jitney.engine.common.machine import cpu_name
from jitney.engine.common.ports import free_port
from jitney.engine.lab.bench.peer_process import Peer, _write_w8a8
from jitney.engine.lab.bench.peers import (
    OUTPUTS,
    PROMPTS,
    PeerBench,
    kernel_ratios,
    make_measurements,
    markdown,
)
from jitney.engine.lab.commands.bench_peers import _remarks

FAKE = str(SUPPORT / "fake_engine.py")
MATRIX = "model.layers.0.mlp.down_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def fake(name: str, log: Path, *flags: str) -> Peer:
    return Peer(name, (sys.executable, FAKE, name, str(log), *flags), {}, "a fake")


def run(peers: list[Peer], works: list[Any], repetitions: int, port: int = 0) -> tuple[dict, list]:
    """The report, and what was saved on the way, as JSON has it."""
    saved: list[dict] = []
    bench = PeerBench(
        works,
        port=port,
        save=lambda report: saved.append(json.loads(json.dumps(report))),
        say=lambda message: None,
    )
    return bench.compare(peers, repetitions), saved


def test_engines_take_turns_and_get_the_same_work(tmp_path: Path):
    log = tmp_path / "log"
    works = [work for work in make_measurements(encode, [3, 1], 6) if work.name != "prompts_512"]
    works = [work._replace(outputs=[min(n, 12) for n in work.outputs]) for work in works]
    port = free_port()
    peers = [fake("slow", log, "--tokens-s", "100"), fake("fast", log)]
    report, saved = run(peers, works, 2, port)
    lines = log.read_text().splitlines()
    turns = [line for line in lines if "open" not in line]
    assert turns == ["slow starts", "slow stops", "fast starts", "fast stops"] * 2
    assert max(int(line.split()[-1]) for line in lines if "open" in line) == 3
    slow, fast = (report["engines"][name] for name in ("slow", "fast"))
    assert slow["version"] == "slow-1.0" and len(slow["runs"]) == len(fast["start_s"]) == 2
    tokens = sum(works[1].outputs)
    for figures in (run["streams_1"] for run in slow["runs"]):
        assert figures["output_tok_s"] == pytest.approx(tokens / figures["seconds"])
        assert figures["output_tok_s"] < 100, "one stream gets no more than the engine gives it"
        assert 0 < figures["client"]["cpu_share"] < 1
    paces = [engine["medians"]["streams_1"]["output_tok_s"]["median"] for engine in (fast, slow)]
    ratios = kernel_ratios(report, ("fast", "slow"))
    assert ratios["streams_1"] == pytest.approx(paces[0] / paces[1], rel=0.01)
    done = [
        sum(len(run) for one in step["engines"].values() for run in one["runs"]) for step in saved
    ]
    assert done == [1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8], "saved after every measurement"
    assert report["machine"] == cpu_name()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "nobody listens any more"


def test_an_engine_that_fails_is_left_out_with_its_reason(tmp_path: Path):
    log = tmp_path / "log"
    works = [
        work._replace(outputs=[2] * 4, prompts=work.prompts[:4])
        for work in make_measurements(encode, [2], 4)
    ][:1]
    gone = Peer("gone", ("/nowhere/engine",), {}, "a fake")
    peers = [
        fake("dead", log, "--die"),
        fake("wrong", log, "--extra-token"),
        gone,
        fake("good", log),
    ]
    report, _ = run(peers, works, 2)
    dead, wrong, gone, good = (report["engines"][peer.name] for peer in peers)
    assert "no such model, says the fake" in dead["failed"] and "status 1" in dead["failed"]
    assert "counted" in wrong["failed"] and "cannot be started" in gone["failed"]
    assert good["failed"] is None and len(good["runs"]) == 2 and not dead["medians"]
    assert log.read_text().count("dead dies") == 1, "it is not tried again"
    table = markdown(report)
    assert "| good good-1.0 |" in table and "dead" not in table
    assert " | first token at 2 streams, p50 / p99 / p99.9 |" in table
    assert " / – ms |" in table, "four requests are too few"
    shown = list(_remarks(report | {"auto_over_reference": {}}))
    assert any("says the fake" in line for line in shown) and any(
        "of a core" in line for line in shown
    )


def test_a_measurement_that_is_ended_takes_its_engine_along(tmp_path: Path):
    log, port = tmp_path / "log", free_port()
    with pytest.raises(SystemExit) as left, fake("own", log).serving(port):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert left.value.code == 128 + signal.SIGTERM
    assert log.read_text().split() == ["own", "starts", "own", "stops"]


def figures(tok_s: float, wait: float) -> dict[str, Any]:
    return {
        "output_tok_s": tok_s,
        "prompt_tok_s": 2 * tok_s,
        "ttft_s": {"p50": wait, "p99": 2 * wait},
        "client": {"cpu_share": 0.1},
    }


@pytest.mark.parametrize(
    ("tail", "head", "cell"),
    [
        ({"ttft_p999_s": {"median": 1.25}}, "p50 / p99 / p99.9", "100 / 900 / 1,250 ms"),
        ({"ttft_p999_s": {"median": None}}, "p50 / p99 / p99.9", "100 / 900 / – ms"),
        ({}, "p50 / p99", "100 / 900 ms"),
    ],
)
def test_the_table_has_the_percentiles_of_its_report(tail: dict[str, Any], head: str, cell: str):
    speed = {"median": 5.0, "least": 5.0, "most": 5.0}
    waits = {"ttft_p50_s": {"median": 0.1}, "ttft_p99_s": {"median": 0.9}} | tail
    engine = {"version": "", "medians": {"streams_2": {"output_tok_s": speed} | waits}}
    work = {"streams_2": {"streams": 2}}
    table = markdown({"machine": "m", "work": work, "engines": {"own": engine}})
    assert f"| | 2 streams, output tok/s | first token at 2 streams, {head} |" in table
    assert f"| own | 5 | {cell} |" in table


def test_the_work_is_that_of_the_table():
    works = make_measurements(encode, [32, 1], 96)
    assert [(work.name, work.streams, len(work.outputs)) for work in works] == [
        ("streams_32", 32, 96),
        ("streams_1", 1, 16),
        ("prompts_512", 8, 24),
    ]
    crowd, _, long = works
    assert 85 < np.mean([len(prompt) for prompt in crowd.prompts]) < 108 and PROMPTS.mean == 96
    assert 56 < np.mean(crowd.outputs) < 72 and OUTPUTS.mean == 64
    assert {len(prompt) for prompt in long.prompts} == {512} and set(long.outputs) == {1}
    assert len({tuple(prompt[:40]) for prompt in crowd.prompts}) == 96, (
        "no prompt begins like another"
    )


def test_every_engine_is_started_alike(tmp_path: Path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    theirs = Peer.vllm(str(tmp_path / "bin" / "vllm"), "folder", "bfloat16")
    own = Peer.ours("smollm2-135m", "reference", "bfloat16")
    assert "--no-enable-prefix-caching" in theirs.command and "--no-prefix-cache" in own.command
    assert theirs.environment["LD_PRELOAD"].endswith(str(tmp_path / "lib" / "libiomp5.so"))
    assert str(tmp_path) not in theirs.settings and "libiomp5.so" in theirs.settings
    assert (
        own.command[own.command.index("--kernels") + 1] == "reference"
        and own.command[0] == sys.executable
    )
    int8 = Peer.ours("smollm2-135m", "auto", "bfloat16", weights="int8")
    assert int8.name == "Jitney, int8" and int8.settings.endswith("--weights int8")
    assert int8.command[-2:] == ("--weights", "int8")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--engines", "tgi"], "tgi is none of auto, reference, vllm, int8, vllm-w8a8"),
        (["--engines", "vllm", "--vllm", "/nowhere/vllm"], "none of them is installed"),
        (["--engines", "vllm", "--vllm", sys.executable], "--vllm-model must name"),
        (["--streams", "8,0"], "--streams: must be positive whole numbers"),
        (["--repetitions", "0"], "--repetitions must be at least 1"),
        (["--json", "/nowhere/x.json"], "no such folder"),
    ],
)
def test_bad_flags_are_told(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "peers", *words]) == 2
    assert complaint in capsys.readouterr().err


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
    _write_w8a8(tmp_path / "plain", tmp_path / "w8a8")
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
        _write_w8a8(tmp_path / "plain", tmp_path / "w8a8")
