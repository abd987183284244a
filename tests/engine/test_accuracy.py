"""Predictions beside measurements: files of measured runs read back, and predicted again without error."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from jitney.engine.accuracy import COMPARED, errors, figure, measured_figures, measured_times, read_runs, span
from jitney.engine.admission import SchedulerLimits
from jitney.engine.bench.saved import TIMES_DTYPE
from jitney.engine.buckets import make_buckets
from jitney.engine.cli import main
from jitney.engine.errors import ConfigError
from jitney.engine.simulator import EngineShape, simulate
from jitney.engine.steptable import Curve, HostTimes, StepTable
from jitney.engine.workload import Poisson, TraceLine, Uniform, synthesise

POLICIES = ("static", "dynamic", "continuous")
TABLE = StepTable([Curve(4, 4, 0.02, 1e-5), Curve(8, 8, 0.03, 1e-5), Curve(64, 8, 0.05, 0.0, 0.0, 1e-4)],
                  HostTimes(before=0.001, after=0.0005))


def test_errors_are_relative_and_only_of_what_both_know():
    ours = {"output_tok_s": 110.0, "ttft_s": {"p50": 2.0, "p99": 3.0}, "queue_s": None}
    theirs = {"output_tok_s": 100.0, "ttft_s": {"p50": 4.0, "p99": 0.0}, "queue_s": {"p50": 1.0}, "req_s": 1.0}
    assert errors(ours, theirs) == {"output_tok_s": pytest.approx(0.1), "ttft_p50_s": pytest.approx(-0.5)}
    assert figure(theirs, "ttft_p99_s") == 0.0 and "ttft_p99_s" in COMPARED


def test_lines_without_a_measurement_do_not_count():
    measured = TraceLine(at=2.0, n_prompt=5, n_output=4, queue_s=0.5, ttft_s=1.0, e2e_s=3.0, finish="stop")
    lines = [TraceLine(at=1.0, n_prompt=5, n_output=4), measured]
    (times,) = measured_times(lines)
    assert (times.boarded, times.first_token, times.finished, times.finish) == (2.5, 3.0, 5.0, "stop")
    assert span([times]) == 3.0 and measured_figures(lines[:1]) is None


def measured_file(path: Path) -> None:
    """What `bench policies --records` would write, had it measured an engine whose steps are exactly TABLE's."""
    arrivals = synthesise(60, Uniform(5, 40), Uniform(5, 40), Poisson(8.0), 0)
    arrays = {}
    for policy in POLICIES:
        limits = SchedulerLimits(max_seats=8, context_length=128, policy=policy, max_waiting_requests=1000)
        run = simulate(arrivals, EngineShape(limits, make_buckets(max_seats=8, token_budget=64), 129), TABLE)
        rows = [(t.request, t.n_prompt, t.n_output, t.arrival, t.boarded, t.first_token, t.finished) for t in run.times]
        arrays |= {f"records_{policy}": run.records, f"times_{policy}": np.array(rows, TIMES_DTYPE),
                   f"limits_{policy}": np.array(msgspec.json.encode(limits).decode())}
    np.savez(path, **arrays)


def test_a_measured_engine_is_predicted_from_its_own_records(tmp_path: Path, capsys):
    """Calibrated on one policy's steps, the other policies come out as they were: nothing but the steps is fitted."""
    measured_file(tmp_path / "r.npz")
    words = ["simulate", "--measured", str(tmp_path / "r.npz"), "--max-seats", "8", "--token-budget", "64"]
    for extra in ([], ["--calibrate-on", "continuous"], ["--calibrate-on", "each"]):
        assert main([*words, *extra, "--json", "-"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert set(report["errors"]) == set(POLICIES)
        for policy, off in report["errors"].items():
            assert {"output_tok_s", "ttft_p50_s", "ttft_p99_s", "e2e_p99_s", "padding_share"} <= set(off)
            assert abs(off["output_tok_s"]) < 0.02 and abs(off["e2e_p99_s"]) < 0.05, (policy, off)
    assert main(words) == 0
    assert "static: predicted and measured" in capsys.readouterr().out


@pytest.mark.parametrize(("extra", "complaint"), [
    (["--calibrate-on", "other"], "--calibrate-on"), (["--policies", "none"], "none of which"),
    (["--token-buckets", "50,64"], "other buckets")])
def test_what_cannot_be_compared_is_one_line(tmp_path: Path, capsys, extra: list[str], complaint: str):
    measured_file(tmp_path / "r.npz")
    assert main(["simulate", "--measured", str(tmp_path / "r.npz"), "--max-seats", "8", "--token-budget", "64",
                 *extra]) == 2
    assert complaint in capsys.readouterr().err


def test_files_that_hold_no_runs_are_one_line(tmp_path: Path):
    np.savez(tmp_path / "other.npz", x=np.zeros(2))
    (tmp_path / "text.npz").write_text("hello")
    np.savez(tmp_path / "half.npz", times_a=np.zeros(1, TIMES_DTYPE))
    for name, complaint in (("other.npz", "no runs"), ("text.npz", "no runs"), ("half.npz", "no runs"),
                            ("absent.npz", "No such file")):
        with pytest.raises(ConfigError, match=complaint):
            read_runs(tmp_path / name)


@pytest.mark.parametrize(("words", "complaint"), [
    (["--measured", "r.npz", "--trace", "t"], "--trace"),
    (["--calibrate-on", "static", "--device", "h100"], "--measured"),
    (["--table", "t.json", "--count", "2"], "--device"), (["--seats", "4", "--max-seats", "4"], "give one")])
def test_flags_that_would_be_ignored_are_refused(capsys, words: list[str], complaint: str):
    assert main(["simulate", *words]) == 2
    assert complaint in capsys.readouterr().err
