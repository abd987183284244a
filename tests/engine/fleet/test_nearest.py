"""Pipelines that embed: which documents come into the prompt, and what is asked of whom."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_fakes import FakeClient, Script
from fleet_engines import FakeEngine, engines, fleet_of
from pydantic import ValidationError
from scripted_models import (
    ScriptedModels,
    always,
    ask_pipeline,
    chat,
    in_background,
    messages_to,
    pipeline_settings,
)

from jitney.engine.common.errors import ConfigError, RequestError
from jitney.engine.fleet.compositions.answering import ModelAnswer
from jitney.engine.fleet.compositions.composed import ComposedModels
from jitney.engine.fleet.compositions.pipeline import Pipeline
from jitney.engine.fleet.config import FleetConfig
from jitney.engine.fleet.request import ProxiedRequest
from jitney.engine.fleet.sections import ReplicasSection
from jitney.engine.server.http.errors import HttpError

NEAR = {"kind": "embed", "name": "near", "model": "finder", "keep": 2}
FINAL = {
    "kind": "generate",
    "name": "final",
    "model": "big",
    "prompt": "{{ near.texts | join('|') }} {{ near.text }}",
}
TEXTS = ["dogs", "cats and cats", "cat", "trams"]


class EmbeddingModels(ScriptedModels):
    """Its model "finder" counts letters: a text's vector is how often it has each of a to z."""

    def __init__(self, as_base64: bool = True, size: int = 26):
        super().__init__(finder=always(""), big=always("done"), tiny=always("trams"))
        self.as_base64 = as_base64
        self.size = size
        #: Inputs of each request.
        self.inputs: list[list[str]] = []
        #: Of each, whether it was in the background.
        self.background: list[bool] = []
        self.models["finder"].seats = 4

    async def answer(self, request: ProxiedRequest) -> ModelAnswer:
        if request.route != "/v1/embeddings":
            return await super().answer(request)
        assert request.outgoing().fields["encoding_format"] == "base64"
        inputs = request.fields["input"]
        self.inputs.append(inputs)
        self.background.append(request.background)
        await asyncio.sleep(0)
        data = [
            {"object": "embedding", "index": index, "embedding": self._vector(text)}
            for index, text in enumerate(inputs)
        ]
        used = sum(map(len, inputs))
        usage = {"prompt_tokens": used, "total_tokens": used}
        return ModelAnswer({"object": "list", "data": data[::-1], "usage": usage})

    def _vector(self, text: str) -> Any:
        counts = [float(text.count(chr(ord("a") + each))) for each in range(self.size)]
        if not self.as_base64:
            return counts
        return base64.b64encode(np.array(counts, "<f4").tobytes()).decode()


def asked(text: str = "cats", **fields: Any) -> ProxiedRequest:
    return chat("p", text, **fields)


@pytest.mark.parametrize("as_base64", [True, False])
def test_the_nearest_of_the_request_s_documents_stand_in_the_prompt(as_base64: bool):
    models = EmbeddingModels(as_base64)
    requests = [asked(documents=TEXTS), asked("tram", documents=TEXTS[::-1])]
    answers = ask_pipeline(models, requests, NEAR, FINAL)
    assert messages_to(models, "big") == ["cats and cats|cat cats and cats", "trams|cat trams"]
    # Four at once, as many as the model has seats; the request goes with them.
    assert models.inputs[:2] == [["cats", *TEXTS[:3]], TEXTS[3:]]
    assert all("documents" not in each.fields for each in models.models["big"].asked)
    stages = {each["stage"]: each for each in answers[0].usage["stages"]}
    assert stages["near"]["prompt_tokens"] == len("cats") + sum(map(len, TEXTS))


def test_the_scores_are_cosines():
    models = EmbeddingModels()
    final = FINAL | {"prompt": "{{ near.scores | map('round', 3) | join(' ') }}"}
    ask_pipeline(models, [asked("aab", documents=["ab", "c", "a"])], NEAR | {"keep": 3}, final)
    # (2,1).(1,1) / (sqrt 5 sqrt 2), (2,1).(1,0) / sqrt 5, and nothing in common.
    assert messages_to(models, "big") == ["0.949 0.894 0.0"]


def test_documents_that_people_will_wait_for_are_embedded_as_for_them():
    """A line of a batch may be the first request."""
    models = EmbeddingModels()
    answers = ask_pipeline(models, [in_background(asked())], NEAR | {"documents": TEXTS}, FINAL)
    assert models.background == [True, False], "the request, then the documents"
    stages = {each["stage"]: each for each in answers[0].usage["stages"]}
    assert stages["near"]["prompt_tokens"] == len("cats") + sum(map(len, TEXTS))


