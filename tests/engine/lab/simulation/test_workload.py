"""Made-up traffic has the statistics it was asked for, and trace files give back what was
written.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from traces import write_trace

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.trace import Arrival, TraceLine
from jitney.engine.lab.bench.text import arrival_ids, arrival_prose
from jitney.engine.lab.commands.bench_flags import _at_rate, _repeated_tokens
from jitney.engine.lab.simulation.workload import (
    WORKLOADS,
    Closed,
    Conversations,
    Fixed,
    Gamma,
    LengthSummary,
    LogNormal,
    Poisson,
    Uniform,
    _Empirical,
    parse_lengths,
    synthesise,
)

N = 20_000


def gaps(pattern) -> np.ndarray:
    return np.diff(
        np.array([a.at for a in synthesise(N, Fixed(8), Fixed(8), pattern, 3)]), prepend=0.0
    )


def test_poisson_gaps_are_exponential():
    found = gaps(Poisson(4.0))
    assert found.mean() == pytest.approx(0.25, rel=0.03) and found.std() == pytest.approx(
        0.25, rel=0.03
    )
    assert np.mean(found > 0.5) == pytest.approx(np.exp(-2), rel=0.05)


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_rate_and_the_burstiness(shape: float):
    found = gaps(Gamma(2.0, shape))
    assert found.mean() == pytest.approx(0.5, rel=0.05)
    assert found.std() / found.mean() == pytest.approx(shape**-0.5, rel=0.05)


def test_lognormal_has_its_mean_and_stays_within_its_bounds():
    rng = np.random.default_rng(1)
    assert LogNormal(200.0, 0.6).draw(rng, N).mean() == pytest.approx(200, rel=0.02)
    assert np.log(LogNormal(5000.0, 0.6).draw(rng, N)).std() == pytest.approx(0.6, rel=0.02)
    cut = LogNormal(200.0, 1.0, 50, 300).draw(rng, N)
    assert (cut.min(), cut.max()) == (50, 300)


def test_the_same_seed_gives_the_same_traffic_and_patterns_share_lengths():
    one, two = (
        synthesise(50, Uniform(1, 9), Uniform(1, 99), pattern, 7)
        for pattern in (Poisson(1.0), Closed())
    )
    assert one == synthesise(50, Uniform(1, 9), Uniform(1, 99), Poisson(1.0), 7)
    assert [(a.n_prompt, a.n_output) for a in one] == [(a.n_prompt, a.n_output) for a in two]
    assert one != synthesise(50, Uniform(1, 9), Uniform(1, 99), Poisson(1.0), 8)


def test_a_trace_comes_back_as_it_was_written(tmp_path: Path):
    arrivals = [
        Arrival(0.0, 12, 5),
        Arrival(1.25, 700, 1, "a", -3),
        Arrival(2.0, 40, 8, conversation=3, n_shared=16),
    ]
    write_trace(tmp_path / "t.jsonl", arrivals)
    assert Arrival.read_all(tmp_path / "t.jsonl") == arrivals
    assert (tmp_path / "t.jsonl").read_text().splitlines()[0] == '{"t":0.0,"in":12,"out":5}'


def test_a_recording_keeps_what_was_measured(tmp_path: Path):
    (tmp_path / "r.jsonl").write_text(
        '{"t":2,"in":3,"out":4,"queue_s":0.5,"e2e_s":9,"finish":"stop"}\n\n{"t":1,"in":1,"out":1}\n'
    )
    assert TraceLine.read_all(tmp_path / "r.jsonl") == [
        TraceLine(at=1, n_prompt=1, n_output=1),
        TraceLine(at=2, n_prompt=3, n_output=4, queue_s=0.5, e2e_s=9, finish="stop"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        '{"t":1,"in":1,"out":1,"text":"x"}',
        '{"t":-1,"in":1,"out":1}',
        '{"t":1,"in":0,"out":1}',
        '{"t":1,"in":1}',
        '{"t":1,"in":1,"out":"2"}',
        "nonsense",
        '{"t":1,"in":4,"out":1,"conversation":1,"shared":5}',
        '{"t":1,"in":4,"out":1,"shared":2}',
        '{"t":1,"in":4,"out":1,"conversation":-1}',
        '{"t":1,"in":1,"out":-1}',
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str):
    (tmp_path / "bad.jsonl").write_text('{"t":0,"in":1,"out":1}\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        Arrival.read_all(tmp_path / "bad.jsonl")


def test_a_trace_can_be_played_at_another_rate():
    arrivals = _at_rate(
        [Arrival(0.0, 1, 1), Arrival(1.0, 1, 1), Arrival(4.0, 1, 1), Arrival(8.0, 1, 1)], 2.0
    )
    assert [a.at for a in arrivals] == [0.0, 0.25, 1.0, 2.0]
    with pytest.raises(ConfigError, match="no rate"):
        _at_rate([Arrival(0.0, 1, 1)], 2.0)


def test_lengths_are_read_from_flags(tmp_path: Path):
    write_trace(tmp_path / "t", [Arrival(0.0, 12, 5), Arrival(1.0, 7, 0)])
    assert parse_lengths("128", "--output") == Fixed(128)
    assert parse_lengths("50..800", "--output") == Uniform(50, 800)
    assert parse_lengths("lognormal:mean=200,sigma=0.8,max=800", "--output") == LogNormal(
        200.0, 0.8, 1, 800
    )
    assert parse_lengths(f"trace:{tmp_path / 't'}", "--prompt") == _Empirical((12, 7))
    assert parse_lengths(f"trace:{tmp_path / 't'}", "--output") == _Empirical((5, 1))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-5",
        "9..3",
        "lognormal:mean=0,sigma=1",
        "lognormal:sigma=1",
        "x..y",
        "1.5",
        "lognormal:mean=2,sigma=1,min=9,max=3",
        "lognormal:mean=2,sigma=1,mode=3",
    ],
)
def test_bad_lengths_are_refused_by_their_flag(text: str):
    with pytest.raises(ConfigError, match="--output"):
        parse_lengths(text, "--output")


@pytest.mark.parametrize("name", ["short", "mixed", "long-form", "chat", "uniform"])
def test_no_named_workload_is_mostly_its_own_cuts(name: str):
    arrivals = WORKLOADS[name].arrivals(4000, Closed(), 0)
    outputs = LengthSummary.of(a.n_output for a in arrivals)
    assert outputs.at_shortest < 0.05 and outputs.at_longest < 0.06
    assert outputs.shortest < outputs.median / 1.7 and outputs.p95 > 1.3 * outputs.median
    assert arrivals == WORKLOADS[name].arrivals(4000, Closed(), 0)
    assert arrivals != WORKLOADS[name].arrivals(4000, Closed(), 1)


def test_a_turn_carries_everything_that_was_said_before():
    talks = Conversations(n_shared=10, turns=Fixed(3), live=2)
    arrivals = talks.requests(12, Fixed(4), Fixed(6), Closed(), 0)
    assert [a.conversation for a in arrivals] == [1, 2, 1, 2, 1, 2, 3, 4, 3, 4, 3, 4]
    assert [a.n_prompt for a in arrivals if a.conversation == 3] == [14, 24, 34]
    assert {a.n_output for a in arrivals} == {6} and {a.n_shared for a in arrivals} == {10}
    # The first turn repeats the system prompt (but the very first one), the others what their
    # conversation has sent.
    assert _repeated_tokens(arrivals) == 3 * 10 + 4 * (14 + 24)
    assert _repeated_tokens([Arrival(0.0, 9, 9)] * 3) == 0


def test_own_lengths_replace_a_turns_and_not_the_history():
    arrivals = WORKLOADS["chat"].arrivals(256, Closed(), 0, prompt=Fixed(5), output=Fixed(7))
    assert {a.n_output for a in arrivals} == {7}
    assert {(a.n_prompt - 128 - 5) % 12 for a in arrivals} == {0} and max(
        a.n_prompt for a in arrivals
    ) == 133 + 5 * 12


def test_prompts_of_one_conversation_begin_alike_and_others_do_not():
    arrivals = WORKLOADS["chat"].arrivals(200, Closed(), 0)
    texts = [arrival_prose(a, lambda n_tokens: n_tokens, n, 5) for n, a in enumerate(arrivals)]
    ids = [
        arrival_ids(lambda text: [ord(c) for c in text], a, n, 5) for n, a in enumerate(arrivals)
    ]
    last: dict[int, int] = {}
    for number, arrival in enumerate(arrivals):
        assert len(texts[number].split()) == len(ids[number]) == arrival.n_prompt
        before = last.get(arrival.conversation)
        if before is not None:
            assert texts[number].startswith(texts[before])
            assert ids[number][: len(ids[before])] == ids[before]
        last[arrival.conversation] = number
    firsts = list({a.conversation: n for n, a in reversed(list(enumerate(arrivals)))}.values())
    assert len({tuple(ids[n][:128]) for n in firsts}) == 1, "the system prompt is the same for all"
    assert len({tuple(ids[n][:160]) for n in firsts if len(ids[n]) >= 160}) == sum(
        len(ids[n]) >= 160 for n in firsts
    )
