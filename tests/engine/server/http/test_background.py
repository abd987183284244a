"""Requests in the background over HTTP: who may ask for that, and that a drain does not wait."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from api_fakes import FakeClient, Reply, Script, call, make_app, run

from jitney.engine.common.key_file import digest_key

PROMPT = {"prompt": "a", "max_tokens": 3}
KEYS: dict[str, Any] = {"api_keys": (digest_key("u"),), "admin_keys": (digest_key("a"),)}


def ask(app: Any, *values: str, key: str = "", path: str = "/v1/completions") -> Reply:
    """values: of the header, each time that it is given."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    headers += [(b"x-jitney-background", value.encode()) for value in values]
    if key:
        headers.append((b"authorization", b"Bearer " + key.encode()))
    return run(call(app, path, PROMPT, raw_headers=headers))


def test_an_administrator_may_say_that_nobody_waits():
    client = FakeClient()
    app = make_app(client, **KEYS)
    assert ask(app, "1", key="a").status == 200
    assert ask(app, key="a").status == 200
    assert [request.background for request in client.requests] == [True, False]


def test_a_user_may_not():
    client = FakeClient()
    app = make_app(client, **KEYS)
    for value in ("1", "0", "x"):
        reply = ask(app, value, key="u")
        assert (reply.status, reply.error["code"]) == (403, "admin_key_needed")
        assert "x-jitney-background" in reply.error["message"]
    assert (ask(app, "1").status, ask(app, "1", key="wrong").status) == (401, 401)
    assert not client.requests


@pytest.mark.parametrize(("key", "counts"), [("a", True), ("u", False)])
def test_an_administrator_may_say_that_another_engine_had_admitted_it(key: str, counts: bool):
    """More are read, too, than while the predicted wait is too long."""
    client = FakeClient(max_predicted_wait_s=1.0)
    client.counters.predicted_wait = 2.0
    headers = {"x-jitney-admitted": "1", "authorization": f"Bearer {key}"}
    app = make_app(client, **KEYS)
    reply = run(call(app, "/v1/completions", PROMPT, headers=headers))
    assert reply.status == 200
    assert [request.admitted for request in client.requests] == [counts]
    most = [app.state.service._most_open(client.info, admitted=flag) for flag in (False, True)]
    assert most[0] < most[1]


def test_without_keys_everybody_is_an_administrator():
    client = FakeClient()
    assert ask(make_app(client), "1").status == 200
    assert client.requests[0].background


@pytest.mark.parametrize("values", [("0",), ("",), ("true",), ("1", "1"), ("x" * 5000,)])
def test_other_values_are_refused(values: tuple[str, ...]):
    client = FakeClient()
    reply = ask(make_app(client), *values)
    assert reply.status == 400 and "x-jitney-background must be 1" in reply.error["message"]
    assert len(reply.body) < 1000 and not client.requests


def test_what_people_wait_for_is_measured_without_it():
    client = FakeClient(Script("abc"))
    app = make_app(client)
    ask(app, "1")
    ask(app)
    text = app.state.service.metrics.render().decode()
    assert "jitney_ttft_seconds_count 1.0" in text


async def test_a_drain_ends_it_at_once_and_waits_for_people():
    gate = threading.Event()
    client = FakeClient(Script("x" * 10, gate=gate))
    app = make_app(client)
    client.scripts = [Script(hang=True)]
    headers = {"x-jitney-background": "1"}
    line = asyncio.create_task(call(app, "/v1/completions", PROMPT, headers=headers))
    while not client.open:
        await asyncio.sleep(0)
    person = asyncio.create_task(call(app, "/v1/completions", PROMPT))
    while len(client.open) < 2:
        await asyncio.sleep(0)
    app.state.service.begin_drain()
    refused = await asyncio.wait_for(line, 60)
    assert not person.done()
    gate.set()
    await asyncio.wait_for(app.state.service.drained(), 60)
    assert not client.open
    answered = await person
    assert (refused.status, refused.error["code"]) == (503, "draining")
    assert answered.status == 200
