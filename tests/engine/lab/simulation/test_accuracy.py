"""Predictions beside measurements: files of measured runs read back, and predicted again without
error.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from jitney.engine.cli import main
from jitney.engine.common.request_record import RequestRecord
from jitney.engine.common.trace import Arrival, TraceLine
from jitney.engine.core.measuring.engine_shape import EngineShape
from jitney.engine.core.measuring.virtual import HostTimes
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.lab.bench.compare import prediction_errors
from jitney.engine.lab.figures import figure_of
from jitney.engine.lab.simulation.accuracy import errors, verdict_of
from jitney.engine.lab.simulation.engine_run import EngineRun, span
from jitney.engine.lab.simulation.recordings import Recording
from jitney.engine.lab.simulation.simulator import simulate
from jitney.engine.lab.simulation.step_table import Curve, StepTable
from jitney.engine.lab.simulation.workload import Poisson, Uniform, synthesise

POLICIES = ("static", "dynamic", "continuous")
TABLE = StepTable(
    [Curve(4, 4, 0.02, 1e-5), Curve(8, 8, 0.03, 1e-5), Curve(64, 8, 0.05, 0.0, 0.0, 1e-4)],
    HostTimes(before=0.001, after=0.0005),
)


def test_errors_are_relative_and_only_of_what_both_know():
    ours = {"output_tok_s": 110.0, "ttft_s": {"p50": 2.0, "p99": 3.0}, "queue_s": None}
    theirs = {
        "output_tok_s": 100.0,
        "ttft_s": {"p50": 4.0, "p99": 0.0},
        "queue_s": {"p50": 1.0},
        "req_s": 1.0,
    }
    assert errors(ours, theirs) == {
        "output_tok_s": pytest.approx(0.1),
        "ttft_p50_s": pytest.approx(-0.5),
    }
    assert figure_of(theirs, "ttft_p99_s") == 0.0


def test_lines_without_a_measurement_do_not_count():
    measured = TraceLine(
        at=2.0, n_prompt=5, n_output=4, queue_s=0.5, ttft_s=1.0, e2e_s=3.0, finish="stop"
    )
    lines = [TraceLine(at=1.0, n_prompt=5, n_output=4), measured]
    (times,) = Recording.of(lines).requests
    assert (times.boarded, times.first_token, times.finished, times.finish) == (
        2.5,
        3.0,
        5.0,
        "stop",
    )
    assert span([times]) == 3.0 and Recording.of(lines[:1]).figures() is None


def measured_runs() -> dict[str, EngineRun]:
    """Runs of an engine whose steps are exactly TABLE's, as `bench policies` would have them."""
    arrivals = synthesise(60, Uniform(5, 40), Uniform(5, 40), Poisson(8.0), 0)
    buckets = Buckets.of(max_seats=8, token_budget=64, seat_sizes=(4, 8))
    runs = {}
    for policy in POLICIES:
        limits = SchedulerLimits(
            max_seats=8, context_length=128, policy=policy, max_waiting_requests=1000
        )
        shape = EngineShape(limits, buckets, 129)
        run = simulate(arrivals, shape, TABLE)
        runs[policy] = EngineRun(run.requests, run.records, shape)
    return runs


def measured_file(path: Path) -> None:
    EngineRun.write_all(path, measured_runs())


