"""Cascades: who answers, what is told of it, and what cannot be asked."""

from __future__ import annotations

import asyncio
import math

import pytest
from pydantic import ValidationError
from scripted_models import (
    ScriptedModels,
    always,
    chat,
    chunks,
    completion,
    fails,
    said_in,
)

from jitney.engine.common.errors import RequestError
from jitney.engine.fleet.compositions.cascade import Cascade, CascadeSettings, Measure
from jitney.engine.server.http.errors import HttpError

SURE, UNSURE = math.log(0.9), math.log(0.2)


def cascade(models: ScriptedModels, **fields) -> Cascade:
    settings = {"kind": "cascade", "small": "tiny", "large": "big", "threshold": 0.5} | fields
    return Cascade(CascadeSettings.model_validate(settings), models)


def run(coroutine):
    return asyncio.run(coroutine)


def test_confidence_is_the_mean_or_the_least_window():
    values = [math.log(p) for p in (0.9, 0.9, 0.1, 0.1, 0.9)]
    assert Measure("mean").of(values) == pytest.approx((0.9**3 * 0.1**2) ** 0.2)
    assert Measure("least", 2).of(values) == pytest.approx(0.1)
    assert Measure("least", 1).of(values) == pytest.approx(0.1)
    assert Measure("least", 99).of(values) == pytest.approx(Measure("mean").of(values))
    assert Measure("mean").of([]) == 0.0


@pytest.mark.parametrize("ask", [chat, completion])
def test_a_sure_small_answer_is_sent(ask):
    models = ScriptedModels(tiny=always("small", SURE, SURE), big=always("large"))
    answer = run(cascade(models).answer(ask("c")))
    assert answer.body["model"] == "tiny"
    assert answer.headers["x-jitney-stage"] == "small"
    assert answer.body["jitney"]["confidence"] == pytest.approx(0.9)
    assert answer.body["choices"][0]["logprobs"] is None
    assert not models.models["big"].asked
    assert [entry["stage"] for entry in answer.usage["stages"]] == ["small"]


@pytest.mark.parametrize("ask", [chat, completion])
def test_an_unsure_one_is_answered_by_the_large_model(ask):
    models = ScriptedModels(tiny=always("small", SURE, UNSURE, UNSURE), big=always("large", -1.0))
    answer = run(cascade(models).answer(ask("c")))
    assert answer.body["model"] == "big"
    assert answer.headers["x-jitney-stage"] == "large"
    usage = answer.usage
    assert usage["completion_tokens"] == 4
    assert usage["prompt_tokens"] == 20
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert [(entry["stage"], entry["model"]) for entry in usage["stages"]] == [
        ("small", "tiny"),
        ("large", "big"),
    ]
    assert "logprobs" not in models.models["big"].asked[0].fields


def test_the_least_window_sees_what_the_mean_does_not():
    models = ScriptedModels(tiny=always("small", *[SURE] * 20, UNSURE, UNSURE), big=always("large"))
    mean = cascade(models, measure="mean")
    assert run(mean.answer(chat("c"))).body["model"] == "tiny"
    least = cascade(models, measure="least", window=2)
    assert run(least.answer(chat("c"))).body["model"] == "big"


def test_log_probabilities_that_the_client_wants_stay():
    models = ScriptedModels(tiny=always("small", SURE), big=always("large"))
    answer = run(cascade(models).answer(chat("c", logprobs=True, top_logprobs=2)))
    assert answer.choices[0]["logprobs"]["content"][0]["logprob"] == SURE
    assert models.models["tiny"].asked[0].fields["top_logprobs"] == 2
    answer = run(cascade(models).answer(completion("c", logprobs=3)))
    assert answer.choices[0]["logprobs"]["token_logprobs"] == [SURE]
    assert models.models["tiny"].asked[1].fields["logprobs"] == 3


