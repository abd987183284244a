"""Predictions beside measurements: files of measured runs read back, and predicted again without
error.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from jitney.engine.cli import main
from jitney.engine.common.errors import ConfigError
from jitney.engine.common.request_record import RequestRecord
from jitney.engine.common.trace import Arrival, TraceLine
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.lab.bench.saved import _STAYS_DTYPE, _TIMES_DTYPE, write_recording
from jitney.engine.lab.simulation.accuracy import (
    COMPARED,
    MeasuredRun,
    Recording,
    RunNote,
    cross_errors,
    errors,
    span,
)
from jitney.engine.lab.simulation.engine_shape import EngineShape
from jitney.engine.lab.simulation.simulator import simulate
from jitney.engine.lab.simulation.step_table import Curve, HostTimes, StepTable
from jitney.engine.lab.simulation.verdicts import (
    ErrorsElsewhere,
    PolicyErrors,
    _speed_error,
    _verdict,
)
from jitney.engine.lab.simulation.workload import Poisson, Uniform, synthesise

ROOT = Path(__file__).parents[4]
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
    assert COMPARED["ttft_p99_s"].of(theirs) == 0.0


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


def measured_file(path: Path) -> None:
    """What `bench policies --records` would write, had it measured an engine whose steps are
    exactly TABLE's.
    """
    arrivals = synthesise(60, Uniform(5, 40), Uniform(5, 40), Poisson(8.0), 0)
    arrays = {}
    for policy in POLICIES:
        limits = SchedulerLimits(
            max_seats=8, context_length=128, policy=policy, max_waiting_requests=1000
        )
        engine = EngineShape(
            limits, Buckets.of(max_seats=8, token_budget=64, seat_sizes=(4, 8)), 129
        )
        run = simulate(arrivals, engine, TABLE)
        rows = [
            (t.number, t.n_prompt, t.n_output, t.arrival, t.boarded, t.first_token, t.finished)
            for t in run.requests
        ]
        stays = [
            (s.seat, r.number, s.start, np.nan if s.first_token is None else s.first_token, s.end)
            for r, s in run.stays
        ]
        arrays |= {
            f"records_{policy}": run.records,
            f"times_{policy}": np.array(rows, _TIMES_DTYPE),
            f"stays_{policy}": np.array(stays, _STAYS_DTYPE),
            f"note_{policy}": np.array(msgspec.json.encode(RunNote(engine)).decode()),
        }
    np.savez(path, **arrays)


def test_a_measured_engine_is_predicted_from_its_own_records(tmp_path: Path, capsys):
    """Calibrated on one policy's steps, the other policies come out as they were: nothing but the
    steps is fitted.
    """
    measured_file(tmp_path / "r.npz")
    words = ["simulate", "--measured", str(tmp_path / "r.npz")]
    for extra in ([], ["--calibrate-on", "all"], ["--calibrate-on", "each"]):
        assert main([*words, *extra, "--json", "-"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert set(report["errors"]) == set(POLICIES)
        for policy, off in report["errors"].items():
            assert {
                "output_tok_s",
                "ttft_p50_s",
                "ttft_p99_s",
                "e2e_p99_s",
                "padding_share",
            } <= set(off)
            assert abs(off["output_tok_s"]) < 0.02 and abs(off["e2e_p99_s"]) < 0.05, (policy, off)
            assert abs(off["seat_fill"]) < 0.02
        assert report["engine"]["buckets"] == [
            "decode-4",
            "decode-8",
            "mixed-16",
            "mixed-32",
            "mixed-64",
        ]
        assert set(report["cross_errors"]) == set(report["cross_errors"]["static"]) == set(POLICIES)
        assert abs(report["cross_errors"]["continuous"]["static"]["output_tok_s"]) < 0.02
        assert "x the tokens of" in report["verdict"] and "±" in report["verdict"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "static: predicted and measured" in shown and "continuous -> static" in shown
    assert report["verdict"] in " ".join(shown.split())


def test_step_times_of_one_run_predict_another_and_the_error_is_told(tmp_path: Path):
    """An engine that is a tenth slower under static than under continuous: exactly that is off, and
    only there.
    """
    measured_file(tmp_path / "r.npz")
    runs = MeasuredRun.read_all(tmp_path / "r.npz")
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
    runs["static"] = static._replace(requests=slow)
    cross = cross_errors(runs)
    assert cross["continuous"]["static"]["output_tok_s"] == pytest.approx(0.1, abs=0.02)
    assert abs(cross["continuous"]["dynamic"]["output_tok_s"]) < 0.02
    assert abs(cross["static"]["continuous"]["output_tok_s"]) < 0.02


def test_a_verdict_is_never_without_its_error():
    rates = {"static": 100.0, "dynamic": 200.0, "continuous": 290.0}
    assert _verdict(rates, {}) == (
        "By simulation continuous makes 2.90x the tokens of static; error unknown: neither "
        "was measured."
    )
    assert _verdict(rates, {"continuous": 0.05, "static": 0.03}).endswith(
        "2.90x the tokens of static, ±8 %."
    )
    assert _verdict(rates, {"continuous": 0.08}).endswith(
        "±8 % for continuous, error unknown for static, which was not measured."
    )
    assert _verdict(rates, {"dynamic": 0.01, "static": None}).endswith(
        "error unknown: neither was measured."
    )
    elsewhere = ErrorsElsewhere("A CPU, 2 cores, 2026-11-22", {"static": 0.09, "continuous": 0.2})
    assert _verdict(rates, {"continuous": 0.08}, elsewhere).endswith(
        "2.90x the tokens of static, ±17 % (for static measured on A CPU, 2 cores, 2026-11-22)."
    )
    assert _verdict(rates, {}, elsewhere).endswith(
        "2.90x the tokens of static, ±29 % (measured on A CPU, 2 cores, 2026-11-22)."
    )
    assert _verdict(rates, {"continuous": 0.05, "static": 0.03}, elsewhere).endswith(", ±8 %.")
    assert _verdict({"static": 1.0}, {}) == "" and "same" in _verdict(
        {"static": 2.0, "dynamic": 2.0}, {}
    )


def test_the_errors_that_are_shipped_are_the_published_ones():
    report = json.loads((ROOT / "docs/benchmarks/policies.json").read_text())
    assert PolicyErrors.shipped() == PolicyErrors.of_report(report)
    known = PolicyErrors.shipped().learned_from("continuous")
    assert known.where == "AMD EPYC (family 26, model 2), 2 cores, 2026-11-26"
    # The largest of the three cases: its ITL in the light one.
    assert known.errors["static"] == pytest.approx(0.0335, abs=1e-4)
    assert set(known.errors) == set(POLICIES)
    assert PolicyErrors.shipped().learned_from("other").errors == {}
    here = PolicyErrors.shipped().learned_from("continuous", PolicyErrors.shipped().machine)
    there = PolicyErrors.shipped().learned_from("continuous", "A CPU, 2 cores")
    assert here == known and there.errors == known.errors
    assert "not on this one" in there.where and known.where in there.where


def test_a_recording_under_one_policy_says_the_error_of_predicting_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    measured_file(tmp_path / "r.npz")
    run = MeasuredRun.read_all(tmp_path / "r.npz")["continuous"]
    np.save(tmp_path / "steps.npy", run.records)
    write_recording(str(tmp_path / "t.jsonl"), run.requests, 0.0)
    (tmp_path / "table.json").write_text(json.dumps({"table": TABLE.contents()}))
    words = ["simulate", "--trace", str(tmp_path / "t.jsonl"), "--seats", "8", "--json", "-"]
    assert main([*words, "--records", str(tmp_path / "steps.npy")]) == 0
    told = json.loads(capsys.readouterr().out)["verdict"]
    assert (
        f"(for static measured on {PolicyErrors.shipped().learned_from('continuous').where})."
        in told
    )
    assert main([*words, "--table", str(tmp_path / "table.json")]) == 0
    told = json.loads(capsys.readouterr().out)["verdict"]
    assert "error unknown for static" in told, "a table of steps was learned from no such run"


def test_the_error_of_speed_is_not_that_of_the_traffic():
    """An engine that is half empty makes the tokens that were asked for, however wrong its step
    times are.
    """
    assert _speed_error({"output_tok_s": 0.001, "itl_p50_s": -0.12, "ttft_p99_s": 3.0}) == 0.12
    assert _speed_error({"ttft_p50_s": 0.1}) is None


def served(arrival: float, finished: float, finish: str = "length") -> RequestRecord:
    first = None if finish == "error" else arrival
    return RequestRecord(
        number=0,
        n_prompt=4,
        n_output=4,
        arrival=arrival,
        boarded=first,
        first_token=first,
        finished=finished,
        finish=finish,
    )


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


def test_refused_requests_are_of_open_traffic():
    chain = [served(float(n), n + 1.0) for n in range(20)]
    assert Recording(chain).clients() == 1
    assert (
        Recording([*chain, served(3.5, 3.5, "error")]).clients() == 0
        and Recording(chain[:2]).clients() == 0
    )


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        (["--calibrate-on", "other"], "--calibrate-on"),
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


def test_files_that_hold_no_runs_are_one_line(tmp_path: Path):
    np.savez(tmp_path / "other.npz", x=np.zeros(2))
    (tmp_path / "text.npz").write_text("hello")
    np.savez(tmp_path / "half.npz", times_a=np.zeros(1, _TIMES_DTYPE))
    for name, complaint in (
        ("other.npz", "no runs"),
        ("text.npz", "no runs"),
        ("half.npz", "no runs"),
        ("absent.npz", "No such file"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            MeasuredRun.read_all(tmp_path / name)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--measured", "r.npz", "--trace", "t"], "--trace"),
        (["--calibrate-on", "static", "--device", "h100"], "--measured"),
        (["--table", "t.json", "--count", "2"], "--device"),
        (["--seats", "4", "--max-seats", "4"], "give one"),
    ],
)
def test_flags_that_would_be_ignored_are_refused(capsys, words: list[str], complaint: str):
    assert main(["simulate", *words]) == 2
    assert complaint in capsys.readouterr().err