def test_documents_of_the_settings_are_embedded_once(tmp_path: Path):
    file = tmp_path / "texts.jsonl"
    lines = [json.dumps(text) for text in TEXTS[:2]] + [json.dumps({"text": TEXTS[2]}), ""]
    file.write_text("\n".join([*lines, json.dumps(TEXTS[3])]))
    for source in ({"documents": TEXTS}, {"file": "texts.jsonl"}):
        models = EmbeddingModels()
        near = NEAR | source | {"prefix": "zz ", "query": "a {{ question }}"}
        ask_pipeline(models, [asked(), asked()], near, FINAL, folder=tmp_path)
        assert messages_to(models, "big") == ["cats and cats|cat cats and cats"] * 2
        made = [text for inputs in models.inputs for text in inputs]
        assert made == ["a cats", *("zz " + text for text in TEXTS), "a cats"]


async def test_what_was_embedded_before_an_error_is_not_embedded_again(monkeypatch):
    monkeypatch.setattr("jitney.engine.fleet.compositions.nearest._PORTION", 4)
    models = EmbeddingModels()
    whole, broken = models.answer, RequestError("no room", code="queue_full")

    async def failing(request: ProxiedRequest) -> ModelAnswer:
        if request.fields.get("input", [""])[0] == "e":
            raise broken
        return await whole(request)

    texts = ["a", "b", "c", "d", "e", "f"]
    pipeline = Pipeline(pipeline_settings(NEAR | {"documents": texts}, FINAL), models)
    try:
        models.answer = failing
        with pytest.raises(HttpError, match="stage near: no room"):
            await pipeline.answer(asked("f"))
        models.answer = whole
        await pipeline.answer(asked("f"))
    finally:
        await pipeline.close()
    assert models.inputs == [["f"], ["a", "b", "c", "d"], ["f"], ["e", "f"]]
    assert messages_to(models, "big")[0].startswith("f|")


async def test_vectors_of_another_model_are_made_anew():
    models = EmbeddingModels()

    pipeline = Pipeline(pipeline_settings(NEAR | {"documents": TEXTS}, FINAL), models)
    try:
        await pipeline.answer(asked())
        models.size = 20
        await pipeline.answer(asked("o"))
    finally:
        await pipeline.close()
    assert messages_to(models, "big")[1].startswith("dogs|")
    assert models.inputs[1:] == [TEXTS, ["o"], TEXTS]


def test_what_a_stage_made_is_looked_through_and_nothing_is_nothing():
    draft = {"kind": "generate", "name": "draft", "model": "tiny", "prompt": "x", "n": 2}
    models = EmbeddingModels()
    ask_pipeline(models, [asked()], draft, NEAR | {"documents_of": "draft"}, FINAL)
    assert messages_to(models, "big") == ["trams|trams trams"]
    models.models["tiny"] = always("")
    ask_pipeline(models, [asked()], draft, NEAR | {"documents_of": "draft"}, FINAL)
    assert messages_to(models, "big")[1] == " "


@pytest.mark.parametrize(
    "data", [[], [{"index": 0}], [{"index": 0, "embedding": "?"}], [{"index": 0, "embedding": []}]]
)
def test_an_engine_that_sends_no_vectors_is_named(data: list):
    class Broken(EmbeddingModels):
        async def answer(self, request: ProxiedRequest) -> ModelAnswer:
            return ModelAnswer({"data": data, "usage": {}})

    with pytest.raises(HttpError, match="stage near: the engine of finder sent no vectors"):
        ask_pipeline(Broken(), [asked(documents=["a"])], NEAR, FINAL)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"documents": []},
        {"documents": "a"},
        {"documents": ["a", ""]},
        {"documents": [{"text": "a"}]},
        {"documents": ["a"] * 2049},
        {"documents": None},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_bad_documents_of_a_request_are_named(fields: dict):
    models = EmbeddingModels()
    with pytest.raises(RequestError, match="documents must be") as raised:
        ask_pipeline(models, [asked(**fields)], NEAR, FINAL)
    assert raised.value.info.param == "documents" and not models.inputs


@pytest.mark.parametrize(
    "stages, complaint",
    [
        ((NEAR | {"documents": ["a"], "file": "b"}, FINAL), "one of documents, file"),
        ((NEAR | {"documents_of": "later"}, FINAL), "documents_of must name an earlier stage"),
        ((NEAR | {"query": "{{ candidate }}"}, FINAL), "query asks for 'candidate'"),
        ((NEAR | {"documents": []}, FINAL), "documents"),
        ((NEAR | {"documents": [""]}, FINAL), "documents"),
        ((NEAR | {"keep": 0}, FINAL), "keep"),
        ((NEAR,), "the last stage must be of kind"),
    ],
)
def test_settings_are_checked(stages: tuple[dict, ...], complaint: str):
    with pytest.raises(ValidationError, match=complaint):
        pipeline_settings(*stages)