@pytest.mark.parametrize("ask", [chat, completion])
@pytest.mark.parametrize("logprob, text", [(SURE, "small"), (UNSURE, "large")])
def test_a_stream_says_who_answers_and_what_both_took(ask, logprob: float, text: str):
    models = ScriptedModels(tiny=always("small", logprob), big=always("large"))
    question = ask("c", stream=True, stream_options={"include_usage": True})
    headers, came = run(chunks(cascade(models), question))
    assert said_in(came) == text
    assert headers["x-jitney-stage"] == text
    assert came[0]["jitney"]["stage"] == text
    assert came[-1]["choices"] == []
    assert len(came[-1]["usage"]["stages"]) == (1 if text == "small" else 2)
    assert {chunk["model"] for chunk in came} == {"tiny" if text == "small" else "big"}
    # The small model is always asked for a whole answer: nothing of it may be sent too early.
    assert not models.models["tiny"].asked[0].streams


def test_a_small_model_that_fails_is_left_out_and_said():
    broken = fails(HttpError(503, "it is gone", code="engine_dead"))
    models = ScriptedModels(tiny=broken, big=always("large"))
    answer = run(cascade(models).answer(chat("c")))
    assert answer.body["model"] == "big"
    assert answer.body["jitney"]["left_out"] == [{"stage": "small", "reason": "it is gone"}]
    assert [entry["stage"] for entry in answer.usage["stages"]] == ["large"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_large_model_that_fails_is_named(stream: bool):
    full = RequestError("too many wait", code="queue_full", retry_after=3.0)
    models = ScriptedModels(tiny=always("small", UNSURE), big=fails(full))
    with pytest.raises(HttpError, match="stage large: too many wait") as raised:
        if stream:
            run(chunks(cascade(models), chat("c", stream=True)))
        else:
            run(cascade(models).answer(chat("c")))
    assert raised.value.status == 429
    assert raised.value.code == "queue_full"
    assert raised.value.headers["retry-after"] == "3"


def test_a_field_that_the_large_model_refuses_is_the_clients():
    refusal = RequestError("temperature must be at most 2", param="temperature")
    models = ScriptedModels(tiny=fails(refusal), big=fails(refusal))
    with pytest.raises(HttpError, match="stage large: temperature") as raised:
        run(cascade(models).answer(chat("c", temperature=9)))
    assert (raised.value.status, raised.value.param) == (400, "temperature")


@pytest.mark.parametrize(
    "question, field",
    [
        (lambda: completion("c", echo=True), "echo"),
        (lambda: completion("c", [1, 2, 3]), "prompt"),
        (lambda: chat("c", logit_bias={"5": 1.0}), "logit_bias"),
        (lambda: chat("c", stop_token_ids=[5]), "stop_token_ids"),
        (lambda: chat("c", n=0), "n"),
    ],
)
def test_what_a_cascade_cannot_do_is_refused_by_name(question, field: str):
    models = ScriptedModels(tiny=always("small"), big=always("large"))
    with pytest.raises(RequestError) as raised:
        run(cascade(models).answer(question()))
    assert raised.value.info.param == field
    assert not models.models["tiny"].asked


def test_the_time_of_a_request_is_one_for_both():
    tiny = always("small", UNSURE)
    tiny.delay_s = 0.05
    models = ScriptedModels(tiny=tiny, big=always("large"))
    answer = run(cascade(models).answer(chat("c", timeout_ms=60_000)))
    assert answer.body["model"] == "big"
    large = models.models["big"].asked[0].outgoing().fields
    assert large["timeout_ms"] <= 59_950
    with pytest.raises(HttpError, match="time ran out") as raised:
        run(cascade(models).answer(chat("c", timeout_ms=20)))
    assert raised.value.status == 504


@pytest.mark.parametrize("fields", [{"threshold": 1.5}, {"measure": "max"}, {"window": 0}])
def test_settings_are_checked(fields: dict):
    with pytest.raises(ValidationError):
        cascade(ScriptedModels(), **fields)
