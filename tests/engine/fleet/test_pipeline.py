"""Pipelines: what each stage is asked, who is named in an error, and how many are on their way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError
from scripted_models import (
    Said,
    ScriptedModel,
    ScriptedModels,
    always,
    ask_pipeline,
    chat,
    completion,
    fails,
    in_background,
    pipeline_settings,
    said_in,
)

from jitney.engine.common.errors import RequestError
from jitney.engine.fleet.compositions.pipeline import Pipeline
from jitney.engine.server.http.errors import HttpError

DRAFT = {
    "kind": "generate",
    "name": "draft",
    "model": "tiny",
    "prompt": "Notes on {{ question }}",
    "fields": {"max_tokens": 7},
}
FINAL = {
    "kind": "generate",
    "name": "final",
    "model": "big",
    "system": "Use: {{ draft.text }}",
    "prompt": "{{ question }}",
    "fields": {"max_tokens": 9, "temperature": 0},
}


def ask(models: ScriptedModels, question, *stages: dict) -> Any:
    [answer] = ask_pipeline(models, [question], *(stages or (DRAFT, FINAL)))
    return answer


def models_of(**models: ScriptedModel) -> ScriptedModels:
    given = {"tiny": always("a note"), "big": always("the answer", -0.1, -0.2)}
    return ScriptedModels(**(given | models))


def test_what_one_stage_makes_stands_in_the_next_prompt():
    models = models_of()
    answer = ask(models, chat("p", "cats", max_tokens=5))
    first, last = models.models["tiny"].asked[0], models.models["big"].asked[0]
    assert first.fields["messages"] == [{"role": "user", "content": "Notes on cats"}]
    assert first.fields["max_tokens"] == 7
    assert last.fields["messages"] == [
        {"role": "system", "content": "Use: a note"},
        {"role": "user", "content": "cats"},
    ]
    assert last.fields["max_tokens"] == 5  # the client's
    assert last.fields["temperature"] == 0  # the stage's
    assert answer.body["model"] == "big"
    assert answer.choices[0]["message"]["content"] == "the answer"
    assert answer.headers["x-jitney-stage"] == "final"
    assert answer.body["jitney"] == {"kind": "pipeline", "stage": "final"}
    assert [entry["stage"] for entry in answer.usage["stages"]] == ["draft", "final"]
    assert answer.usage["completion_tokens"] == 3


def test_the_last_stage_answers_in_the_clients_form():
    models = models_of()
    answer = ask(models, completion("p", "cats"), DRAFT | {"route": "completions"}, FINAL)
    assert models.models["tiny"].asked[0].fields["prompt"] == "Notes on cats"
    assert models.models["big"].asked[0].fields["prompt"] == "Use: a note\n\ncats"
    assert answer.choices[0]["text"] == "the answer"


def test_the_last_stage_streams_through():
    models = models_of()
    question = chat("p", "cats", stream=True, stream_options={"include_usage": True})
    headers, came = ask(models, question)
    assert said_in(came) == "the answer"
    assert headers["x-jitney-stage"] == "final"
    assert came[0]["jitney"] == {"kind": "pipeline", "stage": "final"}
    assert [entry["stage"] for entry in came[-1]["usage"]["stages"]] == ["draft", "final"]
    assert not models.models["tiny"].asked[0].streams


class RankingModels(ScriptedModels):
    """Its model "judge" finds a text the likelier the more often a letter of it is an x."""

    async def answer(self, question):
        answer = await super().answer(question)
        if question.model == "judge":
            text = question.fields["prompt"]
            logprobs = [None, *(-0.1 if letter == "x" else -2.0 for letter in text[1:]), -9.0]
            answer.choices[0] |= {
                "text": text + "!",
                "logprobs": {
                    "text_offset": list(range(len(text) + 1)),
                    "token_logprobs": logprobs,
                },
            }
        return answer


RANK = {
    "kind": "rank",
    "name": "pick",
    "model": "judge",
    "prompt": "xxxx {{ question }}: ",
    "scored": "{{ candidate }}",
    "keep": 2,
}


def test_texts_are_ranked_by_how_likely_a_model_finds_them():
    models = RankingModels(tiny=always("?"), judge=always("x"), big=always("done"))
    rank = RANK | {"candidates": ["aaax", "xx", "xxb"]}
    final = FINAL | {"system": "", "prompt": "{{ pick.texts | join(',') }} {{ pick.text }}"}
    answer = ask(models, chat("p", "cats"), rank, final)
    assert models.models["big"].asked[0].fields["messages"][0]["content"] == "xx,xxb xx"
    assert len(models.models["judge"].asked) == 3
    stages = {entry["stage"]: entry for entry in answer.usage["stages"]}
    assert stages["pick"]["prompt_tokens"] == 30


async def test_a_text_that_cannot_be_ranked_ends_the_ranking_of_the_others():
    calls = iter(range(9))

    def says(question):
        return Said("x") if next(calls) else RequestError("no room", code="queue_full")

    class Slow(RankingModels):
        async def answer(self, request):
            if request.fields.get("prompt", "").endswith("slow"):
                self.models["judge"].open += 1
                try:
                    await asyncio.sleep(3600)
                finally:
                    self.models["judge"].open -= 1
            return await super().answer(request)

    models = Slow(judge=ScriptedModel(says, delay_s=0.01), big=always("done"))
    rank = RANK | {"candidates": ["slow", "xx", "slow"]}
    final = FINAL | {"system": "", "prompt": "{{ pick.text }}"}
    pipeline = Pipeline(pipeline_settings(rank, final), models)
    try:
        with pytest.raises(HttpError, match="stage pick: no room"):
            await pipeline.answer(chat("p"))
        assert models.models["judge"].open == 0
    finally:
        await pipeline.close()


def test_several_answers_of_a_stage_are_candidates():
    texts = iter(["xa", "xx", "a"])

    def says(question):
        return Said("".join(next(texts)))

    class Several(RankingModels):
        async def answer(self, question):
            answer = await super().answer(question)
            if question.model == "tiny":
                assert question.fields["n"] == 3
                for choice in answer.choices[1:]:
                    choice["message"]["content"] = next(texts)
            return answer

    models = Several(tiny=ScriptedModel(says), judge=always("x"), big=always("done"))
    rank = RANK | {"candidates_of": "draft", "keep": 1}
    final = FINAL | {"system": "", "prompt": "{{ pick.text }}"}
    ask(models, chat("p"), DRAFT | {"n": 3}, rank, final)
    assert models.models["big"].asked[0].fields["messages"][0]["content"] == "xx"


@pytest.mark.parametrize("broken, named", [("tiny", "draft"), ("big", "final")])
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_names_its_stage(broken: str, named: str, stream: bool):
    refusal = RequestError("prompt is too long", code="context_length_exceeded", param="messages")
    models = models_of(**{broken: fails(refusal)})
    with pytest.raises(HttpError, match=f"stage {named}: prompt is too long") as raised:
        ask(models, chat("p", stream=stream))
    assert (raised.value.status, raised.value.code) == (400, "context_length_exceeded")
    assert raised.value.param is None  # the messages are not the client's


def test_a_template_that_fails_or_never_ends_costs_its_own_request():
    endless = DRAFT | {
        "prompt": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    }
    with pytest.raises(HttpError, match="stage draft: its template took longer"):
        ask(models_of(), chat("p"), endless, FINAL)
    broken = DRAFT | {"prompt": "{{ 1 / (question | length - 4) }}"}
    with pytest.raises(HttpError, match="stage draft: its template failed: division"):
        ask(models_of(), chat("p", "cats"), broken, FINAL)
    reaching = DRAFT | {"prompt": "{{ question.__class__.__mro__ }}"}
    with pytest.raises(HttpError, match="stage draft: its template failed"):
        ask(models_of(), chat("p"), reaching, FINAL)


def test_what_a_client_sends_is_no_template():
    models = models_of()
    ask(models, chat("p", "{{ 7 * 7 }}"))
    sent = models.models["big"].asked[0].fields["messages"][-1]["content"]
    assert sent == "{{ 7 * 7 }}"


async def test_the_slowest_stages_seats_bound_the_requests_on_their_way():
    models = models_of()
    models.models["tiny"].seats = 50
    models.models["big"].seats = 2
    models.models["big"].delay_s = 0.02
    pipeline = Pipeline(pipeline_settings(DRAFT, FINAL), models)
    try:
        await asyncio.gather(*(pipeline.answer(chat("p")) for _ in range(20)))
    finally:
        await pipeline.close()
    assert pipeline._budget.open == 0
    models = models
    assert len(models.models["big"].asked) == 20
    # Two seats, and those that make their drafts in the meantime: far from all 20.
    assert models.models["big"].most_open <= 12


def test_lines_of_batches_keep_nobodys_place():
    """While they wait at an engine for all others, a pipeline has as many places as before."""

    async def scene() -> list[bool]:
        models = models_of()
        for model in models.models.values():
            model.seats = 1
        models.models["tiny"].delay_s = 3600
        pipeline = Pipeline(pipeline_settings(DRAFT, FINAL), models)
        line = asyncio.create_task(pipeline.answer(in_background(chat("p"))))
        while not models.models["tiny"].open:
            await asyncio.sleep(0)
        models.models["tiny"].delay_s = 0
        try:
            await pipeline.answer(chat("p"))
        finally:
            line.cancel()
            await pipeline.close()
        return [question.background for question in models.models["tiny"].asked]

    assert asyncio.run(asyncio.wait_for(scene(), 60)) == [True, False]


@pytest.mark.parametrize(
    "question, field",
    [
        (lambda: completion("p", "a", echo=True), "echo"),
        (lambda: completion("p", ["a", "b"]), "prompt"),
        (lambda: completion("p", [1, 2]), "prompt"),
        (lambda: completion("p", "a", suffix="b"), "suffix"),
        (lambda: chat("p", prompt_logprobs=0), "prompt_logprobs"),
        (lambda: chat("p", truncate_prompt_tokens=5), "truncate_prompt_tokens"),
        (lambda: chat("p", add_generation_prompt=False), "add_generation_prompt"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused_by_name(question, field: str):
    models = models_of()
    with pytest.raises(RequestError) as raised:
        ask(models, question())
    assert raised.value.info.param == field
    assert not models.models["tiny"].asked


@pytest.mark.parametrize(
    "stages, complaint",
    [
        ((DRAFT, DRAFT, FINAL), "two stages"),
        ((DRAFT | {"name": "question"}, FINAL), "are called question"),
        ((FINAL,), "system asks for 'draft'; it may ask for question, messages"),
        ((DRAFT | {"prompt": "{{ oops"}, FINAL), "prompt is no Jinja template"),
        ((RANK | {"candidates": ["a"]},), "the last stage must be of kind"),
        ((RANK, FINAL), "candidates or candidates_of"),
        ((RANK | {"candidates_of": "draft"}, FINAL), "must name an earlier stage"),
        ((DRAFT, FINAL | {"n": 2}), "n of the last stage is the client's"),
        ((DRAFT, FINAL | {"fields": {"max_tokens": "9"}}), "fields: max_tokens"),
        ((DRAFT, FINAL | {"fields": {"max_tokns": 9}}), "no route has a field max_tokns"),
        ((DRAFT, FINAL | {"fields": {"stream": True}}), "stream is set by the stage"),
        ((DRAFT | {"kind": "sort"}, FINAL), "kind"),
    ],
)
def test_settings_are_checked(stages: tuple[dict, ...], complaint: str):
    with pytest.raises(ValidationError, match=complaint):
        pipeline_settings(*stages)
