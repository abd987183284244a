"""The alert rules name metrics and labels that exist. That they fire is shown by promtool, where
there is one: `promtool test rules configs/deploy/prometheus/rules_test.yml`.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from api_fakes import FakeClient, Script, make_app
from fleet_metrics_fakes import fleet_metrics
from metric_names import metric_names, named_in
from places import DEPLOY

from jitney.engine.common.engine_info import KernelProof
from jitney.engine.server.process.counters import EngineCounters

FOLDER = DEPLOY / "prometheus"


@functools.cache
def rules() -> list[dict[str, Any]]:
    """Read in a second or two: not while tests are collected."""
    return yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"][0]["rules"]


@functools.cache
def cases() -> list[dict[str, Any]]:
    return yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]


def test_every_metric_of_a_rule_exists():
    named = named_in(" ".join(rule["expr"] for rule in rules()))
    assert len(named) >= 15 and not named - metric_names()


def test_every_rule_says_what_is_wrong_where_and_what_to_do():
    assert len({rule["alert"] for rule in rules()}) == len(rules()) >= 10
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
        assert rule["annotations"]["description"].endswith(".")


def test_every_rule_has_a_case_in_which_it_fires():
    fires = {
        check["alertname"]
        for case in cases()
        for check in case["alert_rule_test"]
        if check["exp_alerts"]
    }
    assert fires == {rule["alert"] for rule in rules()}
    series = " ".join(entry["series"] for case in cases() for entry in case["input_series"])
    assert not named_in(series) - metric_names()


def test_labels_that_the_rules_choose_by_exist():
    """A rule over a label's value that no series has is silent for ever."""
    counters = EngineCounters()
    known = {
        "kind": set(counters.rows),
        "when": {"start", "late"},
        "state": {"sleeping", "gone", "rolled_back"},
        "outcome": {"died"},
        "choice": {"moved"},
        "reason": {"queue_full", "deadline_unreachable", "engine_dead"},
        "job": {"jitney"},
    }
    proof = KernelProof(kernel="k", error=1.0, limit=0.0)
    app = make_app(FakeClient(Script("abc"), proofs=[proof]))
    text = app.state.service.metrics.render().decode()
    assert 'jitney_engine_state{state="sleeping"}' in text
    assert 'jitney_compiles_total{when="late"}' in text
    assert 'jitney_kernel_out{kernel="k"} 1.0' in text
    text = fleet_metrics().render().decode()
    assert 'jitney_fleet_replicas{model="m",state="gone"} 1.0' in text
    assert 'jitney_fleet_rollout_state{candidate="c",model="m",state="rolled_back"} 0.0' in text
    for rule in rules():
        for label, values in re.findall(r'(\w+)=~?"([^"]+)"', rule["expr"]):
            assert set(values.split("|")) <= known[label], rule["alert"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("words", [("check", "rules.yml"), ("test", "rules_test.yml")])
def test_promtool_agrees(words: tuple[str, str]):
    how, file = words
    done = subprocess.run(
        ["promtool", how, "rules", file],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
