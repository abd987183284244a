"""Ensembles: whose answer is sent, who is left out, and what cannot be asked."""

from __future__ import annotations

import asyncio
import time

import pytest
from pydantic import ValidationError
from scripted_models import (
    Said,
    ScriptedModel,
    ScriptedModels,
    always,
    chat,
    chunks,
    completion,
    fails,
    in_background,
    said_in,
)

from jitney.engine.common.errors import RequestError
from jitney.engine.fleet.compositions.ensemble import Ensemble, EnsembleSettings
from jitney.engine.server.http.errors import HttpError


def ensemble(scripts: ScriptedModels, **fields) -> Ensemble:
    settings = {"kind": "ensemble", "models": list(scripts.models)} | fields
    return Ensemble(EnsembleSettings.model_validate(settings), scripts)


def run(coroutine):
    return asyncio.run(coroutine)


@pytest.mark.parametrize("ask", [chat, completion])
def test_the_majority_of_normalised_answers_wins(ask):
    models = ScriptedModels(a=always("No"), b=always(" Yes. "), c=always("yes"))
    answer = run(ensemble(models).answer(ask("e")))
    assert answer.body["model"] == "b"  # the first to say what most say
    assert answer.headers["x-jitney-stage"] == "b"
    told = answer.body["jitney"]
    assert (told["stage"], told["votes"], told["of"]) == ("b", 2, 3)
    assert answer.usage["completion_tokens"] == 3
    assert [entry["stage"] for entry in answer.usage["stages"]] == ["a", "b", "c"]


def test_the_highest_mean_log_probability_wins():
    models = ScriptedModels(a=always("1", -0.5, -0.5, -0.5), b=always("2", -0.2, -0.6))
    answer = run(ensemble(models, choose="score").answer(chat("e")))
    assert answer.body["model"] == "b"
    assert answer.body["jitney"]["score"] == pytest.approx(-0.4)
    assert answer.choices[0]["logprobs"] is None


def test_one_model_several_times_has_other_seeds():
    model = ScriptedModel(lambda question: Said(str(question.fields.get("seed"))))
    models = ScriptedModels(m=model)
    answer = run(ensemble(models, repeats=3).answer(chat("e", seed=2**63 - 1)))
    assert [question.fields["seed"] for question in model.asked] == [2**63 - 1, 0, 1]
    assert [entry["stage"] for entry in answer.usage["stages"]] == ["m", "m.2", "m.3"]
    run(ensemble(models, repeats=2).answer(chat("e")))
    assert "seed" not in model.asked[-1].fields  # the engine draws one for each


def test_all_are_asked_at_once():
    models = ScriptedModels(a=always("1"), b=always("2"), c=always("3"))
    gate = asyncio.Barrier(3)

    async def together(question):
        await gate.wait()
        return await plain(question)

    plain = models.answer
    models.answer = together  # type: ignore[method-assign]
    answer = run(asyncio.wait_for(ensemble(models).answer(chat("e")), 30))
    assert [entry["stage"] for entry in answer.usage["stages"]] == ["a", "b", "c"]


def test_one_that_fails_is_left_out_and_said():
    gone = fails(HttpError(503, "no engine", code="engine_dead"))
    models = ScriptedModels(a=gone, b=always("2"), c=always("2"))
    answer = run(ensemble(models).answer(chat("e")))
    assert answer.body["model"] == "b"
    (left_out,) = answer.body["jitney"]["left_out"]
    assert left_out == {"stage": "a", "reason": "stage a: no engine"}


def test_one_that_is_late_is_left_out_and_said():
    late = always("1")
    late.delay_s = 3600
    models = ScriptedModels(a=late, b=always("2"))
    began = time.monotonic()
    answer = run(ensemble(models, wait_s=0.2).answer(chat("e")))
    assert time.monotonic() - began < 60
    assert answer.body["model"] == "b"
    assert "within 0.2 s" in answer.body["jitney"]["left_out"][0]["reason"]


