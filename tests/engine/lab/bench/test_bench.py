"""Runs in this process, the comparison of the policies, the knee of a curve, and the reports."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from fakes import VOCAB, FakeClock, make_core, make_request, solo

from jitney.engine.cli import main
from jitney.engine.common.errors import ConfigError
from jitney.engine.common.machine import cpu_name
from jitney.engine.common.records import ROW_KINDS, STEP_DTYPE
from jitney.engine.common.reports.page import Page, PageSection, Table
from jitney.engine.common.trace import Arrival, TraceLine
from jitney.engine.core.measuring.engine_shape import EngineShape
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.lab.bench.compare import (
    _CURVE_LOADS,
    at_rate,
    capacity,
    differences,
    ratios,
    waits_of,
)
from jitney.engine.lab.bench.offline import OfflineBench, outputs_of
from jitney.engine.lab.bench.sweep import knee_of
from jitney.engine.lab.bench.tables import curve_table, figures_table, ratio_table
from jitney.engine.lab.bench.text import _prompt_ids, prose
from jitney.engine.lab.commands.bench_flags import _repeated_tokens
from jitney.engine.lab.simulation.engine_run import EngineRun
from jitney.engine.lab.simulation.planner import knee
from jitney.engine.lab.simulation.recordings import write_recording
from jitney.engine.lab.simulation.simulator import simulate
from jitney.engine.lab.simulation.step_table import Curve, StepTable
from jitney.engine.lab.simulation.workload import (
    Closed,
    Conversations,
    Fixed,
    Poisson,
    Uniform,
    synthesise,
)

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

POLICIES = ("static", "dynamic", "continuous")


def encode(text: str) -> list[int]:
    """A token a character, none of them the end."""
    return [1 + ord(character) % (VOCAB - 1) for character in text]


def make_bench(**options) -> OfflineBench:
    """On the fake device; every look at the clock takes 1 ms."""
    clock = FakeClock(0.001)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    return OfflineBench(make_core(clock=clock, **options), encode, sleep)


def mixed(pattern=None, count: int = 24) -> list[Arrival]:
    return synthesise(count, Uniform(2, 9), Uniform(1, 24), pattern or Closed(), 5)


def test_prompts_are_text_of_exactly_the_wanted_length():
    assert (
        prose(5, 1).startswith("The ")
        and len(prose(5, 1).split()) == 5
        and prose(300, 1) == prose(300, 1)
    )
    assert len({prose(12, seed) for seed in range(200)}) == 200
    for wanted in (1, 7, 500):
        assert len(_prompt_ids(encode, wanted, 3)) == wanted
        assert (
            len(_prompt_ids(lambda text: list(range(len(text.split()) // 4)), wanted, 3)) == wanted
        )


def test_all_policies_give_the_tokens_of_a_request_alone():
    bench = make_bench()
    requests = bench.requests(mixed(Poisson(30.0)))
    runs = bench.run_policies(requests, POLICIES)
    assert list(runs) == list(POLICIES) and differences(runs) == []
    for request, tokens in zip(requests, outputs_of(runs["continuous"]), strict=True):
        alone = make_request(
            "x", request.prompt, max_tokens=request.arrival.n_output, ignore_eos=True
        )
        assert tokens == solo(alone, 0, 0, eos=())


def test_chat_turns_hit_the_prefix_cache_under_every_policy():
    """Two conversations at a time on an engine that remembers: later turns find their system prompt
    and history.
    """
    bench = make_bench(context=256, pages=257, seats=2)
    talks = Conversations(n_shared=16, turns=Fixed(3), live=2)
    arrivals = talks.requests(12, Fixed(4), Fixed(4), Closed(), 1)
    requests = bench.requests(arrivals)
    assert [len(request.prompt) for request in requests] == [a.n_prompt for a in arrivals]
    runs = bench.run_policies(requests, POLICIES, concurrency=2)
    assert differences(runs) == []
    for run in runs.values():
        computed = int(run.records["prefill"].sum())
        sent = sum(a.n_prompt for a in arrivals)
        assert computed < 0.6 * sent, "most of what was said before is not computed again"
        assert computed >= sent - _repeated_tokens(arrivals)


def test_a_difference_is_found_where_it_begins():
    bench = make_bench()
    requests = bench.requests(mixed())
    runs = bench.run_policies(requests, ["static", "continuous"])
    tokens = runs["continuous"].requests[3].tokens
    assert tokens is not None
    at = len(requests[3].prompt) + 2
    tokens[at : at + 1] = [VOCAB]
    assert differences(runs) == [(3, ("static", "continuous"), 2)]


def test_open_arrivals_come_at_their_times_and_a_closed_loop_keeps_its_number():
    bench = make_bench()
    requests = bench.requests([Arrival(0.0, 3, 2), Arrival(5.0, 3, 2), Arrival(5.0, 3, 2)])
    run = bench.run(requests)
    assert [round(t.arrival - run.started, 9) for t in run.requests] == [
        0.0,
        5.0,
        5.0,
    ] and run.seconds > 5.0
    closed = bench.run(bench.requests(mixed()), concurrency=2)
    for times in closed.requests:
        assert sum(other.arrival <= times.arrival < other.end for other in closed.requests) <= 2


def test_nobody_is_refused_for_a_long_queue():
    bench = make_bench(max_requests=2, max_tokens=20)
    assert bench.run(bench.requests(mixed(count=40))).figures()["served"] == 40


def test_a_request_that_cannot_fit_is_named_before_anything_runs():
    with pytest.raises(ConfigError, match="request 1 has 60 prompt and 9 output tokens"):
        make_bench(context=64).requests([Arrival(0.0, 3, 3), Arrival(0.0, 60, 9)])


def test_capacity_is_what_full_seats_serve():
    bench = make_bench(seats=4)
    arrivals = synthesise(40, Fixed(4), Fixed(12), Closed(), 0)
    rate, measured = bench.capacity(arrivals)
    assert len(measured.requests) == 16 and len(measured.records)
    saturated = bench.run(bench.requests(arrivals), concurrency=8).figures()["req_s"]
    assert rate == pytest.approx(saturated, rel=0.1)
    assert [a.at for a in at_rate([Arrival(2.0, 1, 1), Arrival(6.0, 1, 1)], 4.0)] == [0.5, 1.5]


@pytest.mark.parametrize("few", [36, 12])
def test_few_requests_tell_the_capacity_that_many_do(few: int):
    """Long answers, of which the first end late: with as many seats as these there is no second
    round without going through them again.
    """
    bench = make_bench(seats=16, pages=600, context=128, budget=32)
    arrivals = synthesise(256, Fixed(4), Uniform(30, 90), Closed(), 0)
    tokens = {}
    for count in (few, 256):
        rate, measured = bench.capacity(arrivals[:count])
        lengths = [request.n_output for request in measured.requests]
        assert len(lengths) == 64 and lengths[:few] == [a.n_output for a in arrivals[:few]]
        tokens[count] = rate * np.mean([arrival.n_output for arrival in arrivals[:count]])
    assert tokens[few] == pytest.approx(tokens[256], rel=0.04)


def test_conversations_that_come_again_are_others():
    """Their prompts would be in the prefix cache, and the engine would seem faster than it is."""
    bench = make_bench(context=256, pages=257, seats=2)
    talks = Conversations(n_shared=0, turns=Fixed(1), live=1)
    arrivals = talks.requests(8, Fixed(16), Fixed(4), Closed(), 1)
    computed = []
    for count in (2, 8):
        _, measured = bench.capacity(arrivals[:count])
        computed.append(int(measured.records["prefill"].sum()))
    assert computed[0] == computed[1]


TABLE = StepTable([Curve(1, 1, 0.006), Curve(4, 4, 0.01), Curve(16, 4, 0.02)])


def flat_shape(policy: str = "continuous") -> EngineShape:
    held_to = SchedulerLimits(4, 2048, policy=policy, max_waiting_requests=2)
    return EngineShape(held_to, Buckets.of(max_seats=4, token_budget=16), 2000).open_to_all()


def test_what_a_policy_can_serve_is_where_its_queue_begins_to_grow():
    """Lengths 4 to 40: below 0.9 of it the waits of a run four times as long are no longer, beyond
    1.3 they are.
    """
    arrivals = synthesise(400, Fixed(4), Uniform(4, 40), Poisson(1.0), 1)
    able = {policy: capacity(arrivals, flat_shape(policy), TABLE) for policy in POLICIES}
    assert (
        able["static"] == pytest.approx(able["dynamic"])
        and able["continuous"] > 1.3 * able["static"]
    )
    for policy in POLICIES:
        waits = {}
        for share in (0.7, 1.4):
            for count in (200, 800):
                arrivals = synthesise(count, Fixed(4), Uniform(4, 40), Poisson(1.0), 1)
                coming = at_rate(arrivals, share * able[policy])
                run = simulate(coming, flat_shape(policy), TABLE)
                waits[share, count] = run.figures()["queue_s"]["mean"]
        assert waits[0.7, 800] < 2 * waits[0.7, 200] and waits[1.4, 800] > 3 * waits[1.4, 200], (
            policy,
            waits,
        )


def test_ratios_are_gains_of_continuous():
    def run(tok_s: float, ttft: float) -> dict:
        return {
            "output_tok_s": tok_s,
            "req_s": tok_s / 10,
            "ttft_s": {"p50": ttft, "p99": 2 * ttft},
            "e2e_s": None,
        }

    gains = ratios({"static": run(100, 8.0), "continuous": run(300, 0.5)})
    assert gains["static"]["output_tok_s"] == 3.0 and gains["static"]["ttft_s_p99"] == 16.0
    assert gains["static"]["e2e_s_p50"] is None
    assert ratios({"static": run(1, 1)}) == {}


@pytest.mark.parametrize(("requests", "gain", "wait"), [(1000, "4.00x", "2.00 s"), (999, "–", "–")])
def test_tables_of_the_policies_have_a_column_for_each_percentile(
    requests: int, gain: str, wait: str
):
    def run(seconds: float) -> dict[str, Any]:
        waits = {"p50": seconds, "p90": seconds, "p99": seconds, "p999": seconds, "n": requests}
        return {"output_tok_s": 1.0, "req_s": 1.0, "ttft_s": waits, "e2e_s": waits}

    runs = {"static": run(2.0), "continuous": run(0.5)}
    shown, short = figures_table(runs), wait.replace("2.00 s", "500 ms")
    assert ["time to first token p99.9", wait, short] in shown.rows
    gains = ratio_table(ratios(runs))
    (row,) = gains.rows
    cells = dict(zip(gains.heads, row, strict=True))
    assert cells["TTFT p99 /"] == cells["e2e p99 /"] == "4.00x"
    assert cells["TTFT p99.9 /"] == cells["e2e p99.9 /"] == gain
    point = {"load": 1.0, "rate": 2.0, "policies": {"static": waits_of(runs["static"], 0.5)}}
    assert curve_table([point]).rows == [["1", "2", f"2.00 s / {wait}"]]


def test_the_knee_is_farthest_from_the_diagonal():
    x = [1, 2, 4, 8, 16, 32]
    assert knee(x, [10, 20, 40, 78, 84, 86]) == 3
    assert knee(x, [1, 1, 1, 1, 2, 20], convex=True) == 4
    assert knee(x, x) is None and knee([1, 2], [1, 2]) is None and knee(x, [5] * 6) is None
    assert knee(x, [10, 20, 40, 80, 70, 60]) == 3
    assert knee([5, 10, 20, 40, 80], [60, 83, 62, 353, 234], convex=True) == 2, (
        "the dip at the end is no knee"
    )
    tok_s = [
        {"concurrency": c, "output_tok_s": t}
        for c, t in zip(x, [10, 20, 40, 78, 84, 86], strict=True)
    ]
    assert knee_of("concurrency", tok_s) == 3
    assert knee_of("rate", [{"rate": 1.0, "e2e_p99_s": None}] * 3) is None


class Collector(HTMLParser):
    """Tags that would fetch something, and the JSON of the charts."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.charts: list[dict] = []
        self._json = False
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.outside += [
            f"{tag} {name}={value}"
            for name, value in attrs
            if name in ("src", "href", "action", "data")
        ]
        self._json = ("type", "application/json") in attrs
        assert tag not in ("link", "img", "iframe", "b"), tag

    def handle_data(self, data: str) -> None:
        if self._json:
            self.charts += json.loads(data)
            self._json = False
        self.text += data if len(data) < 10_000 else ""