def test_a_measured_engine_is_predicted_from_its_own_records(tmp_path: Path, capsys):
    """Calibrated on one policy's steps, the other policies come out as they were: nothing but the
    steps is fitted.
    """
    measured_file(tmp_path / "r.npz")
    words = ["simulate", "--measured", str(tmp_path / "r.npz")]
    assert main([*words, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["errors"]) == set(POLICIES)
    for policy, off in report["errors"].items():
        assert {"ttft_p50_s", "ttft_p99_s", "padding_share"} <= set(off)
        assert abs(off["output_tok_s"]) < 0.02 and abs(off["e2e_p99_s"]) < 0.05, (policy, off)
        assert abs(off["seat_fill"]) < 0.02
    buckets = "decode-4 decode-8 mixed-16 mixed-32 mixed-64"
    assert " ".join(report["engine"]["buckets"]) == buckets
    assert "x the tokens of" in report["verdict"] and "off by up to" in report["verdict"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "static: predicted and measured" in shown
    assert report["verdict"] in " ".join(shown.split())


def test_step_times_of_one_run_predict_another_and_the_error_is_told():
    """An engine that is a tenth slower under static than under continuous: exactly that is off, and
    only there.
    """
    runs = measured_runs()
    static = runs["static"]
    slow = [
        msgspec.structs.replace(
            t,
            boarded=t.boarded and 1.1 * t.boarded,
            first_token=t.first_token and 1.1 * t.first_token,
            finished=1.1 * t.end,
        )
        for t in static.requests
    ]
    runs["static"] = EngineRun(slow, static.records, static.shape)
    off = prediction_errors(runs)
    assert off["static"]["output_tok_s"] == pytest.approx(0.1, abs=0.02)
    assert abs(off["dynamic"]["output_tok_s"]) < 0.02
    assert abs(off["continuous"]["output_tok_s"]) < 0.02


def test_a_verdict_is_never_without_its_error():
    """The error is that of speed: an engine that is half empty makes the tokens that were asked
    for, however wrong its step times are.
    """
    rates = {"static": 100.0, "dynamic": 200.0, "continuous": 290.0}
    predicted = {name: {"output_tok_s": rate} for name, rate in rates.items()}
    unknown = verdict_of(predicted, {"static": {"ttft_p50_s": 0.5}})
    assert "continuous makes 2.90x the tokens of static" in unknown and "unknown" in unknown
    off = {"output_tok_s": 0.001, "itl_p50_s": -0.12, "ttft_p99_s": 3.0}
    assert verdict_of(predicted, {"dynamic": off}).endswith(
        "predictions of dynamic were off by up to 12 %."
    )
    assert verdict_of({"static": predicted["static"]}, {}) == ""


def run_of(arrivals: list[Arrival], concurrency: int | None = None) -> list[RequestRecord]:
    limits = SchedulerLimits(max_seats=8, context_length=128, max_waiting_requests=1000)
    engine = EngineShape(limits, Buckets.of(max_seats=8, token_budget=64), 129)
    return simulate(arrivals, engine, TABLE, concurrency=concurrency).requests


@pytest.mark.parametrize("clients", [1, 6, 20])
def test_clients_that_wait_for_their_answers_are_recognised(clients: int):
    times = run_of(synthesise(120, Uniform(5, 40), Uniform(5, 40), Poisson(8.0), 0), clients)
    assert Recording(times).clients() == clients


@pytest.mark.parametrize("rate", [0.2, 2.0, 8.0, 40.0])
def test_open_traffic_is_not_taken_for_clients_that_wait(rate: float):
    times = run_of(synthesise(120, Uniform(5, 40), Uniform(5, 40), Poisson(rate), 0))
    assert Recording(times).clients() == 0
    bursts = [Arrival(20.0 * (n // 8), 10, 10) for n in range(80)]
    assert Recording(run_of(bursts)).clients() == 0


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        (["--policies", "none"], "none of which"),
        (["--open-loop"], "--open-loop"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    tmp_path: Path, capsys, extra: list[str], complaint: str
):
    measured_file(tmp_path / "r.npz")
    assert main(["simulate", "--measured", str(tmp_path / "r.npz"), *extra]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--measured", "r.npz", "--trace", "t"], "--trace"),
        (["--table", "t.json", "--count", "2"], "--device"),
        (["--seats", "4", "--max-seats", "4"], "give one"),
    ],
)
def test_flags_that_would_be_ignored_are_refused(capsys, words: list[str], complaint: str):
    assert main(["simulate", *words]) == 2
    assert complaint in capsys.readouterr().err