@pytest.mark.parametrize(
    "content, complaint",
    [
        (None, "cannot be read: No such file"),
        (b"\xff", "it is not UTF-8"),
        (b"", "must hold 1 to 16384 documents, not 0"),
        (b'"a"\n5\n', "texts.jsonl:2: must be a JSON text"),
        (b'"a"\n{"text": ""}\n', "texts.jsonl:2: must be"),
        (b"plain\n", "texts.jsonl:1: must be"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, content: bytes | None, complaint: str):
    if content is not None:
        (tmp_path / "texts.jsonl").write_bytes(content)
    made = pipeline_settings(NEAR | {"file": "texts.jsonl"}, FINAL)
    served: dict[str, Any] = dict.fromkeys(("finder", "big"), ReplicasSection(replicas=1))
    with pytest.raises(ConfigError, match=complaint) as raised:
        ComposedModels(served | {"p": made}, EmbeddingModels(), tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kinds", [["embed", "rank", "generate"], ["embed", "rerank", "generate"]])
def test_an_example_of_the_page_is_a_fleet(tmp_path: Path, kinds: list[str]):
    page = (Path(__file__).parents[3] / "docs" / "fleet_models.md").read_text()
    heading = f"### {', '.join(kinds).capitalize()}"
    example = page.split(heading)[1].split("```toml\n")[1].split("```")[0]
    (tmp_path / "fleet.toml").write_text(example)
    (tmp_path / "handbook.jsonl").write_text(json.dumps("Cats sleep."))
    models: Any = FleetConfig.read(tmp_path / "fleet.toml").models
    ComposedModels(models, EmbeddingModels(), tmp_path)
    assert [each.kind for each in models["handbook"].stages] == kinds


FLEET = """
[fleet]
poll_s = 0.2
[models.finder]
urls = ["{finder}"]
[models.writer]
urls = ["{writer}"]

[models.handbook]
kind = "pipeline"
[[models.handbook.stages]]
kind = "embed"
name = "near"
model = "finder"
keep = 2
[[models.handbook.stages]]
kind = "rank"
name = "best"
model = "writer"
candidates_of = "near"
prompt = "{{{{ question }}}}"
scored = "{{{{ candidate }}}}"
[[models.handbook.stages]]
kind = "generate"
name = "answer"
model = "writer"
prompt = "{{{{ near.texts | join('|') }}}} {{{{ best.text }}}}"

[models.sure]
kind = "cascade"
small = "handbook"
large = "writer"
threshold = 0.0

[models.plain]
kind = "cascade"
small = "writer"
large = "writer"
threshold = 0.0
"""


def test_embed_rank_generate_behind_a_fleet(tmp_path: Path):
    """A fake engine's vector is (1, the prompt's length): the nearest are of the same length."""
    info = {"embedding_pooling": "mean", "embedding_size": 2}
    finder = FakeEngine(FakeClient(Script(), **info), {"model": "finder"})
    writer = FakeEngine(FakeClient(Script("An answer")), {"model": "writer"})
    path = "/v1/chat/completions"
    body = {
        "messages": [{"role": "user", "content": "cats"}],
        "documents": ["z" * 99, "aaaa", "zzzz", "a"],
    }
    with engines(finder, writer):
        text = FLEET.format(finder=finder.url, writer=writer.url)
        with fleet_of(tmp_path, text) as served, served.http() as http:
            served.wait_ready(finder.name, writer.name)
            for model in ("handbook", "sure"):
                writer.client.requests.clear()
                answer = http.post(path, json=body | {"model": model})
                assert answer.status_code == 200, answer.text
                sent = ["".join(map(chr, each.prompt)) for each in writer.client.requests]
                assert sent[-1].endswith("aaaa|zzzz aaaa\nassistant: ")
            streamed = http.post(path, json=body | {"model": "handbook", "stream": True})
            assert "data: [DONE]" in streamed.text and streamed.status_code == 200
            assert {each.pooling for each in finder.client.requests} == {"mean"}
            for model in ("plain", "writer"):
                refused = http.post(path, json=body | {"model": model})
                assert refused.json()["error"]["param"] == "documents", refused.text
            missing = http.post(path, json={**body, "documents": None, "model": "handbook"})
            assert (missing.status_code, missing.json()["error"]["param"]) == (400, "documents")
            cards = {each["id"]: each for each in http.get("/v1/models").json()["data"]}
            near = cards["handbook"]["made_of"]["stages"][0]
            assert near == {"kind": "embed", "name": "near", "model": "finder", "keep": 2}
