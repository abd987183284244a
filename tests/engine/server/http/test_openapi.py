"""The document of the routes: that it has them all, that its schemas are the models', and that the
server keeps what it promises when it is sent whatever the document allows, and more.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from api_fakes import FakeClient, Script, call, make_app, run, served
from pydantic import TypeAdapter

from jitney.engine.common.errors import RequestError
from jitney.engine.server.chat.llamacpp.bodies import (
    DetokenizeAnswer,
    TemplateAnswer,
    TokenizeAnswer,
)
from jitney.engine.server.chat.schema import ChatBody, CompletionBody
from jitney.engine.server.http import answers
from jitney.engine.server.http.routes import ROUTES
from jitney.engine.server.http.routing import HttpRoute, Role
from jitney.engine.server.http.settings import digest_key

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
        wanted.setdefault(path_of(route), set()).update(route.methods)
    assert methods == wanted
    for route in ROUTES:
        [method] = route.methods
        operation = document["paths"][path_of(route)][method.lower()]
        assert operation["summary"] == route.summary
        assert (operation["security"] == []) == (route.role is Role.ANYBODY)
        assert ("requestBody" in operation) == (route.body is not None)
        assert route.body is not None or not route.generates
        queried = {
            each["name"] for each in operation.get("parameters", []) if each["in"] == "query"
        }
        assert queried == set(route.query.model_fields if route.query else ())
    assert document["openapi"].startswith("3.1")


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_every_schema_is_its_models(body: type):
    own = TypeAdapter(body).json_schema(ref_template="#/components/schemas/{model}")
    named = own.pop("$defs") | {body.__name__: own}
    schemas = fetched()["components"]["schemas"]
    assert {name: schemas[name] for name in named} == named
    assert set(named[body.__name__]["properties"]) > set(body.model_fields)


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


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        (
            "/v1/completions",
            {"prompt": ["a", "b"], "n": 2, "logprobs": 2, "echo": True, "return_token_ids": True},
            answers.CompletionAnswer,
        ),
        ("/v1/completions", {"prompt": "a"}, answers.CompletionAnswer),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "logprobs": True,
                "top_logprobs": 2,
                "return_token_ids": True,
            },
            answers.ChatAnswer,
        ),
        ("/tokenize", {"prompt": "hé", "return_token_strs": True}, TokenizeAnswer),
        ("/tokenize", {"content": "hé", "with_pieces": True}, TokenizeAnswer),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}, TokenizeAnswer),
        ("/detokenize", {"tokens": [65]}, DetokenizeAnswer),
        ("/apply-template", {"messages": [{"role": "user", "content": "a"}]}, TemplateAnswer),
    ],
)
def test_answers_have_the_form_that_is_described(path: str, body: dict, model: type):
    reply = run(call(make_app(FakeClient(Script(text="hé"))), path, {"model": "m"} | body))
    assert reply.status == 200
    TypeAdapter(model).validate_json(reply.body)


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
        found = fuzz_script().Fuzzer(url).run(150)
    assert found.cases >= 125
    assert {status for _, status in found.statuses} >= {200, 400}
    assert found.statuses["POST /v1/embeddings", 200] > 0
    assert not found.faults, "\n".join(found.faults.values())
