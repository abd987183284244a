"""Pipelines whose reranker sorts documents: one request for all, its scores decide the order."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from api_fakes import FakeClient, Script
from fleet_engines import FakeEngine, engines, fleet_of
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scripted_models import (
    ScriptedModel,
    ScriptedModels,
    always,
    ask_pipeline,
    chat,
    in_background,
    messages_to,
    pipeline_settings,
)

from jitney.engine.common.errors import ConfigError, ErrorInfo, RequestError
from jitney.engine.fleet.compositions.answering import ModelAnswer
from jitney.engine.fleet.compositions.composed import ComposedModels
from jitney.engine.fleet.compositions.reranking import best_in
from jitney.engine.fleet.request import ProxiedRequest
from jitney.engine.server.chat.ranking.bodies import RerankBody
from jitney.engine.server.http.errors import HttpError

BEST = {"kind": "rerank", "name": "best", "model": "judge", "keep": 2}
FINAL = {
    "kind": "generate",
    "name": "final",
    "model": "big",
    "prompt": "{{ best.texts | join('|') }}",
}
TEXTS = ["dogs", "cat", "cats and cats", "trams"]


class RerankingModels(ScriptedModels):
    """Its model "judge" scores a document by how many letters a it has."""

    def __init__(self, **models: ScriptedModel):
        super().__init__(**({"judge": always(""), "big": always("done")} | models))
        #: What it was asked.
        self.bodies: list[dict[str, Any]] = []
        #: Of its answers.
        self.headers: dict[str, str] = {}

    async def answer(self, request: ProxiedRequest) -> ModelAnswer:
        answer = await super().answer(request)
        if request.model != "judge":
            return answer
        assert request.route == "/v1/rerank"
        self.bodies.append(request.outgoing().fields)
        body, unknown = RerankBody.parse(request.fields)
        assert not unknown
        results = [
            {"index": place, "relevance_score": text.count("a") / 10}
            for place, text in enumerate(body.documents)
        ]
        usage = {"prompt_tokens": 9, "total_tokens": 9}
        return ModelAnswer(
            {"id": "r", "model": "judge", "results": results, "usage": usage}, self.headers
        )


def asked(text: str = "why cats?", **fields: Any) -> ProxiedRequest:
    return chat("p", text, **fields)


def ask(models: ScriptedModels, request: ProxiedRequest, *stages: dict[str, Any]) -> Any:
    [answer] = ask_pipeline(models, [request], *stages)
    return answer


@pytest.mark.parametrize("source", ["request", "settings", "stage"])
def test_the_best_documents_stand_in_the_prompt_wherever_they_come_from(source: str):
    """One request holds all; equal ones stay in their order."""
    models = RerankingModels(tiny=always("a cat and a hat"))
    draft = {"kind": "generate", "name": "draft", "model": "tiny", "prompt": "x", "n": 2}
    cases = {
        "request": (asked(documents=TEXTS), [BEST, FINAL]),
        "settings": (asked(), [BEST | {"documents": TEXTS}, FINAL]),
        "stage": (asked(), [draft, BEST | {"documents_of": "draft"}, FINAL]),
    }
    request, stages = cases[source]
    answer = ask(models, request, *stages)
    in_order = ["cats and cats", "cat"] if source != "stage" else ["a cat and a hat"] * 2
    assert messages_to(models, "big") == ["|".join(in_order)]
    [body] = models.bodies
    assert (body["query"], body["top_n"], body["return_documents"]) == ("why cats?", 2, False)
    assert "documents" not in models.models["big"].asked[0].fields
    used = {each["stage"]: each for each in answer.usage["stages"]}
    assert used["best"] == {
        "stage": "best",
        "model": "judge",
        "prompt_tokens": 9,
        "total_tokens": 9,
    }
    assert answer.usage["prompt_tokens"] == sum(each["prompt_tokens"] for each in used.values())


def test_the_query_is_a_template_and_the_scores_are_the_models():
    models = RerankingModels()
    best = BEST | {
        "query": "instead of {{ question }}",
        "keep": 4,
        "fields": {"instruction": "find animals", "max_tokens_per_doc": 9},
    }
    final = FINAL | {"prompt": "{{ best.text }} {{ best.scores | join(' ') }}"}
    ask(models, asked(documents=TEXTS), best, final)
    assert messages_to(models, "big") == ["cats and cats 0.3 0.1 0.1 0.0"]
    [body] = models.bodies
    assert body["query"] == "instead of why cats?"
    assert (body["instruction"], body["max_tokens_per_doc"]) == ("find animals", 9)


def test_no_document_is_no_request():
    models = RerankingModels(tiny=always(""))
    draft = {"kind": "generate", "name": "draft", "model": "tiny", "prompt": "x"}
    ask(models, asked(), draft, BEST | {"documents_of": "draft"}, FINAL)
    assert messages_to(models, "big") == [""] and not models.bodies


def test_a_stage_gets_what_is_left_of_the_time_and_the_question_s_headers():
    models = RerankingModels()
    request = in_background(asked(documents=TEXTS, timeout_ms=60_000))
    ask(models, request, BEST, FINAL)
    assert 0 < models.bodies[0]["timeout_ms"] <= 60_000
    assert models.models["judge"].asked[0].background
    late = replace(request, deadline=time.monotonic() + 0.2)
    models.models["judge"].delay_s = 0.3
    with pytest.raises((HttpError, RequestError), match="time ran out"):
        ask(models, late, BEST, FINAL)
    assert len(models.models["big"].asked) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_stage_warns_of_is_told_to_the_client(stream: bool):
    models = RerankingModels()
    models.headers = {"x-jitney-warnings": "documents[3] is cut to the context"}
    answer = ask(models, asked(documents=TEXTS, stream=stream), BEST, FINAL)
    headers = answer[0] if stream else answer.headers
    assert headers["x-jitney-warnings"] == "stage best: documents[3] is cut to the context"


@pytest.mark.parametrize(
    "results",
    [
        [],
        None,
        [{"index": 0}],
        [{"index": 0, "relevance_score": "high"}] * 2,
        [{"index": 0, "relevance_score": 0.5}] * 2,
        [{"index": 0, "relevance_score": 0.5}, {"index": 4, "relevance_score": 0.5}],
        [{"index": 0, "relevance_score": None}, {"index": 1, "relevance_score": 0.5}],
        [{"index": 0, "relevance_score": float("nan")}, {"index": 1, "relevance_score": 0.5}],
    ],
)
def test_an_answer_that_ranks_nothing_is_the_engine_s_fault(results: Any):
    with pytest.raises(HttpError, match="the engine of judge sent no scores") as raised:
        best_in(ModelAnswer({"model": "judge", "results": results}), 4, 2)
    assert raised.value.status == 502


@given(
    st.lists(st.floats(-1, 1), min_size=1, max_size=20),
    st.integers(1, 20),
    st.randoms(use_true_random=False),
)
def test_the_best_come_first_and_equal_ones_in_their_order(scores, keep: int, random):
    entries = [{"index": at, "relevance_score": score} for at, score in enumerate(scores)]
    random.shuffle(entries)
    best = best_in(ModelAnswer({"results": entries}), len(scores), keep)
    assert best == sorted(enumerate(scores), key=lambda each: (-each[1], each[0]))[:keep]


@pytest.mark.parametrize(
    "stages, complaint",
    [
        ((BEST | {"documents": ["a"], "documents_of": "x"}, FINAL), "one of documents, doc"),
        ((BEST | {"query": "{{ candidate }}"}, FINAL), "query asks for 'candidate'"),
        ((BEST | {"keep": 0}, FINAL), "keep"),
        ((BEST | {"fields": {"top_n": 3}}, FINAL), "top_n is set by the stage itself"),
        ((BEST | {"fields": {"instruction": ""}}, FINAL), "fields: instruction"),
        ((BEST | {"fields": {"temperature": 1}}, FINAL), "no route has a field temperature"),
        ((BEST | {"scored": "x"}, FINAL), "scored"),
    ],
)
def test_settings_are_checked(stages: tuple[dict[str, Any], ...], complaint: str):
    with pytest.raises(ValidationError, match=complaint):
        pipeline_settings(*stages)


def test_only_engines_rank():
    composed = pipeline_settings(BEST, FINAL)
    models = dict.fromkeys(
        ("judge", "big"), pipeline_settings(FINAL | {"prompt": "x", "model": "e"})
    )
    with pytest.raises(ConfigError, match="by 'judge', which is made of models"):
        ComposedModels.check({"e": object(), "p": composed} | models)


FLEET = """
[fleet]
poll_s = 0.2
[models.judge]
urls = ["{judge}"]
[models.writer]
urls = ["{writer}"]

