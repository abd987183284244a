"""`jitney simulate --fleet`: a fleet of a given size on a virtual clock, in a table and in JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jitney.engine.cli import main

FLEET = ("llama-3.1-8b", "--device", "h100", "--replicas", "10", "--seats", "32")
LENGTHS = ("--prompt", "100..300", "--output", "20..80")
SECONDS = ("--rates", "100", "--rate-s", "10")


def simulated(*words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The report."""
    assert main(["simulate", "--fleet", *words, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_request_has_an_end_and_its_price(capsys: pytest.CaptureFixture[str]):
    report = simulated(*FLEET, *LENGTHS, *SECONDS, "--price", "2.5", capsys=capsys)
    figures = report["figures"]
    assert figures["served"] + figures["refused"] == figures["requests"]
    assert figures["requests"] == pytest.approx(100 * 10, rel=0.1)
    assert figures["requests"] == report["requests_of_traffic"]
    assert figures["replica_hours"] == pytest.approx(10 * figures["seconds"] / 3600, abs=5 / 3600)
    tokens = figures["output_tok_s"] * figures["seconds"]
    price = figures["replica_hours"] * 2.5
    assert report["cost_per_million"] == pytest.approx(1e6 * price / tokens)
    assert (report["engine"]["seats"], report["moments"]) == (32, [])


def test_a_trace_names_its_conversations(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Ten conversations of ten turns; each prompt begins with the one before."""
    lines = [
        json.dumps(
            {"t": turn * 10 + talk, "in": 100 * (turn + 1), "out": 20, "conversation": talk + 1}
        )
        for turn in range(10)
        for talk in range(10)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(lines))
    words = (*FLEET, "--trace", str(trace), "--router", "prefix")
    assert simulated(*words, capsys=capsys)["figures"]["hit_rate"] == 0
    found = simulated(*words, "--prefix-cache", capsys=capsys)["figures"]["hit_rate"]
    # Of 100 + 200 + ... + 1,000 tokens all but the last 100 of each prompt were said before; pages
    # are whole, and the last token is always computed.
    assert 0.75 < found <= 4500 / 5500


def test_of_a_long_traffic_the_busiest_time_is_simulated(capsys: pytest.CaptureFixture[str]):
    words = ["simulate", "--fleet", *FLEET, *LENGTHS, "--rates", "10,100", "--requests", "2000"]
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "of 396,000 requests those of the busiest time" in said
    for part in ("10 x h100 (llama-3.1-8b), router least-wait", "requests 2,000", "32 seats"):
        assert part in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "say what to simulate"),
        (("llama-3.1-8b", "--device", "h100", "--rates", "5"), "say what to simulate"),
        (FLEET, "exactly one of --rates and --trace"),
        ((*FLEET, "--rates", "5", "--prefix-cache"), "--prefix-cache is for --trace"),
        ((*FLEET, "--rates", "5", "--scale", "5"), "--scale: '5' is none"),
        ((*FLEET, "--rates", "5", "--scale", "5:2"), "1 <= least <= most"),
        ((*FLEET, "--rates", "5", "--replicas", "0"), "--replicas must be at least"),
        ((*FLEET, "--rates", "5", "--device", "cray"), "unknown device 'cray'"),
        ((*FLEET, "--rates", "5", "--outage-share", "2", "--outage-at-s", "1"), "shares 0 to 1"),
        ((*FLEET, "--rates", "5", "--device", "v5e"), "leave no room"),
    ],
)
def test_nonsense_is_one_line(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["simulate", "--fleet", *words]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1
