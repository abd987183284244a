"""/v1/embeddings: OpenAI's body and answer, and what is wrong with a body."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import pytest
from api_fakes import FakeClient, Script, call, make_app, run
from openai.types import CreateEmbeddingResponse

from jitney.engine.api.embeddings import EmbeddingsAnswer

PATH = "/v1/embeddings"


def engine(script: Script | None = None, **info) -> FakeClient:
    wanted = {"embedding_pooling": "mean", "embedding_size": 2}
    return FakeClient(script, **wanted | info)


def ask(body, client: FakeClient | None = None, **kw):
    return run(call(make_app(client or engine()), PATH, body, **kw))


@pytest.mark.parametrize(
    ("given", "lengths"),
    [("abc", [3]), (["a", "bcd"], [1, 3]), ([5, 6], [2]), ([[5], [6, 7, 8]], [1, 3])],
)
def test_every_form_of_input_is_answered_in_order(given, lengths: list[int]):
    client = engine()
    reply = ask({"model": "m", "input": given, "user": "u"}, client)
    assert reply.status == 200, reply.json()
    answer = CreateEmbeddingResponse.model_validate(reply.json())
    EmbeddingsAnswer.model_validate(reply.json())
    assert [each.embedding for each in answer.data] == [[1.0, length] for length in lengths]
    assert [each.index for each in answer.data] == list(range(len(lengths)))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(lengths)
    assert {each.pooling for each in client.requests} == {"mean"}
    assert {each.user for each in client.requests} == {"u"} and not client.open


def test_base64_is_of_float32():
    body = {"input": "abc", "encoding_format": "base64", "dimensions": 2}
    written = ask(body).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(written), "<f4").tolist() == [1.0, 3.0]


def test_a_longer_input_is_cut_if_that_is_asked_for():
    long = list(range(100)) * 3
    reply = ask({"input": long})
    assert (reply.status, reply.error["param"]) == (400, "input")
    assert reply.error["code"] == "context_length_exceeded"
    client = engine()
    assert ask({"input": long, "truncate_prompt_tokens": 7}, client).status == 200
    assert client.requests[0].prompt == long[-7:]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": [[5], "a"]}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [100000]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": ["a"] * 265}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a" * 5000}, "input"),
        ({"dimensions": 1}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": "2"}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"user": 5}, "user"),
        ({"priority": 1}, "priority"),
    ],
    ids=str,
)
def test_a_bad_field_is_named(change: dict, param: str):
    client = engine()
    reply = ask({"input": "a"} | change, client)
    assert (reply.status, reply.error["param"]) == (400, param), reply.json()
    assert reply.error["type"] == "invalid_request_error" and not client.requests
    assert len(reply.error["message"]) < 2000


def test_a_field_nobody_knows_is_listed_and_a_model_too():
    reply = ask({"input": "a", "made_up": 1})
    assert (reply.status, reply.headers["x-ignored-params"]) == (200, "made_up")
    assert ask({"input": "a", "model": "other"}).error["code"] == "model_not_found"


def test_an_engine_that_makes_no_vectors_says_how_it_would():
    reply = ask({"input": "a"}, FakeClient(embedding_pooling="off"))
    assert (reply.status, reply.error["code"]) == (400, "unsupported_parameter")
    assert "--embedding-pooling" in reply.error["message"]


def test_a_client_that_leaves_ends_all_of_it():
    client = engine(Script(hang=True))
    app = make_app(client)
    run(asyncio.wait_for(call(app, PATH, {"input": ["a", "b"]}, leave_after=0.2), 30))
    assert {id for id, _, _ in client.aborts} == {each.id for each in client.requests}
    assert len(client.requests) == 2


def encoder(pooling: str = "cls") -> FakeClient:
    return FakeClient(embedding_pooling=pooling, embedding_size=2, encoder=True, context_length=16)


def test_an_encoder_reads_as_many_tokens_as_it_has_positions():
    client = encoder()
    assert ask({"input": [[5] * 16, [6]]}, client).status == 200
    assert {each.pooling for each in client.requests} == {"cls"}
    reply = ask({"input": [5] * 17}, client)
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert "17" in reply.error["message"] and "16" in reply.error["message"]


def test_an_encoder_s_longer_input_keeps_the_special_tokens_at_both_ends():
    client = encoder()
    body = {"input": [1, *range(5, 30), 2], "truncate_prompt_tokens": 6}
    assert ask(body, client).status == 200
    assert client.requests[0].prompt == [1, 5, 6, 7, 8, 2]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}),
    ],
)
@pytest.mark.parametrize(
    ("pooling", "route"), [("mean", "/v1/embeddings"), ("classify", "/v1/rerank")]
)
def test_an_encoder_asked_for_text_says_what_it_makes(path: str, body, pooling: str, route: str):
    client = encoder(pooling)
    reply = run(call(make_app(client), path, body))
    assert reply.status == 400 and not client.requests
    assert "writes no text" in reply.error["message"] and route in reply.error["message"]


def test_a_reranker_makes_no_vectors():
    reply = ask({"input": "a"}, encoder("classify"))
    assert (reply.status, reply.error["param"]) == (400, "model")
    assert "/v1/rerank" in reply.error["message"]
