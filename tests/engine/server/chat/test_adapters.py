"""Adapters over HTTP: a request asks for one by its model's name."""

from __future__ import annotations

from typing import Any

import pytest
from api_fakes import FakeClient, call, make_app, run
from openai.types import Model

USER = {"role": "user", "content": "ab"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "ab"},
    "/v1/responses": {"input": "ab"},
    "/v1/messages": {"messages": [USER], "max_tokens": 4},
    "/v1/embeddings": {"input": "ab"},
    "/api/chat": {"messages": [USER], "stream": False},
    "/api/generate": {"prompt": "ab", "stream": False},
    "/api/embed": {"input": "ab"},
}


@pytest.fixture
def client() -> FakeClient:
    return FakeClient(adapters=("fr", "de"))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("model", "number"), [("m", 0), ("fr", 1), ("de", 2)])
def test_every_route_answers_with_the_adapter_that_the_model_names(
    client: FakeClient, path: str, model: str, number: int
):
    reply = run(call(make_app(client), path, BODIES[path] | {"model": model}))
    assert reply.status == 200, reply.body
    assert reply.json()["model"] == model
    assert [request.adapter for request in client.requests] == [number]


@pytest.mark.parametrize("path", BODIES)
def test_one_that_is_not_there_is_a_model_that_is_not_there(client: FakeClient, path: str):
    reply = run(call(make_app(client), path, BODIES[path] | {"model": "es"}))
    assert reply.status == 404 and not client.requests


def test_adapters_are_listed_with_the_model_that_they_change(client: FakeClient):
    app = make_app(client)
    cards = run(call(app, "/v1/models", method="GET")).json()["data"]
    assert [(card["id"], card.get("parent")) for card in cards] == [
        ("m", None),
        ("fr", "m"),
        ("de", "m"),
    ]
    assert [Model.model_validate(card).id for card in cards] == ["m", "fr", "de"]
    assert run(call(app, "/v1/models/fr", method="GET")).json()["root"] == "fr"
    assert run(call(app, "/v1/models/es", method="GET")).status == 404
    assert run(call(app, "/version", method="GET")).json()["adapters"] == ["fr", "de"]
