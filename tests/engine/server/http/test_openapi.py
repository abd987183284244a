"""The document of the routes: that it has them all, that its schemas are the models', and that the
server keeps what it promises when it is sent whatever the document allows, and more.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import jsonschema
import pytest
from api_fakes import FakeClient, Reply, Script, call, make_app, run, served

from jitney.engine.common.errors import RequestError
from jitney.engine.common.key_file import digest_key
from jitney.engine.server.chat.openai.schema import ChatBody
from jitney.engine.server.http.routes import ROUTES
from jitney.engine.server.http.routing import HttpRoute, Role

FUZZ = Path(__file__).parents[4] / "docs" / "benchmarks" / "fuzz.py"


def fetched() -> dict:
    reply = run(call(make_app(), "/openapi.json", method="GET"))
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    return reply.json()


def path_of(route: HttpRoute) -> str:
    return route.path.replace(":path}", "}")


def test_every_route_of_the_table_is_in_it():
    document = fetched()
    methods = {
        path: {method.upper() for method in operations}
        for path, operations in document["paths"].items()
    }
    wanted: dict[str, set[str]] = {}
    for route in ROUTES:
        wanted.setdefault(path_of(route), set()).add(route.method)
    assert methods == wanted
    for route in ROUTES:
        operation = document["paths"][path_of(route)][route.method.lower()]
        assert operation["summary"] == route.summary
        assert (operation["security"] == []) == (route.role is Role.ANYBODY)
        assert ("requestBody" in operation) == (route.body is not None)
        assert route.body is not None or not route.generates
        queried = {
            each["name"] for each in operation.get("parameters", []) if each["in"] == "query"
        }
        assert queried == set(route.query.model_fields if route.query else ())
    assert document["openapi"].startswith("3.1")


def test_every_reference_leads_somewhere():
    text = json.dumps(fetched())
    schemas = json.loads(text)["components"]["schemas"]
    named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert named and named <= set(schemas)


def test_what_is_not_supported_is_said_to_be():
    """And it is refused as the document says."""
    properties = fetched()["components"]["schemas"]["ChatBody"]["properties"]
    refused = {name for name, schema in properties.items() if "not supported" in str(schema)}
    assert {"suffix", "chat_template", "prompt", "functions"} <= refused
    plain = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    for name in refused:
        for neutral in properties[name]["enum"]:
            ChatBody.parse(plain | {name: neutral})
        with pytest.raises(RequestError, match=name):
            ChatBody.parse(plain | {name: ["something else"]})


def test_ranges_are_those_that_are_checked():
    properties = fetched()["components"]["schemas"]["CompletionBody"]["properties"]
    assert (properties["n"]["minimum"], properties["n"]["maximum"]) == (1, 128)
    assert properties["best_of"]["maximum"] == 128 and properties["top_p"]["exclusiveMinimum"] == 0
    assert properties["temperature"]["maximum"] == 2.0


def test_it_is_behind_the_key_like_what_it_describes():
    app = make_app(api_keys=(digest_key("k"),))
    assert run(call(app, "/openapi.json", method="GET")).status == 401


def described(document: dict, reply: Reply, path: str, method: str) -> dict:
    """The schemas of an answer by media type, as a validator takes them."""
    content = document["paths"][path][method]["responses"][str(reply.status)]["content"]
    return {
        media_type: value.get("schema", False) | {"components": document["components"]}
        for media_type, value in content.items()
    }


def events(reply: Reply) -> list:
    """Of a stream of events or of lines."""
    lines = [line.removeprefix("data: ") for line in reply.body.decode().splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


_USER = [{"role": "user", "content": "a"}]
_LOGPROBS = {"logprobs": True, "top_logprobs": 2}
_IDS = {"return_token_ids": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", _IDS | {"prompt": ["a", "b"], "n": 2, "logprobs": 2, "echo": True}),
        ("/v1/chat/completions", _IDS | _LOGPROBS | {"messages": _USER}),
        ("/v1/responses", {"input": "a", "top_logprobs": 2}),
        ("/v1/messages", {"messages": _USER, "max_tokens": 9}),
        ("/api/chat", _LOGPROBS | {"messages": _USER}),
        ("/api/generate", {"prompt": "a", "raw": True}),
    ],
)
def test_answers_and_events_are_as_described(path: str, body: dict):
    app = make_app(FakeClient(Script(text="hé" * 20)))
    reply = run(call(app, path, {"model": "m", "stream": False} | body))
    whole, event = described(fetched(), reply, path, "post").values()
    jsonschema.validate(reply.json(), whole)
    shown = events(run(call(app, path, {"model": "m", "stream": True} | body)))
    assert len(shown) > 2
    for each in shown:
        jsonschema.validate(each, event)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 1}),
        ("/v1/messages/count_tokens", {"messages": _USER}),
        ("/v1/responses/input_tokens", {"input": "a"}),
        ("/api/chat", {"messages": []}),
        ("/api/show", {}),
        ("/tokenize", {"prompt": "hé", "return_token_strs": True}),
        ("/tokenize", {"content": "hé", "with_pieces": True}),
        ("/tokenize", {"messages": _USER}),
        ("/detokenize", {"tokens": [65]}),
        ("/apply-template", {"messages": _USER}),
        ("/v1/embeddings", {"input": "a"}),
        ("/api/embeddings", {"prompt": ""}),
        ("/v1/messages", {}),
        ("/tokenizer_info", None),
        ("/v1/models", None),
        ("/version", None),
        ("/slots", None),
        ("/api/tags", None),
        ("/api/ps", None),
        ("/api/version", None),
        ("/", None),
    ],
)
def test_other_answers_and_errors_are_as_described(path: str, body: dict | None):
    method = "get" if body is None else "post"
    reply = run(call(make_app(), path, body, method=method.upper()))
    schema = described(fetched(), reply, path, method)["application/json"]
    jsonschema.validate(reply.json(), schema)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
        ("/api/embed", {"input": ["a"]}),
        ("/api/embeddings", {"prompt": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/v1/score", {"text_1": "a", "text_2": ["b"]}),
    ],
)
def test_vectors_and_scores_are_as_described(path: str, body: dict):
    app = make_app(FakeClient(embedding_pooling="mean", embedding_size=2))
    reply = run(call(app, path, body))
    assert reply.status == 200, reply.body
    jsonschema.validate(reply.json(), described(fetched(), reply, path, "post")["application/json"])


def fuzz_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz", FUZZ)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz"] = module
    spec.loader.exec_module(module)
    return module


def test_made_up_requests_never_find_a_fault(tmp_path: Path):
    """docs/benchmarks/fuzz.py against the whole HTTP side; its command sends more."""
    makes = {"embedding_pooling": "mean", "embedding_size": 2}
    engine = FakeClient(Script(text="ab"), context_length=4096, **makes)
    app = make_app(engine, data_dir=tmp_path / "data")
    with served(app) as (url, _):
        found = fuzz_script().Fuzzer(url, slowest_s=60).run(150)
    assert found.cases >= 125
    assert {status for _, status in found.statuses} >= {200, 400}
    assert found.statuses["POST /v1/embeddings", 200] > 0
    assert not found.faults, "\n".join(found.faults.values())
