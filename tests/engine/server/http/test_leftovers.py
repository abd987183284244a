"""What is left of requests that are over: nothing that only a full garbage collection would find,
which comes once a minute.
"""

from __future__ import annotations

import gc
import json
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from api_fakes import FakeClient, Script, make_app, served, until
from leftovers import garbage

from jitney.engine.common.errors import ErrorInfo
from jitney.engine.server.http.connections import Connections
from jitney.engine.server.http.settings import ServerSettings

_BODY = {"model": "m", "prompt": "abc", "max_tokens": 40, "ignore_eos": True}
_STREAM = _BODY | {"stream": True}
_CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
_ROOMS = ("jitney", "uvicorn", "starlette", "h11", "asyncio")
_TEXT = "some words " * 4


@contextmanager
def garbage_of_requests() -> Iterator[Counter[str]]:
    gc.collect()
    gc.freeze()  # what other tests made, and a thread of theirs may let go of meanwhile
    try:
        with garbage(*_ROOMS) as found:
            yield found
    finally:
        gc.unfreeze()


def ask(port: int, body: object, path: str, leave: bool) -> None:
    """Send a request, and read its answer to the end or leave after the first piece."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=120) as sock:
        sock.sendall(head.encode() + data)
        while sock.recv(100) and not leave:
            pass


def leave_at_once(port: int, body: object, path: str, engine: FakeClient) -> None:
    """Send a request and leave when the engine has it."""
    before = len(engine.requests)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=120) as sock:
        sock.sendall(head.encode() + data)
        until(lambda: len(engine.requests) > before)


_FAILS = Script(_TEXT, fail_after=3)
_REFUSES = Script(error=ErrorInfo("queue_full", "full"))
_SLOW = Script(_TEXT, delay_s=0.02)
_COMPLETIONS = "/v1/completions"

#: What is asked, of an engine that does what, where, and whether the client leaves early.
_CASES = {
    "whole": (_BODY, Script(_TEXT), _COMPLETIONS, False),
    "stream": (_STREAM, Script(_TEXT), _COMPLETIONS, False),
    "several": (_STREAM | {"n": 3, "logprobs": 2}, Script(_TEXT), _COMPLETIONS, False),
    "stop string": (_BODY | {"stop": "w"}, Script(_TEXT), _COMPLETIONS, False),
    "scored prompt": (_BODY | {"echo": True, "logprobs": 2}, Script(_TEXT), _COMPLETIONS, False),
    "chat": (_CHAT, Script(_TEXT), "/v1/chat/completions", False),
    "scored chat": (
        _CHAT | {"logprobs": True, "top_logprobs": 2},
        Script(_TEXT),
        "/v1/chat/completions",
        False,
    ),
    "refused here": (_BODY | {"n": -1}, Script(_TEXT), _COMPLETIONS, False),
    "no JSON": (b"{", Script(_TEXT), _COMPLETIONS, False),
    "no such route": (_BODY, Script(_TEXT), "/v1/nothing", False),
    "refused by the engine": (_BODY, _REFUSES, _COMPLETIONS, False),
    "fails": (_BODY, _FAILS, _COMPLETIONS, False),
    "fails in a stream": (_STREAM, _FAILS, _COMPLETIONS, False),
    "left a stream": (_STREAM, _SLOW, _COMPLETIONS, True),
}


@pytest.mark.parametrize("name", _CASES)
def test_a_request_that_is_over_leaves_no_cycle(name):
    body, script, path, leave = _CASES[name]
    engine = FakeClient(script)
    settings = ServerSettings()
    connections = Connections(settings)
    with served(make_app(engine), settings, connections) as (_, port):
        ask(port, body, path, leave)  # what is made once is made now
        until(lambda: not connections.n_open and not engine.open)
        with garbage_of_requests() as found:
            for _ in range(3):
                ask(port, body, path, leave)
            until(lambda: not connections.n_open and not engine.open)
    assert not found


@pytest.mark.parametrize("body", [_BODY, _STREAM], ids=["whole", "stream"])
def test_a_client_that_leaves_before_its_answer_leaves_no_cycle(body):
    engine = FakeClient(Script(_TEXT, first_delay_s=60.0))
    settings = ServerSettings()
    connections = Connections(settings)
    with served(make_app(engine), settings, connections) as (_, port):
        leave_at_once(port, body, _COMPLETIONS, engine)
        until(lambda: not connections.n_open and not engine.open)
        with garbage_of_requests() as found:
            for _ in range(3):
                leave_at_once(port, body, _COMPLETIONS, engine)
            until(lambda: not connections.n_open and not engine.open)
    assert not found