def read_page(text: str) -> Collector:
    collector = Collector()
    collector.feed(text)
    collector.close()
    assert collector.outside == []
    return collector


def test_the_report_asks_nobody_for_anything_and_shows_markup_as_text():
    evil = "</script><b onclick=x>\"'&"
    text = Page(
        evil,
        [evil],
        [
            PageSection(
                evil,
                [evil],
                [Table(["", evil], [[evil, evil]])],
                [go.Figure(go.Scatter(name=evil), {"template": None})],
            )
        ],
    ).html()
    found = read_page(text)
    assert [chart["data"] for chart in found.charts] == [[{"name": evil, "type": "scatter"}]]
    assert found.text.count(evil) == 8 and "@import" not in text.split("<script>")[0]
    assert "Plotly.newPlot" in text and len(text) > 1_000_000, "plotly.js stands in the page itself"


def test_recordings_and_records_come_back(tmp_path: Path):
    bench = make_bench()
    runs = bench.run_policies(bench.requests(mixed(Poisson(30.0))), ["continuous"])
    run = runs["continuous"]
    EngineRun.write_all(tmp_path / "r.npz", runs)
    back = EngineRun.read_all(tmp_path / "r.npz")["continuous"]
    assert back.records.dtype == STEP_DTYPE and len(back.records) == len(run.records)
    assert back.shape == run.shape and back.seconds == run.seconds
    assert back.figures()["seat_fill"] == run.figures()["seat_fill"]
    write_recording(tmp_path / "t.jsonl", run.requests, run.started)
    lines = TraceLine.read_all(tmp_path / "t.jsonl")
    assert sorted(line.e2e_s or 0 for line in lines) == pytest.approx(
        sorted(t.e2e_s or 0.0 for t in run.requests)
    )
    assert {line.finish for line in lines} == {"length"}