[models.p]
kind = "pipeline"
[[models.p.stages]]
kind = "rerank"
name = "best"
model = "judge"
keep = 2
[[models.p.stages]]
kind = "generate"
name = "answer"
model = "writer"
prompt = "{{{{ best.texts | join('|') }}}}"
"""


def test_rerank_generate_behind_a_fleet(tmp_path: Path):
    """A fake engine's vector is (1, the prompt's length), so that longer texts fit better."""
    judge = FakeEngine(FakeClient(), {"model": "judge"})
    writer = FakeEngine(FakeClient(Script("An answer"), context_length=512), {"model": "writer"})
    texts = ["a", "aaa", "zz", "z" * 300]
    body = {"model": "p", "messages": [{"role": "user", "content": "cats"}], "documents": texts}
    with engines(judge, writer):
        text = FLEET.format(judge=judge.url, writer=writer.url)
        with fleet_of(tmp_path, text) as served, served.http() as http:
            served.wait_ready(judge.name, writer.name)
            for stream in (False, True):
                answer = http.post("/v1/chat/completions", json=body | {"stream": stream})
                assert answer.status_code == 200, answer.text
                warnings = answer.headers["x-jitney-warnings"]
                assert warnings == "stage best: documents[3] is cut to the context"
                sent = bytes(writer.client.requests[-1].prompt).decode()
                assert sent.endswith(f"{texts[3]}|aaa\nassistant: ")
            assert len(judge.heads) == 2  # requests; the engine makes one prompt of each text
            [ranked, _] = http.post("/v1/chat/completions", json=body).json()["usage"]["stages"]
            read = sum(len(each.prompt) for each in judge.client.requests) // 3
            assert (ranked["stage"], ranked["prompt_tokens"]) == ("best", read)
            judge.client.script = Script(error=ErrorInfo("queue_full", "no room", retry_after=7))
            refused = http.post("/v1/chat/completions", json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
            assert refused.json()["error"]["message"].startswith("stage best: ")
            answer = http.post("/v1/rerank", json={"model": "p", "query": "a", "documents": ["b"]})
            assert answer.status_code == 400, "a pipeline is no reranker itself"
            stages = http.get("/v1/models/p").json()["made_of"]["stages"]
            assert stages[0] == {"kind": "rerank", "name": "best", "model": "judge", "keep": 2}
