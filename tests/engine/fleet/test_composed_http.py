"""Models made of models behind a fleet's endpoint, over HTTP with two engines."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_fakes import FakeClient, Script, until
from fleet_engines import FakeEngine, Served, engines, fleet_of

FLEET = """
[fleet]
poll_s = 0.2
[models.tiny]
urls = ["{tiny}"]
[models.big]
urls = ["{big}"]

[models.smart]
kind = "cascade"
small = "tiny"
large = "big"
threshold = 0.87

[models.panel]
kind = "ensemble"
models = ["tiny", "big", "smart"]
"""
NOTES = """
[models.notes]
kind = "pipeline"
[[models.notes.stages]]
kind = "generate"
name = "draft"
model = "tiny"
route = "completions"
prompt = "Notes on {{{{ question }}}}:"
fields = {{ max_tokens = 5 }}
[[models.notes.stages]]
kind = "rank"
name = "best"
model = "big"
candidates = ["zz", "a"]
prompt = "{{{{ draft.text }}}} "
scored = "{{{{ candidate }}}}"
[[models.notes.stages]]
kind = "generate"
name = "answer"
model = "smart"
prompt = "{{{{ draft.text }}}}|{{{{ best.text }}}}|{{{{ question }}}}"
"""
#: A fake engine's token has a log-probability of minus a thousandth of its id: an answer of plain
#: letters has a confidence of about 0.89, one of umlauts 0.83, their ends counted.
SURE, UNSURE = "A sure answer", "üüüü"


@contextlib.contextmanager
def fleet(
    folder: Path, small: str = SURE, more: str = ""
) -> Iterator[tuple[Served, FakeEngine, FakeEngine]]:
    tiny = FakeEngine(FakeClient(Script(small)), {"model": "tiny"})
    big = FakeEngine(FakeClient(Script("The large answer")), {"model": "big"})
    with engines(tiny, big):
        text = (FLEET + more).format(tiny=tiny.url, big=big.url)
        with fleet_of(folder, text) as served:
            served.wait_ready(tiny.name, big.name)
            yield served, tiny, big


def chat(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "cats"}], **fields}


def chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    frames = [each.removeprefix("data: ") for each in answer.text.split("\n\n") if each]
    assert frames[-1] == "[DONE]"
    return [json.loads(each) for each in frames[:-1]]


def said(events: list[dict[str, Any]]) -> str:
    return "".join(
        choice["delta"].get("content") or "" for each in events for choice in each["choices"]
    )


@pytest.mark.parametrize("small, stage", [(SURE, "small"), (UNSURE, "large")])
def test_a_cascade(tmp_path: Path, small: str, stage: str):
    with fleet(tmp_path, small) as (served, tiny, big), served.http() as http:
        text = small if stage == "small" else "The large answer"
        answer = http.post(
            "/v1/chat/completions", json=chat("smart"), headers={"x-request-id": "r"}
        )
        body = answer.json()
        assert answer.status_code == 200, body
        assert body["choices"][0]["message"]["content"] == text
        assert answer.headers["x-jitney-stage"] == stage
        assert answer.headers["x-request-id"] == "r"
        assert body["model"] == ("tiny" if stage == "small" else "big")
        assert {each["x-request-id"] for each in (*tiny.heads, *big.heads)} == {"r"}

        asked = chat("smart", stream=True, stream_options={"include_usage": True})
        streamed = http.post("/v1/chat/completions", json=asked)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.headers["x-jitney-stage"] == stage
        events = chunks(streamed)
        assert said(events) == text
        for usage in (body["usage"], events[-1]["usage"]):
            assert len(usage["stages"]) == (1 if stage == "small" else 2)
            assert usage["completion_tokens"] == sum(
                each["completion_tokens"] for each in usage["stages"]
            )

        metrics = http.get("/metrics").text
        assert f'jitney_fleet_stages_total{{model="smart",stage="{stage}"}} 2.0' in metrics

        done = http.post("/v1/completions", json={"model": "smart", "prompt": "x", "max_tokens": 9})
        assert done.json()["choices"][0]["text"] == text[: 9 if text.isascii() else 4]
        assert done.json()["choices"][0]["logprobs"] is None


def test_an_ensemble_and_a_pipeline_with_a_cascade_in_them(tmp_path: Path):
    with fleet(tmp_path, UNSURE, more=NOTES) as (served, _, big), served.http() as http:
        panel = http.post("/v1/chat/completions", json=chat("panel"))
        assert panel.json()["choices"][0]["message"]["content"] == "The large answer"
        assert panel.json()["jitney"]["votes"] == 2
        assert panel.headers["x-jitney-stage"] == "big"

        big.client.requests.clear()
        notes = http.post("/v1/chat/completions", json=chat("notes"))
        assert notes.status_code == 200, notes.text
        assert notes.headers["x-jitney-stage"] == "answer/large"
        stages = [each["stage"] for each in notes.json()["usage"]["stages"]]
        assert stages == ["draft", "best", "answer/small", "answer/large"]
        prompts = ["".join(map(chr, each.prompt)) for each in big.client.requests]
        assert len(prompts) == 3  # two ranked texts, and the answer
        assert prompts[-1].endswith("|a|cats\nassistant: ")  # "a" is likelier than "zz"

        streamed = http.post("/v1/chat/completions", json=chat("notes", stream=True))
        assert said(chunks(streamed)) == "The large answer"
        assert streamed.headers["x-jitney-stage"] == "answer/large"


def test_all_are_listed_with_what_they_are_made_of(tmp_path: Path):
    with fleet(tmp_path, more=NOTES) as (served, _, _), served.http() as http:
        cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
        assert list(cards) == ["tiny", "big", "smart", "panel", "notes"]
        assert cards["smart"]["kind"] == "cascade"
        assert cards["smart"]["made_of"]["small"] == "tiny"
        assert cards["panel"]["made_of"]["models"] == ["tiny", "big", "smart"]
        assert [each["name"] for each in cards["notes"]["made_of"]["stages"]] == [
            "draft",
            "best",
            "answer",
        ]
        assert http.get("/v1/models/notes").json() == cards["notes"]


def test_what_cannot_be_is_refused(tmp_path: Path):
    with fleet(tmp_path, more=NOTES) as (served, _, _), served.http() as http:

        def error(path: str, body: dict[str, Any]) -> tuple[int, str | None]:
            answer = http.post(path, json=body)
            return answer.status_code, answer.json()["error"]["param"]

        path = "/v1/chat/completions"
        assert error(path, chat("smart", logit_bias={"1": 2})) == (400, "logit_bias")
        assert error(path, chat("panel", n=2)) == (400, "n")
        assert error(path, chat("notes", temperature="hot")) == (400, "temperature")
        assert error(path, chat("notes", temperature=9)) == (400, "temperature")
        assert error(path, {"model": "smart"}) == (400, "messages")
        assert error("/tokenize", {"model": "smart", "prompt": "a"}) == (400, "model")
        no_text = {"model": "smart", "prompt": [1, 2]}
        assert error("/v1/completions", no_text) == (400, "prompt")
        messages = chat("smart", max_tokens=5)
        assert http.post("/v1/messages", json=messages).json()["type"] == "error"


def test_an_engine_that_dies_in_a_stream_is_named(tmp_path: Path):
    with fleet(tmp_path, UNSURE) as (served, _, big), served.http() as http:
        big.dies_after = 4
        answer = http.post("/v1/chat/completions", json=chat("smart", stream=True))
        last = chunks(answer)[-1]
        assert last["error"]["message"].startswith("stage large: ")


def test_a_client_that_leaves_ends_the_work_of_all_stages(tmp_path: Path):
    with fleet(tmp_path, UNSURE, more=NOTES) as (served, tiny, big):
        big.client.script = Script("x" * 200, delay_s=0.05)
        asked = chat("smart", stream=True, max_tokens=200)
        with (
            served.http() as http,
            http.stream("POST", "/v1/chat/completions", json=asked) as answer,
        ):
            received = answer.iter_bytes()  # whoever lets go of it has left
            next(received)
            until(lambda: big.client.open)
            del received
        until(lambda: not big.client.open)
        tiny.client.script = Script(hang=True)
        with served.http(), pytest.raises(httpx.ReadTimeout):
            timeout = httpx.Timeout(60, read=0.5)
            httpx.post(served.url + "/v1/chat/completions", json=chat("notes"), timeout=timeout)
        until(lambda: not tiny.client.open)


def test_a_silent_stage_is_no_silent_stream(tmp_path: Path):
    with fleet(tmp_path, UNSURE) as (served, _, big), served.http() as http:
        big.client.script = Script("ab", delay_s=0.5)
        model = served.fleet.models["smart"]
        object.__setattr__(model, "keep_alive_s", 0.05)
        answer = http.post("/v1/chat/completions", json=chat("smart", stream=True))
        assert "\n\n\n\n" in answer.text
        assert said(chunks(answer)) == "ab"


def test_they_are_ready_when_their_parts_are(tmp_path: Path):
    tiny = FakeEngine(FakeClient(Script("a")), {"model": "tiny"})
    with engines(tiny):
        text = (FLEET + NOTES).format(tiny=tiny.url, big="http://127.0.0.1:9")
        with fleet_of(tmp_path, text) as served:
            served.wait_ready(tiny.name)
            ready = {name: model.ready for name, model in served.fleet.models.items()}
    expected = {"tiny": True, "big": False, "smart": False, "panel": True, "notes": False}
    assert ready == expected
