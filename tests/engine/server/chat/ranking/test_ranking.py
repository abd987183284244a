"""/rerank and /score: each kind of model, Cohere's, Jina's and vLLM's forms, and mistakes."""

from __future__ import annotations

import math
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from api_fakes import ByteTokenizer, FakeClient, Reply, Script, call, make_app, run
from hypothesis import given
from hypothesis import strategies as st

from jitney.engine.common.errors import RequestError
from jitney.engine.common.key_file import digest_key
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.text.tokenizer import Tokenizer
from jitney.engine.server.chat.ranking.bodies import RerankAnswer
from jitney.engine.server.chat.ranking.kinds import _sigmoid

RERANK, SCORE = "/v1/rerank", "/v1/score"
#: Tokens that the fake engine's lists of likeliest ones have, and one that they have not.
YES, NO, FAR = 66, 70, 200
ASKED = {"query": "who", "documents": ["a", "bcde", "fg"]}


class RankingTokenizer(ByteTokenizer):
    """yes and no are tokens; pairs are joined by 258, and end with 259."""

    no = NO

    def token_to_id(self, token: str) -> int | None:
        return {"yes": YES, "no": self.no}.get(token)

    def encode_pair(self, query: str, document: str, max_tokens: int | None = None) -> list[int]:
        first, second = self.encode(query), self.encode(document)
        if max_tokens is not None:
            room = max_tokens - len(first) - 2
            if room < 1:
                raise RequestError("no room", code="context_length_exceeded", param="prompt")
            second = second[:room]
        return [*first, 258, *second, 259]


class FarTokenizer(RankingTokenizer):
    no = FAR


class Cross(FakeClient):
    """A cross-encoder: the logit says how long the pair was."""

    def __init__(self, **info: Any):
        super().__init__(embedding_pooling="classify", encoder=True, **info)

    @staticmethod
    def _vector(request: EngineRequest) -> SequenceOutput:
        assert request.pooling == "classify"
        logit = np.array([len(request.prompt) - 7], np.float32)
        return SequenceOutput(request.id, 0, finish="stop", embedding=logit.tobytes())


class Embedder(FakeClient):
    """The vector of a text points by its first byte."""

    @staticmethod
    def _vector(request: EngineRequest) -> SequenceOutput:
        angle = request.prompt[0] / 100
        vector = np.array([math.cos(angle), math.sin(angle)], np.float32)
        return SequenceOutput(request.id, 0, finish="stop", embedding=vector.tobytes())


def decoder(**info: Any) -> FakeClient:
    """Answers yes to every prompt."""
    settings = {"context_length": 1024, "embedding_pooling": "off"}
    return FakeClient(Script(tokens=[YES]), **settings | info)


def ask(
    path: str,
    body: dict[str, Any],
    client: FakeClient,
    tokenizer: ByteTokenizer | None = None,
    **settings: Any,
) -> Reply:
    app = make_app(client, tokenizer=tokenizer or RankingTokenizer(), **settings)
    return run(call(app, path, body))


def scores(reply: Reply) -> list[float]:
    """Of a /score."""
    assert reply.status == 200, reply.body
    return [each["score"] for each in reply.json()["data"]]


def test_a_cross_encoder_scores_by_the_sigmoid_of_its_logit():
    client = Cross()
    reply = ask(RERANK, ASKED, client)
    assert reply.status == 200, reply.body
    answer = msgspec.json.decode(reply.body, type=RerankAnswer)
    wanted = [1 / (1 + math.exp(7 - (5 + len(text)))) for text in ASKED["documents"]]
    assert [each.index for each in answer.results] == [1, 2, 0]
    assert [each.relevance_score for each in answer.results] == pytest.approx(
        [wanted[1], wanted[2], wanted[0]]
    )
    assert [bytes(each.prompt[:3]) for each in client.requests] == [b"who"] * 3
    assert answer.usage.prompt_tokens == sum(len(each.prompt) for each in client.requests)
    assert not client.open


def test_an_embedding_model_scores_by_the_cosine():
    client = Embedder()
    found = scores(ask(SCORE, {"text_1": "a", "text_2": ["a", "b", "a"]}, client))
    assert found == pytest.approx([1, math.cos(0.01), 1])
    assert [bytes(each.prompt) for each in client.requests] == [b"a", b"b"]  # each text once
    both = {"queries": ["a", "b"], "documents": ["c", "b"]}
    assert scores(ask(SCORE, both, Embedder())) == pytest.approx([math.cos(0.02), 1])


