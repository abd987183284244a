"""`jitney plan` and `jitney plan buckets` at the terminal."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from jitney.engine.cli import main
from jitney.engine.common.records import STEP_DTYPE
from jitney.engine.lab.simulation.step_table import Curve, StepTable


def plan(*words: str, capsys: pytest.CaptureFixture[str]) -> dict:
    """The report of a plan that succeeds."""
    assert main(["plan", *words, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_answers_every_question(capsys):
    words = (
        "llama-3.1-8b --device h100 --slo-itl-ms 20 --slo-ttft-ms 500 --price-per-hour 3 "
        "--rate 100 --prompt 512 --output 256"
    )
    report = plan(*words.split(), capsys=capsys)
    chosen = report["chosen"]
    assert report["within_slo"] == chosen and chosen["step_s"] <= 0.02 and chosen["ttft_s"] <= 0.5
    assert report["load_req_s"] == pytest.approx(0.8 * chosen["req_s"])
    assert report["replicas"] == -int(-100 // report["load_req_s"])
    assert chosen["cost_per_million"] == pytest.approx(3 / 3600 / chosen["output_tok_s"] * 1e6)
    assert report["memory"]["seats_mean"] >= report["memory"]["seats_full"] > 100
    assert (
        any("3,350 GB/s" in line for line in report["assumed"])
        and report["parameters"] == 8_029_995_008
    )


def test_fp8_units_count_for_gpus_and_no_mixture(capsys):
    def seconds(*words: str) -> float:
        return plan(*words, "--device", "h100", capsys=capsys)["curve"][-1]["step_s"]

    assert seconds("llama-3.1-8b", "--weights", "fp8") < seconds(
        "llama-3.1-8b", "--weights", "int8"
    )
    assert seconds("llama-3.1-70b", "--count", "4", "--weights", "fp8") < seconds(
        "llama-3.1-70b", "--count", "4", "--weights", "int8"
    )
    assert seconds("qwen3-30b-a3b", "--weights", "fp8") == seconds(
        "qwen3-30b-a3b", "--weights", "int8"
    )


def test_limits_that_nothing_keeps_are_status_1(capsys):
    assert main(["plan", "llama-3.1-8b", "--device", "l4", "--slo-itl-ms", "1"]) == 1
    assert "no batch size keeps the limits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "MODEL --device"),
        (["llama-3.1-8b"], "MODEL --device"),
        (["llama-3.1-8b", "--device", "gpu"], "h100"),
        (["llama-3.1-70b", "--device", "l4"], "--count"),
        (["llama-3.1-8b", "--device", "h100", "--count", "3"], "divide"),
        (["nothing", "--device", "h100"], "llama-3.1-8b"),
        (["llama-3.1-8b", "--device", "h100", "--prompt", "0"], "prompt"),
        (["buckets"], "exactly one of"),
        (["buckets", "--device", "h100", "--requests", "20", "--budget", "2"], "too small"),
        (["buckets", "--records", "/nonexistent", "--trace", "x"], "--trace"),
        (["buckets", "--records", "/nonexistent"], "cannot be read"),
    ],
)
def test_bad_flags_are_one_line(words: list[str], complaint: str, capsys):
    assert main(["plan", *words]) in (1, 2)
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1


def test_buckets_from_records(tmp_path: Path, capsys):
    """30 decode-only steps of 5 rows and 10 of 12, on 16 seats: buckets of 5 and 12 waste
    nothing, and a millisecond a row is saved with each row.
    """
    table = StepTable([Curve(rows, min(rows, 16), 1e-3 * rows) for rows in (4, 8, 16, 32, 64)])
    (tmp_path / "t.json").write_text(json.dumps({"table": table.contents()}))
    records = np.zeros(41, STEP_DTYPE)
    records["bucket_tokens"][:30], records["padding"][:30] = 8, 3
    records["bucket_tokens"][30:40], records["padding"][30:40] = 16, 4
    records["bucket_tokens"][40:], records["padding"][40:], records["mixed"][40:] = 64, 24, 1
    records["bucket_seats"] = 16
    np.save(tmp_path / "r.npy", records)
    words = shlex.split(
        f"plan buckets --records {tmp_path / 'r.npy'} --max-seats 16 "
        f"--token-budget 64 --table {tmp_path / 't.json'}"
    )
    assert main([*words, "--budget", "8", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["seat_buckets"], report["token_buckets"]) == ([5, 12, 16], [40, 64])
    assert report["padding_now"] == {"decode": 130, "mixed": 24} and report["padding"] == {
        "decode": 0,
        "mixed": 0,
    }
    assert report["seconds_now"] == pytest.approx(1e-3 * (30 * 8 + 10 * 16 + 64))
    assert report["seconds"] == pytest.approx(1e-3 * (30 * 5 + 10 * 12 + 40))
    assert main(words) == 0
    assert "--seat-buckets 5,12,16" in capsys.readouterr().out
    assert main([*words[:4], "--max-seats", "8", "--token-budget", "64"]) == 2
    assert "--max-seats" in capsys.readouterr().err


FLEET = ("llama-3.1-8b", "--devices", "h100,4xv5e", "--prices", "h100=2.5,v5e=1.2")
QUICK = ("--prompt", "100..300", "--output", "20..80", "--most-seats", "32", "--requests", "1000")


def test_fleets_are_compared(capsys):
    report = plan("--fleet", *FLEET, *QUICK, "--rates", "300,900", capsys=capsys)
    h100, v5e = report["fleets"]
    assert (h100["device"], v5e["device"], v5e["chips"]) == ("h100", "4xv5e", 4 * v5e["replicas"])
    assert h100["busiest"]["ttft_s"]["p99"] <= 1.0 and len(h100["by_hour"]) == 2
    assert h100["price_per_hour"] == 2.5 * h100["replicas"]
    assert v5e["price_per_hour"] == 4 * 1.2 * v5e["replicas"]
    least = min(report["fleets"], key=lambda fleet: fleet["scaled"]["cost_per_million"])
    assert report["cheapest"] == least["device"]
    said = " ".join(report["assumed"])
    for words in (
        "estimates from published peaks",
        "run the engine's own scheduler",
        "3,350 GB/s",
        "a core dies every",
    ):
        assert words in said


def test_a_fleet_for_a_record_is_shown(capsys, tmp_path: Path):
    lines = [
        f'{{"t": {at / 20}, "in": {50 + at % 90}, "out": {10 + at % 50}}}' for at in range(800)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(lines))
    words = ["--fleet", "llama-3.1-8b", "--devices", "h100:fp8,v5e", "--trace", str(trace)]
    assert main(["plan", *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in ("h100:fp8", "v5e: ", "leave no room", "planned in", "busiest 60 s"):
        assert words in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "say what to size"),
        (("llama-3.1-8b", "--devices", "h100"), "exactly one of --rates and --trace"),
        ((*FLEET, "--rates", "5", "--trace", "x"), "exactly one of --rates and --trace"),
        ((*FLEET, "--rates", "5,x"), "--rates: '5,x' is none"),
        ((*FLEET, "--rates", "nan"), "--rates: 'nan' is none"),
        ((*FLEET, "--rates", "5", "--prices", "h100"), "--prices: 'h100' is none"),
        ((*FLEET, "--rates", "5", "--prices", "l4=1"), "l4 is not among --devices"),
        ((*FLEET, "--rates", "5", "--devices", "h100:q3"), "--devices: 'h100:q3' is none"),
        ((*FLEET, "--rates", "5", "--devices", "cray"), "unknown device 'cray'"),
        ((*FLEET, "--rates", "5", "--devices", ","), "--devices: names no device"),
        ((*FLEET, "--rates", "5", "--slo-ttft-ms", "0"), "--slo-ttft-ms must be at least"),
        ((*FLEET, "--rates", "5", "--refused", "100"), "targets: "),
        ((*FLEET, "--rates", "5", "--core-mtbf-h", "0"), "--core-mtbf-h must be at least"),
        ((*FLEET, "--rates", "5", "--most-seats", "0"), "--most-seats must be at least"),
        ((*FLEET, "--rates", "5", "--prompt", "x"), "--prompt: 'x' is no length"),
        ((*FLEET, "--trace", "/nowhere"), "/nowhere: "),
        ((*FLEET, "--trace", "x", "--prompt", "5"), "a trace has its own lengths"),
    ],
)
def test_a_fleet_of_nonsense_is_one_line(words: tuple[str, ...], told: str, capsys):
    assert main(["plan", "--fleet", *words]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1
