"""What is said of an engine follows from its figures, and from nothing that they do not show."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_fakes import FakeClient, Script, make_app
from metric_names import metric_names

from jitney.engine.cli import diagnosis
from jitney.engine.cli.diagnosis import COMPLAINTS, RULES, Figures, diagnose
from jitney.engine.common.records import STEP_DTYPE
from jitney.engine.common.scrape import Scrape

ROOT = Path(__file__).parents[3]
#: An engine with nothing wrong: half of its seats taken, some wait, answers come quickly.
WELL: dict[str, Any] = dict(
    seconds=10.0,
    up=1,
    seats=32,
    running=20,
    waiting=2,
    least_waiting=1,
    holds_seats=0,
    queue_s=0.01,
    first_token_s=0.1,
    token_gap_s=0.02,
    steps=500,
    decode_step_s=0.02,
    mixed_step_s=0.03,
    mixed_share=0.3,
    gap_share=0.02,
    mask_share=0,
    prompt_share=0.3,
    padding_share=0.1,
    recomputed_share=0,
    output_tok_s=900,
    prompt_tok_s=400,
    prompt_tokens=100,
    cached_share=0.5,
    seat_share=20 / 32,
    page_share=0.4,
    cached_page_share=0.2,
    preempted=0,
    late_compiles=0,
    kernels_out=0,
    bandwidth=0.3,
    operations=0.1,
)
#: The rule that each change of it must raise.
CASES: dict[tuple[str, str], dict[str, float]] = {
    **{(complaint, "no engine"): {"up": 0} for complaint in COMPLAINTS},
    ("latency", "compiled while serving"): {"late_compiles": 1},
    ("latency", "kernels taken out"): {"kernels_out": 1},
    ("latency", "pages run out"): {"preempted": 4, "page_share": 0.97},
    ("latency", "wait for a seat"): {"queue_s": 2.0, "first_token_s": 2.1, "seat_share": 1.0},
    ("latency", "batch policy"): {"queue_s": 2.0, "first_token_s": 2.1, "holds_seats": 1},
    ("latency", "wait for pages"): {"queue_s": 2.0, "first_token_s": 2.1, "page_share": 0.95},
    ("latency", "long prompts"): {"prompt_share": 0.9, "cached_share": 0.0},
    ("latency", "many prompt rows"): {"prompt_share": 0.9},
    ("latency", "prompts beside streams"): {"mixed_step_s": 0.2, "mixed_share": 0.8},
    ("latency", "the host"): {"gap_share": 0.3},
    ("latency", "grammars"): {"mask_share": 0.4},
    ("latency", "padding"): {"padding_share": 0.7},
    ("latency", "the memory's bandwidth"): {"bandwidth": 0.8},
    ("latency", "the device's arithmetic"): {"operations": 0.8},
    ("throughput", "few requests"): {"seat_share": 0.1, "least_waiting": 0},
    ("throughput", "recomputed rows"): {"recomputed_share": 0.2},
    ("throughput", "padding"): {"padding_share": 0.7},
    ("throughput", "the host"): {"gap_share": 0.3},
    ("throughput", "prompts"): {"prompt_share": 0.95, "cached_share": 0.0},
    ("throughput", "too few seats"): {"seat_share": 1.0},
    ("throughput", "the memory's bandwidth"): {"bandwidth": 0.8},
    ("throughput", "the device's arithmetic"): {"operations": 0.8},
    ("batches", "no requests"): {"steps": 0},
    ("batches", "full batches"): {"seat_share": 1.0},
    ("batches", "empty queue"): {"least_waiting": 0},
    ("batches", "batch policy"): {"holds_seats": 1},
    ("batches", "no pages"): {"page_share": 0.95},
    ("batches", "prompts take the rows"): {"prompt_share": 0.9},
    ("memory", "preemption"): {"preempted": 4},
    ("memory", "few free pages"): {"page_share": 0.95},
    ("memory", "enough memory"): {},
}


def name_of(figures: Figures, complaint: Any) -> str | None:
    finding = diagnose(figures)[complaint]
    return finding and finding.name


def test_an_engine_with_nothing_wrong_is_accused_of_nothing():
    found = {complaint: name_of(Figures(**WELL), complaint) for complaint in COMPLAINTS}
    assert found == {
        "latency": None,
        "throughput": None,
        "batches": None,
        "memory": "enough memory",
    }


@pytest.mark.parametrize("case", CASES, ids=": ".join)
def test_a_cause_is_found_by_its_own_figures(case: tuple[str, str]):
    complaint, name = case
    assert name_of(Figures(**WELL | CASES[case]), complaint) == name


def test_every_rule_has_a_case():
    assert list(CASES) == [(rule.complaint, rule.name) for rule in RULES]


def test_nothing_is_said_where_nothing_is_known():
    assert not any(diagnose(Figures(seconds=10.0)).values())


class Looked:
    """Figures that note which of them are looked at."""

    def __init__(self, figures: dict[str, float]):
        self._figures = figures
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> float:
        self.names.add(name)
        return self._figures[name]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.complaint}: {rule.name}")
def test_a_cause_is_not_claimed_unless_all_figures_that_show_it_are_known(rule: diagnosis.Rule):
    figures = WELL | CASES[rule.complaint, rule.name]
    looked = Looked(figures)
    assert rule.shows(looked) and looked.names  # type: ignore[arg-type]
    for name in looked.names:
        assert not rule.shows(Figures(**figures | {name: math.nan})), name


def test_a_figure_that_only_a_sentence_wants_may_be_unknown():
    figures = replace(Figures(**WELL), prompt_share=0.9, prompt_tokens=math.nan)
    finding = diagnose(figures)["latency"]
    assert finding is not None and "nan" not in finding.seen and "an unknown number" in finding.seen


def record(**fields: float) -> np.void:
    made = np.zeros(1, STEP_DTYPE)
    for name, value in fields.items():
        made[name] = value
    return made[0]


def test_figures_are_differences_of_what_a_server_tells():
    client = FakeClient(Script("abc"), seats=4, pages=10)
    app = make_app(client)
    metrics, counters = app.state.service.metrics, client.counters

    def scrape() -> Scrape:
        return Scrape(metrics.render().decode())

    step = dict(bucket_tokens=8, seats=4)
    counters.observe_step(record(**step, mixed=1, prefill=8, device_s=9.0, gap_s=1.0, seats_busy=1))
    metrics.ttft.observe(99.0)
    before = scrape()
    counters.observe_step(
        record(**step, mixed=1, prefill=5, decode=2, recomputed=1, device_s=0.3, seats_busy=2)
    )
    counters.observe_step(
        record(**step, decode=3, padding=5, device_s=0.08, gap_s=0.02, seats_busy=4, preempted=2)
    )
    counters.waiting = 6
    for seconds in (0.5, 1.5):
        metrics.ttft.observe(seconds)
        metrics.queue.observe(seconds / 2)
    metrics.prompt_tokens.inc(40)
    metrics.cached_tokens.inc(10)
    figures = Figures.of([before, scrape()], 2.0, "static")
    assert figures.first_token_s == pytest.approx(1.0) and figures.queue_s == pytest.approx(0.5)
    assert (figures.seats, figures.running, figures.seat_share) == (4, 2.5, 2.5 / 4)
    assert (figures.waiting, figures.least_waiting, figures.preempted) == (3, 0, 2)
    assert (figures.output_tok_s, figures.prompt_tok_s) == (2.5, 2.5)
    assert figures.prompt_share == 0.5 and figures.recomputed_share == 1 / 16
    assert figures.padding_share == 5 / 16 and figures.cached_share == 0.25
    assert figures.mixed_step_s == pytest.approx(0.3)
    assert figures.decode_step_s == pytest.approx(0.1)
    assert figures.gap_share == pytest.approx(0.02 / 0.4)
    assert figures.mixed_share == pytest.approx(0.3 / 0.4)
    assert figures.steps == 2 and figures.holds_seats == 1 and figures.up == 1
    assert math.isnan(figures.bandwidth) and math.isnan(figures.token_gap_s)


def test_a_server_that_was_started_again_tells_nothing_by_differences():
    client = FakeClient(Script("abc"))
    client.counters.observe_step(record(bucket_tokens=8, decode=8, device_s=1.0))
    old = Scrape(make_app(client).state.service.metrics.render().decode())
    new = Scrape(make_app(FakeClient(Script("abc"))).state.service.metrics.render().decode())
    figures = Figures.of([old, new], 2.0)
    assert math.isnan(figures.steps) and not diagnose(figures)["batches"]


def test_every_metric_that_is_read_exists():
    source = Path(diagnosis.__file__).read_text()
    read = set(re.findall(r"\.(?:gauge|grown|mean|newest|values|value)\(\s*\"(\w+)\"", source))
    known = metric_names()
    assert len(read) > 15
    for name in read:
        assert known & {f"jitney_{name}", f"jitney_{name}_sum"}, name


def test_the_page_of_docs_has_the_same_causes_in_the_same_order():
    text = (ROOT / "docs" / "diagnose.md").read_text()
    sections = re.split(r"^## ", text, flags=re.MULTILINE)
    for complaint, title in COMPLAINTS.items():
        (section,) = [one for one in sections if one.lower().startswith(title)]
        named = re.findall(r"^\| ([^|]+?) \|", section, re.MULTILINE)[1:]
        assert [name for name in named if set(name) != {"-"}] == [
            rule.name for rule in RULES if rule.complaint == complaint
        ]


def test_the_figures_of_a_rule_are_figures():
    for rule in RULES:
        assert set(re.findall(r"\{(\w+)", rule.seen)) <= asdict(Figures(**WELL)).keys()
