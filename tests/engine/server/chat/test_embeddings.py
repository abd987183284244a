"""/v1/embeddings: OpenAI's body and answer, and what is wrong with a body."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from api_fakes import BOS, ByteTokenizer, FakeClient, Script, call, make_app, run
from openai.types import CreateEmbeddingResponse

from jitney.engine.common.errors import ErrorInfo
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.requests import EngineRequest
from jitney.engine.server.process.client import OutputListener

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
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a" * 5000}, "input"),
        ({"dimensions": 1}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": "2"}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
    ],
    ids=str,
)
def test_a_bad_field_is_named(change: dict, param: str):
    client = engine()
    reply = ask({"input": "a"} | change, client)
    assert (reply.status, reply.error["param"]) == (400, param), reply.json()
    assert reply.error["type"] == "invalid_request_error" and not client.requests
    assert len(reply.error["message"]) < 2000


class Counting(FakeClient):
    """Notes how many requests were open at a time."""

    most_open = n_ended = 0

    def submit(self, request: EngineRequest, listener: OutputListener) -> None:
        super().submit(request, listener)
        self.most_open = max(self.most_open, len(self.requests) - self.n_ended)

    def _vector(self, request: EngineRequest) -> SequenceOutput:
        self.n_ended += 1
        return super()._vector(request)


@pytest.mark.parametrize(("limit", "most"), [(0, 32), (5, 5)])
def test_more_inputs_than_the_engine_has_room_for_are_answered_in_turns(limit: int, most: int):
    """Of 8 seats and 256 places, or as many as the key may have open."""
    client = Counting(embedding_pooling="mean", embedding_size=2)
    app = make_app(client, key_max_concurrent=limit)
    texts = ["a" * (1 + number % 7) for number in range(2048)]
    reply = run(call(app, PATH, {"input": texts}))
    assert reply.status == 200, reply.json()
    answer = CreateEmbeddingResponse.model_validate(reply.json())
    assert [each.embedding for each in answer.data] == [[1.0, len(text)] for text in texts]
    assert client.most_open == most


def test_an_input_that_fails_ends_the_others():
    client = engine()
    client.scripts = [Script() for _ in range(40)]
    client.scripts[35] = Script(error=ErrorInfo("queue_full", "no room", retry_after=2.0))
    reply = ask({"input": ["a"] * 300}, client)
    assert (reply.status, reply.headers["retry-after"]) == (429, "2")
    assert len(client.requests) < 300
    assert client.open <= {id for id, _, _ in client.aborts}


class BeginningTokenizer(ByteTokenizer):
    """Puts a token of its own before a text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())


def test_an_empty_text_has_a_vector_where_the_tokenizer_makes_something_of_it():
    client = engine()
    app = make_app(client, tokenizer=BeginningTokenizer())
    for texts in (["a", ""], ""):
        assert run(call(app, PATH, {"input": texts})).status == 200
    assert client.requests[1].prompt == [BOS]
    reply = run(call(app, PATH, {"input": ["a", ""], "add_special_tokens": False}))
    assert (reply.status, reply.error["param"]) == (400, "input")
    assert "input 1 " in reply.error["message"]


@pytest.mark.parametrize(
    ("path", "vectors"),
    [
        (PATH, lambda answer: [each["embedding"] for each in answer["data"]]),
        ("/api/embed", lambda answer: answer["embeddings"]),
    ],
)
def test_a_model_that_was_trained_for_shorter_vectors_makes_them(path: str, vectors: Any):
    client = engine(embedding_dimensions=())
    reply = run(call(make_app(client), path, {"model": "m", "input": ["abc"], "dimensions": 1}))
    assert vectors(reply.json()) == [[1.0]], "cut, and of length 1 again"
    whole = run(call(make_app(client), path, {"model": "m", "input": ["abc"], "dimensions": 2}))
    assert vectors(whole.json()) == [[1.0, 3.0]], "as the engine made it"


@pytest.mark.parametrize(
    ("shorter", "dimensions", "status"),
    [((), 3, 400), ((1,), 1, 200), ((64,), 1, 400), (None, 1, 400), (None, 2, 200)],
)
def test_lengths_that_the_model_was_not_trained_for_are_refused(
    shorter: tuple[int, ...] | None, dimensions: int, status: int
):
    reply = ask({"input": "a", "dimensions": dimensions}, engine(embedding_dimensions=shorter))
    assert reply.status == status
    if status == 400:
        assert reply.error["param"] == "dimensions" and "2" in reply.error["message"]


def test_an_engine_that_makes_no_vectors_says_how_it_would():
    reply = ask({"input": "a"}, FakeClient(embedding_pooling="off"))
    assert (reply.status, reply.error["code"]) == (400, "unsupported_parameter")
    assert "--embedding-pooling" in reply.error["message"]


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
