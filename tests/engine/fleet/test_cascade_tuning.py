"""Tuning a cascade: what the table says, and that a cascade then does it."""

from __future__ import annotations

import asyncio
import json
import math
import random
from pathlib import Path

import pytest
from scripted_models import Said, ScriptedModel, ScriptedModels

from jitney.engine.common.errors import ConfigError
from jitney.engine.fleet.cascade_command import _MEASURES
from jitney.engine.fleet.compositions.answering import ModelAnswer
from jitney.engine.fleet.compositions.cascade import Cascade, CascadeSettings, Measure
from jitney.engine.fleet.compositions.cascade_tuning import (
    ModelComparison,
    Pair,
    Thresholds,
    TokenPrices,
    _likeness,
    _Spent,
    read_requests,
)
from jitney.engine.fleet.request import ProxiedRequest

MEAN = Measure("mean")


def pair(p: float, agrees: float, small: int = 10, large: int = 100) -> Pair:
    return Pair([[math.log(p)]], _Spent(tokens=small), _Spent(tokens=large), agrees)


PAIRS = [pair(0.9, 1), pair(0.8, 1), pair(0.6, 0), pair(0.4, 1), pair(0.2, 0)]


def test_every_threshold_that_makes_a_difference_is_in_the_table():
    whole = Thresholds.of(PAIRS, MEAN, "tokens")
    values = [each.threshold for each in whole.thresholds]
    assert values == pytest.approx([0, 0.3, 0.5, 0.7, 0.85, 0.95])
    assert [each.kept for each in whole.thresholds] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0])
    assert [each.agreement for each in whole.thresholds] == pytest.approx([0.6, 0.8, 0.8, 1, 1, 1])
    assert [each.spent.tokens for each in whole.thresholds] == [50, 150, 250, 350, 450, 550]
    assert whole.thresholds[3].cost_share == pytest.approx(0.7)
    assert all(each.low <= each.agreement <= each.high for each in whole.thresholds)


def test_the_cheapest_that_agrees_often_enough():
    whole = Thresholds.of(PAIRS, MEAN, "tokens")
    cases = {0.5: 0.0, 0.8: 0.3, 0.81: 0.7, 1.0: 0.7}
    for wanted, threshold in cases.items():
        found = whole.cheapest(wanted)
        assert found is not None
        assert found.threshold == pytest.approx(threshold)


def test_the_measure_that_costs_least_is_taken():
    # A least window of one sees the unsure token that a mean over many hides.
    long = [math.log(0.99)] * 30
    pairs = [
        Pair([[*long, math.log(0.1)]], _Spent(1), _Spent(10), 0.0),
        Pair([[math.log(0.9)] * 5], _Spent(1), _Spent(10), 1.0),
    ]
    tried = [Thresholds.of(pairs, measure, "tokens") for measure in _MEASURES]
    best = min(tried, key=lambda each: each.cost_share(1.0))
    assert best.measure == Measure("least", 1)
    found = best.cheapest(1.0)
    assert found is not None and found.kept == 0.5


def noisy(seed: int) -> ScriptedModels:
    """A small model that is the likelier wrong the less sure it is."""
    draw = random.Random(seed)
    said: dict[str, Said] = {}

    def small(request: ProxiedRequest) -> Said:
        text = request.fields["messages"][0]["content"]
        if text not in said:
            p = draw.random() * 0.98 + 0.01
            words = "right" if draw.random() < p else "wrong"
            said[text] = Said(words, [math.log(p)] * 3)
        return said[text]

    large = ScriptedModel(lambda request: Said("right", [-0.1]))
    return ScriptedModels(tiny=ScriptedModel(small), big=large)