ENGINE = shlex.split(
    "tiny-random --context 128 --token-budget 32 --platform cpu --kernels reference"
)


@pytest.mark.usefixtures("programs_when_used")
def test_the_command_sweeps_loads_on_a_real_engine(capsys: pytest.CaptureFixture[str]):
    sizes = shlex.split("--max-seats 2 --seat-buckets 2 --token-buckets 32 --policy static")
    traffic = ["--prompt", "4..8", "--output", "2..8", "--loads", "0.2,6", "--requests", "48"]
    assert main(["bench", "sweep", *ENGINE, *sizes, *traffic, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    low, high = report["points"]
    assert low["rate"] == pytest.approx(0.2 * report["capacity_req_s"]) and report["axis"] == "load"
    assert all(point["figures"]["backlog"]["offered_req_s"] > 0 for point in (low, high))
    assert report["engine"]["device"] == cpu_name() and report["engine"]["policy"] == "static"


@pytest.mark.usefixtures("programs_when_used")
def test_the_command_compares_the_policies_on_a_real_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    # Thirty simulated runs for the curve, whose shape is a test of its own.
    monkeypatch.setattr("jitney.engine.lab.commands.bench_policies._CURVE_REQUESTS", 50)
    out = {name: tmp_path / name for name in ("p.json", "p.html", "p.npz")}
    sizes = ["--seats", "4", "--seat-buckets", "4", "--token-buckets", "32"]
    traffic = shlex.split("--requests 10 --prompt 4..12 --output 2..20 --load 1.2 --warmup-s 0")
    asked = ["--price-per-hour", "2", "--slo-ttft-ms", "1000", "--measure-loads", "0.5"]
    files = ["--json", out["p.json"], "--html", out["p.html"], "--records", out["p.npz"]]
    files += ["--traces", tmp_path / "t"]
    words = ["bench", "policies", *ENGINE, *sizes, *traffic, *asked, *map(str, files)]
    status = main(words)
    assert status == 0
    report = json.loads(out["p.json"].read_text())
    assert list(report["cases"]) == ["given"]
    case = report["cases"]["given"]
    assert list(case["policies"]) == list(POLICIES) and case["same_tokens"] is True
    assert set(case["prediction_errors"]) == set(POLICIES)
    assert set(case["share_of_capacity"]) == set(POLICIES) and len(report["load_curve"]) == len(
        _CURVE_LOADS
    )
    assert [point["load"] for point in report["measured_loads"]] == [0.5]
    assert set(case["traffic"]["output_lengths"]) > {"median", "at_shortest"}
    for figures in case["policies"].values():
        assert {"p50", "p90", "p99", "p999"} <= set(figures["ttft_s"]) and figures[
            "output_tok_s"
        ] > 0
        assert figures["served"] == 10 and figures["goodput_req_s"] > 0
        rows, ledger = figures["rows"], figures["ledger"]
        assert rows == {kind: ledger[kind]["rows"] for kind in ROW_KINDS}
    assert case["ratios"]["static"]["output_tok_s"] > 0 and case["traffic"]["requests"] == 10
    assert case["limits"]["static"]["static_timeout_ms"] == 0
    assert len(read_page(out["p.html"].read_text()).charts) == 4
    assert len(TraceLine.read_all(tmp_path / "t.static.jsonl")) == 10
    told = capsys.readouterr()
    shown = told.out
    assert "outputs 2 (" in shown and case["traffic"]["output_lengths"]["median"] > 2
    assert {figures["backlog"] for figures in case["policies"].values()} == {None}, (
        "ten requests tell nothing"
    )
    assert cpu_name() in shown and cpu_name() in out["p.html"].read_text()
    assert "every request the same tokens" in shown and "Ledger" in shown
    assert (
        "Error of prediction: given" in shown
        and "% exactly" in shown
        and "p99 / p99.9 of the time to first token over" in shown
    )
    assert "3 runs, about" in told.err and "minutes" in told.err
    assert main(["simulate", "--measured", str(out["p.npz"])]) == 0
    assert "dynamic: predicted and measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["policies", "--policies", "greedy"], "greedy is none of static, dynamic, continuous"),
        (["policies", "--concurrency", "4"], "--arrivals closed"),
        (["policies", "--cases", "heavy,lighter"], "lighter is none of heavy, uniform, light"),
        (["policies", "--cases", "light", "--rate", "3"], "give no --rate with it"),
        (["policies", "--measure-loads", "0.5,x"], "--measure-loads"),
        (["policies", "--measure-loads", "0.5", "--arrivals", "closed"], "traffic with a rate"),
        (["policies", "--output", "9..3"], "--output"),
        (["policies", "--requests", "0"], "--requests must be at least 1"),
        (["policies", "--json", "/nowhere/x.json"], "no such folder"),
        (["policies", "--seats", "4", "--max-seats", "4"], "give one"),
        (["policies", "--slo-ttft-ms", "nan"], "--slo-ttft-ms must be at least 0"),
        (["serve", "--url", "localhost:80"], "must begin with http"),
        (["serve", "--url", "http://x", "--arrivals", "poisson"], "needs --rate"),
        (["serve", "--url", "http://x", "--rate", "3"], "closed arrivals have none"),
        (["sweep", "--rates", "1,x"], "--rates"),
        (["sweep", "--rates", "1", "--concurrencies", "1"], "not both"),
        (["sweep", "--concurrencies", "1.5"], "whole numbers"),
        (["sweep", "--url", "http://x", "--max-seats", "4"], "server's business"),
        (["sweep", "--rates", "1", "--loads", "1"], "--rates or --loads, not both"),
        (["sweep", "--loads", "0.5,-1"], "--loads: must be positive"),
        (["sweep", "--loads", "0.5", "--arrivals", "closed"], "--loads needs --arrivals"),
        (["sweep", "--loads", "0.5", "--capacity-streams", "4"], "is for --loads with --url"),
    ],
)
def test_bad_flags_are_told_in_one_line(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["bench", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert complaint in error and "\n" not in error