def test_a_model_that_answers_yes_scores_by_its_share():
    client = decoder()
    found = scores(ask(SCORE, {"text_1": "who", "text_2": "me"}, client, rerank="yes_no"))
    assert found == pytest.approx([1 / (1 + math.exp(-5.5 + YES / 1000))])
    [request] = client.requests
    assert set(request.sampling.allowed_token_ids) == {YES, NO}
    assert request.sampling.max_tokens == 1 and request.sampling.greedy
    assert bytes(request.prompt).decode() == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
        "answer the query\n<Query>: who\n<Document>: me<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    )


def test_the_word_that_is_not_among_the_likeliest_is_asked_for():
    client = decoder()
    client.scripts = [Script(tokens=[FAR]), Script(tokens=[YES]), Script(tokens=[FAR])]
    body = {"query": "who", "documents": ["a", "b"], "instruction": "Find it"}
    reply = ask(RERANK, body, client, FarTokenizer(), rerank="yes_no")
    assert reply.status == 200, reply.body
    found = {each["index"]: each["relevance_score"] for each in reply.json()["results"]}
    top = -0.5 - (YES - 65)  # yes is among the likeliest of the first
    assert found[0] == pytest.approx(1 / (1 + math.exp(-FAR / 1000 - top)))
    assert found[1] == pytest.approx(1 / (1 + math.exp(-FAR / 1000 + YES / 1000)))
    [first, second, third] = client.requests
    assert third.prompt == second.prompt and third.sampling.allowed_token_ids == (FAR,)
    assert b"<Instruct>: Find it\n" in bytes(first.prompt)


def test_which_model_ranks_is_seen_in_its_name_or_said():
    for name, status in (("org/Qwen3-Reranker-0.6B", 200), ("qwen3_reranker-q8", 200), ("x", 400)):
        assert ask(RERANK, ASKED, decoder(model=name)).status == status
    refused = ask(RERANK, ASKED, decoder())
    assert (refused.error["param"], refused.error["code"]) == ("model", "unsupported_parameter")
    assert "--rerank yes_no" in refused.error["message"]