async def test_the_threshold_does_what_the_table_says():
    models = noisy(1)
    requests = [
        ProxiedRequest.post(
            "", "/v1/chat/completions", {"messages": [{"role": "user", "content": str(n)}]}
        )
        for n in range(200)
    ]

    found: list = []
    comparison = ModelComparison(models, "tiny", "big", "equal", TokenPrices())
    pairs, refusals = await comparison.run(requests, 4, lambda done: None)
    assert len(pairs) == 200 and not refusals
    found.append(Thresholds.of(pairs, MEAN, "tokens").cheapest(0.9))
    settings = CascadeSettings(
        kind="cascade",
        small="tiny",
        large="big",
        threshold=round(found[0].threshold, 6),
        measure="mean",
    )
    cascade = Cascade(settings, models)
    answers = [await cascade.answer(request) for request in requests]
    chosen = found[0]
    assert 0.2 < chosen.kept < 0.9
    kept = sum(answer.body["model"] == "tiny" for answer in answers) / 200
    agreed = sum(answer.normalised[0] == "right" for answer in answers) / 200
    tokens = sum(answer.usage["total_tokens"] for answer in answers)
    assert kept == pytest.approx(chosen.kept)
    assert agreed == pytest.approx(chosen.agreement)
    assert tokens == chosen.spent.tokens


def test_prices_and_refusals_are_told():
    def small(request: ProxiedRequest) -> Said | Exception:
        from jitney.engine.common.errors import RequestError

        if "bad" in str(request.fields):
            return RequestError("no")
        return Said("yes", [-0.5] * 10)

    models = ScriptedModels(
        tiny=ScriptedModel(small), big=ScriptedModel(lambda request: Said("Yes!", [-0.1] * 10))
    )
    requests = [
        ProxiedRequest.post("", "/v1/completions", {"prompt": text}) for text in ("a", "bad", "b")
    ]
    comparison = ModelComparison(models, "tiny", "big", "equal", TokenPrices(1.0, 10.0))
    pairs, refusals = asyncio.run(comparison.run(requests, 1, lambda done: None))
    assert refusals == ["no"]
    assert [pair.agreement for pair in pairs] == [1.0, 1.0]
    assert pairs[0].small.price == pytest.approx(20e-6)
    assert pairs[0].large.price == pytest.approx(200e-6)
    found = Thresholds.of(pairs, MEAN, "price").thresholds[0]
    assert found.cost_share == pytest.approx(0.1)


def test_answers_are_the_same_but_for_what_does_not_matter():
    def said(text: str) -> dict:
        return {"message": {"content": text}}

    def call(arguments: str) -> dict:
        function = {"name": "f", "arguments": arguments}
        return {"message": {"content": None, "tool_calls": [{"function": function}]}}

    def normalised(choice: dict) -> str:
        (text,) = ModelAnswer({"choices": [choice]}).normalised
        return text

    assert normalised(said("  The Answer\n is: 4. ")) == normalised({"text": "the answer is: 4"})
    assert normalised(said("4")) != normalised(said("5"))
    assert normalised(call('{"a": 1, "b": 2}')) == normalised(call('{"b":2,"a":1}'))
    assert normalised(call('{"a": 1}')) != normalised(call('{"a": 2}'))
    assert _likeness("a b c d", "a b x") == pytest.approx(4 / 7)
    assert _likeness("", "a") == 0.0


def test_requests_are_read_from_bodies_and_from_batches(tmp_path: Path):
    file = tmp_path / "requests.jsonl"
    chat = {"messages": [{"role": "user", "content": "a"}], "temperature": 1}
    lines = [{"prompt": "a", "stream": True}, {"custom_id": "1", "body": chat}]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    first, second = read_requests(file, {"temperature": 0.0, "max_tokens": 5})
    assert first.route == "/v1/completions"
    assert first.fields == {"prompt": "a", "temperature": 0.0, "max_tokens": 5}
    assert second.is_chat and second.fields["temperature"] == 1


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("{", "1: not JSON"),
        ("[]", "1: must be an object with either messages or prompt"),
        ('{"prompt": "a", "messages": []}', "1: must be an object"),
        ('{"messages": []}', "1: messages"),
        ('{"prompt": [1, 2]}', "1: prompt is not supported"),
        ('{"prompt": "a", "echo": true}', "1: echo is not supported"),
        ("", "no requests in it"),
    ],
)
def test_a_line_that_cannot_be_asked_is_named(tmp_path: Path, line: str, complaint: str):
    file = tmp_path / "requests.jsonl"
    file.write_text(line)
    with pytest.raises(ConfigError, match=complaint):
        read_requests(file, {})