def test_nobody_is_late_for_a_line_of_a_batch():
    late = always("1")
    late.delay_s = 0.2
    models = ScriptedModels(a=late, b=always("2"))
    answer = run(ensemble(models, wait_s=0.01).answer(in_background(chat("e"))))
    assert "left_out" not in answer.body["jitney"]


def test_where_all_fail_the_first_one_is_named():
    models = ScriptedModels(
        a=fails(HttpError(503, "gone", code="engine_dead")), b=fails(HttpError(400, "bad"))
    )
    with pytest.raises(HttpError, match="stage a: gone") as raised:
        run(ensemble(models).answer(chat("e")))
    assert raised.value.status == 503


def test_a_stream_is_the_chosen_answer():
    models = ScriptedModels(a=always("1"), b=always("2"), c=always("2"))
    question = chat("e", stream=True, stream_options={"include_usage": True})
    headers, came = run(chunks(ensemble(models), question))
    assert said_in(came) == "2"
    assert headers["x-jitney-stage"] == "b"
    assert came[-1]["usage"]["completion_tokens"] == 3


class ScoringModels(ScriptedModels):
    """One of them, "judge", echoes prompts with log-probabilities, a token a character."""

    def __init__(self, scores: dict[str, float], **models: ScriptedModel):
        super().__init__(judge=always("x"), **models)
        self.scores = scores

    async def answer(self, question):
        answer = await super().answer(question)
        if question.model != "judge":
            return answer
        if question.is_chat:
            text = "".join(message["content"] for message in question.fields["messages"])
            answer.usage["prompt_tokens"] = len(text)
            answer.body["prompt_logprobs"] = [
                None,
                *({str(ord(c)): {"logprob": self._score(text, c)}} for c in text[1:]),
            ]
            return answer
        text = question.fields["prompt"]
        answer.choices[0] |= {
            "text": text + "!",
            "logprobs": {
                "text_offset": list(range(len(text) + 1)),
                "token_logprobs": [None, *(self._score(text, c) for c in text[1:]), -9.0],
            },
        }
        return answer

    def _score(self, text: str, letter: str) -> float:
        return self.scores.get(letter, -5.0)


@pytest.mark.parametrize("ask", [chat, completion])
def test_another_model_may_score_the_answers(ask):
    models = ScoringModels({"a": -3.0, "b": -0.5}, m=always("aaaa"), n=always("bb"))
    judged = ensemble(models, models=["m", "n"], choose="score", scorer="judge")
    answer = run(judged.answer(ask("e", "hello")))
    assert answer.body["model"] == "n"
    assert answer.body["jitney"]["score"] == pytest.approx(-0.5)
    assert "scorer" in {entry["stage"] for entry in answer.usage["stages"]}


@pytest.mark.parametrize(
    "question, field",
    [
        (lambda: chat("e", n=2), "n"),
        (lambda: completion("e", best_of=2), "best_of"),
        (lambda: completion("e", ["a", "b"]), "prompt"),
        (lambda: completion("e", [1, 2]), "prompt"),
        (lambda: completion("e", echo=True), "echo"),
        (lambda: chat("e", allowed_token_ids=[1]), "allowed_token_ids"),
    ],
)
def test_what_an_ensemble_cannot_do_is_refused_by_name(question, field: str):
    models = ScriptedModels(a=always("1"), b=always("2"))
    with pytest.raises(RequestError) as raised:
        run(ensemble(models).answer(question()))
    assert raised.value.info.param == field


def test_its_seats_are_shared_by_its_members():
    models = ScriptedModels(a=always("1"), b=always("2"))
    models.models["a"].seats = 9
    assert run(ensemble(models, repeats=2).seats()) == 4
    models.models["b"].seats = 2
    assert run(ensemble(models, repeats=2).seats()) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"models": ["a"]},
        {"models": ["a", "a"]},
        {"models": []},
        {"scorer": "a"},
        {"repeats": 33},
        {"wait_s": 0},
    ],
)
def test_settings_are_checked(fields: dict):
    with pytest.raises(ValidationError):
        ensemble(ScriptedModels(a=always("1"), b=always("2")), **fields)