def test_a_vocabulary_without_the_words_is_refused():
    class Wordless(RankingTokenizer):
        def token_to_id(self, token: str) -> int | None:
            return None

    refused = ask(RERANK, ASKED, decoder(), Wordless(), rerank="yes_no")
    assert refused.status == 400 and "yes and no" in refused.error["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
@pytest.mark.parametrize("wanted", [None, True, False])
def test_documents_are_repeated_as_each_api_has_it(path: str, wanted: bool | None):
    body = ASKED | {"top_n": 2, "return_documents": wanted}
    reply = ask(path, body, Cross())
    assert reply.status == 200, reply.body
    shown = [each.get("document") for each in reply.json()["results"]]
    repeats = path != "/v2/rerank" if wanted is None else wanted
    assert shown == ([{"text": "bcde"}, {"text": "fg"}] if repeats else [None, None])
    assert reply.json()["meta"]["tokens"]["input_tokens"] == reply.json()["usage"]["total_tokens"]


def test_documents_may_be_objects():
    client = Cross()
    documents = [{"text": "a", "title": "A"}, "bc"]
    reply = ask(RERANK, {"query": "q", "documents": documents}, client)
    assert [each["document"]["text"] for each in reply.json()["results"]] == ["bc", "a"]


def test_longer_documents_are_cut():
    body = {"query": "who", "documents": ["abcdef", "ab"], "max_tokens_per_doc": 3}
    client = Cross()
    assert ask(RERANK, body, client).status == 200
    assert [bytes(each.prompt[4:-1]) for each in client.requests] == [b"abc", b"ab"]
    client = Embedder()
    ask(RERANK, body, client)
    assert [bytes(each.prompt) for each in client.requests] == [b"who", b"abc", b"ab"]
    client = decoder()
    ask(RERANK, body, client, rerank="yes_no")
    texts = [bytes(each.prompt).split(b"<Document>:")[1] for each in client.requests]
    assert [text.split(b"<|im_end|>")[0] for text in texts] == [b" ab", b" ab"]


@pytest.mark.parametrize("kind", ["cross", "vectors", "yes_no"])
def test_what_is_cut_for_want_of_room_is_said(kind: str):
    clients = {
        "cross": Cross,
        "vectors": Embedder,
        "yes_no": lambda: decoder(context_length=500),
    }
    client = clients[kind]()
    settings: dict[str, Any] = {"rerank": "yes_no"} if kind == "yes_no" else {}
    body = {"query": "q", "documents": ["a", "b" * 5000]}
    reply = ask(RERANK, body, client, **settings)
    assert reply.status == 200, reply.body
    assert "documents[1]" in reply.headers["x-jitney-warnings"]
    assert "documents[0]" not in reply.headers["x-jitney-warnings"]
    longest = max(len(each.prompt) for each in client.requests)
    assert longest == {"cross": 256, "vectors": 255, "yes_no": 499}[kind]
    cut = ask(RERANK, body | {"truncate_prompt_tokens": 450}, client, **settings)
    assert cut.status == 200 and "x-jitney-warnings" not in cut.headers


def test_many_documents_go_in_groups():
    client = Cross(seats=2, max_waiting_requests=3)
    documents = ["x" * (1 + place % 50) for place in range(60)]
    reply = ask(RERANK, {"query": "q", "documents": documents}, client)
    found = {each["index"]: each["relevance_score"] for each in reply.json()["results"]}
    assert found == {
        place: pytest.approx(_sigmoid(3 + len(text) - 7)) for place, text in enumerate(documents)
    }
    groups = [each.group.requests if each.group else 1 for each in client.requests]
    assert groups == [5] * 60
    assert reply.json()["usage"]["prompt_tokens"] == sum(map(len, documents)) + 3 * 60


def test_a_key_that_may_have_few_open_is_served_in_smaller_groups():
    app = make_app(
        Cross(), tokenizer=RankingTokenizer(), api_keys=(digest_key("k"),), key_max_concurrent=2
    )
    reply = run(call(app, RERANK, ASKED, headers={"authorization": "Bearer k"}))
    assert reply.status == 200 and len(reply.json()["results"]) == 3
    client = Cross()
    app = make_app(
        client, tokenizer=RankingTokenizer(), api_keys=(digest_key("k"),), key_tokens_per_minute=1
    )

    async def twice() -> list[int]:
        headers = {"authorization": "Bearer k"}
        return [(await call(app, RERANK, ASKED, headers=headers)).status for _ in range(2)]

    assert run(twice()) == [200, 429]


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        (RERANK, {"query": None}, "query"),
        (RERANK, {"query": ""}, "query"),
        (RERANK, {"query": "q" * 300}, "query"),
        (RERANK, {"query": "q" * 5000}, "query"),
        (RERANK, {"documents": []}, "documents"),
        (RERANK, {"documents": "a"}, "documents"),
        (RERANK, {"documents": [5]}, "documents"),
        (RERANK, {"documents": [{"title": "a"}]}, "documents"),
        (RERANK, {"documents": ["a"] * 2049}, "documents"),
        (RERANK, {"top_n": 0}, "top_n"),
        (RERANK, {"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        (RERANK, {"return_documents": 1}, "return_documents"),
        (RERANK, {"instruction": ""}, "instruction"),
        (RERANK, {"priority": 1}, "priority"),
        (SCORE, {"text_1": None}, "text_1"),
        (SCORE, {"text_2": None}, "text_2"),
        (SCORE, {"text_2": []}, "text_2"),
        (SCORE, {"queries": "a"}, "text_1"),
        (SCORE, {"text_1": ["a", "b"]}, "text_1"),
        (SCORE, {"text_1": "q" * 300}, "text_1"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("kind", [Cross, Embedder])
def test_mistakes_are_named(kind: type[FakeClient], path: str, change: dict[str, Any], param: str):
    body = ASKED if path == RERANK else {"text_1": "a", "text_2": ["b", "c", "d"]}
    client = kind()
    reply = ask(path, body | change, client)
    assert (reply.status, reply.error["param"]) == (400, param), reply.body
    assert not client.requests


def test_other_models_and_fields():
    assert ask(RERANK, ASKED | {"model": "x"}, Cross()).error["code"] == "model_not_found"
    client = Cross(adapters=("fr",))
    reply = ask(RERANK, ASKED | {"model": "fr", "rank_fields": ["a"]}, client)
    assert reply.json()["model"] == "fr" and client.requests[0].adapter == 1
    assert reply.headers["x-ignored-params"] == "rank_fields"


def test_a_client_that_leaves_ends_all_of_it():
    client = decoder()
    client.script = Script(hang=True)
    app = make_app(client, tokenizer=RankingTokenizer(), rerank="yes_no")
    run(call(app, RERANK, ASKED, leave_after=0.2))
    assert {id for id, _, _ in client.aborts} == {each.id for each in client.requests}
    assert len(client.requests) == 3


@given(st.floats(-800, 800))
def test_the_sigmoid_never_overflows(value: float):
    assert 0 <= _sigmoid(value) <= 1
    assert _sigmoid(value) + _sigmoid(-value) == pytest.approx(1)


class _Wrapped:
    """Puts 1 before a text and 2 and 3 behind it."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        own = [ord(letter) for letter in text]
        return [1, *own, 2, 3] if add_special_tokens else own


@given(st.text(st.characters(min_codepoint=65, max_codepoint=90)), st.integers(3, 12))
def test_a_cut_text_keeps_its_beginning_and_all_special_tokens(text: str, most: int):
    ids = Tokenizer.first_tokens(cast(Any, _Wrapped()), text, most)
    assert ids == [1, *map(ord, text[: most - 3]), 2, 3]
