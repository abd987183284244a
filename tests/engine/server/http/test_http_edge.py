"""HTTP as clients speak it that are seldom seen: targets in absolute form, sides that are ended,
HTTP/1.0 that keeps its connection. Real sockets, a fake engine.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator

import pytest
from api_fakes import FakeClient, Script, make_app, served, until
from server_settings import server_settings

from jitney.engine.server.http import protocol

FIELDS = {"model": "m", "prompt": "ab", "max_tokens": 200}
BODY = json.dumps(FIELDS).encode()
STREAM = json.dumps(FIELDS | {"stream": True}).encode()


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[FakeClient, int]]:
    """One server for all; its engine forgets between tests."""
    engine = FakeClient()
    settings = server_settings(allowed_hosts=("x", "here"))
    with served(make_app(engine, allowed_hosts=("x", "here")), settings) as (_, port):
        yield engine, port


@pytest.fixture
def engine(shared: tuple[FakeClient, int]) -> FakeClient:
    shared[0].__init__(Script("hello"))
    return shared[0]


@pytest.fixture
def port(shared: tuple[FakeClient, int], engine: FakeClient) -> int:
    return shared[1]


def post(body: bytes, version: str = "1.1", extra: str = "") -> bytes:
    head = (
        f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"{extra}Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=120)


def read_all(sock: socket.socket) -> bytes:
    answer = b""
    while chunk := sock.recv(65536):
        answer += chunk
    return answer


def final(answer: bytes) -> bytes:
    """Without the interim answers before it."""
    return re.sub(rb"\A(HTTP/1\.1 100 Continue\r\n\r\n)+", b"", answer)


def ask(port: int, request: bytes, *, ends: bool = False) -> bytes:
    """All that comes until the server closes. ends: the client's side is, right after this."""
    with connect(port) as sock:
        sock.sendall(request)
        if ends:
            sock.shutdown(socket.SHUT_WR)
        return read_all(sock)


def get(target: str, host: str = "x", version: str = "1.1") -> bytes:
    return (f"GET {target} HTTP/{version}\r\nHost: {host}\r\nConnection: close\r\n\r\n").encode()


@pytest.mark.parametrize(
    "target", ["http://x/livez", "HTTP://here:80/livez?a=b", "https://x/livez"]
)
def test_targets_in_absolute_form_are_served(port: int, target: str):
    assert ask(port, get(target)).startswith(b"HTTP/1.1 200 ")


def test_an_absolute_target_without_a_path_is_the_root(port: int):
    for target in ("http://x", "http://x?a=b"):
        assert b'"server":"jitney"' in ask(port, get(target))


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://evil.example/livez", "x", 421),
        ("http://x/livez", "evil.example", 200),
        ("http://user@x/livez", "x", 400),
        ("http:///livez", "x", 400),
        ("http://x:99999999/livez", "x", 400),
        ("ftp://x/livez", "x", 404),
        ("http://x/nope", "x", 404),
    ],
)
def test_the_host_of_an_absolute_target_is_the_one_that_counts(
    port: int, target: str, host: str, status: int
):
    assert ask(port, get(target, host)).startswith(b"HTTP/1.1 %d " % status)


def test_two_hosts_are_refused_beside_an_absolute_target_too(port: int):
    request = b"GET http://x/livez HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n"
    assert ask(port, request).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("body", [BODY, STREAM])
@pytest.mark.parametrize("wait_s", [0.0, 0.3])
def test_a_client_that_ends_its_side_gets_its_answer(
    engine: FakeClient, port: int, version: str, body: bytes, wait_s: float
):
    engine.script = Script("hello", first_delay_s=wait_s)
    answer = final(ask(port, post(body, version), ends=True))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"hello" in answer or answer.count(b'"text":"') >= 5
    assert (b"[DONE]" in answer) == (body is STREAM)


def test_all_requests_before_the_end_are_answered(engine: FakeClient, port: int):
    answer = ask(port, post(BODY) * 3, ends=True)
    assert answer.count(b"HTTP/1.1 200 ") == 3 and len(engine.requests) == 3


@pytest.mark.parametrize("request_", [b"", b"GET /livez HT", post(BODY)[:-1]])
def test_half_a_request_before_the_end_is_none(engine: FakeClient, port: int, request_: bytes):
    assert ask(port, request_, ends=True) == b"" and not engine.requests


@pytest.mark.parametrize(("version", "body"), [("1.1", BODY), ("1.1", STREAM), ("1.0", BODY)])
@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_gives_its_seat_back(
    engine: FakeClient,
    port: int,
    version: str,
    body: bytes,
    begun: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(protocol, "_OLD_PATIENCE_S", 0.3)
    engine.script = Script("x" * 200, gate=threading.Event(), free=5 if begun else 0)
    with connect(port) as sock:
        sock.sendall(post(body, version))
        until(lambda: engine.open)
        if begun and body is STREAM:
            assert sock.recv(100)
    until(lambda: not engine.open)
    assert engine.aborts


def test_one_that_ends_its_side_and_leaves_later_is_noticed(engine: FakeClient, port: int):
    engine.script = Script(hang=True)
    with connect(port) as sock:
        sock.sendall(post(BODY))
        sock.shutdown(socket.SHUT_WR)
        until(lambda: engine.open)
        assert sock.recv(100).startswith(b"HTTP/1.1 100 Continue\r\n")
        assert engine.open
    until(lambda: not engine.open)


def test_http_1_0_keeps_a_connection_that_is_asked_for(engine: FakeClient, port: int):
    with connect(port) as sock:
        for _ in range(3):
            sock.sendall(post(BODY, "1.0", "Connection: Keep-Alive\r\n"))
            head, _, rest = read_one(sock)
            assert b"connection: keep-alive" in head and b"transfer-encoding" not in head
            assert b"hello" in rest
        sock.sendall(post(BODY, "1.0"))
        assert b"connection: close" in read_all(sock).lower()
    assert len(engine.requests) == 4


def read_one(sock: socket.socket) -> tuple[bytes, bytes, bytes]:
    """An answer with a length."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += sock.recv(65536)
    head, gap, rest = data.partition(b"\r\n\r\n")
    match = re.search(rb"content-length: (\d+)", head)
    assert match
    while len(rest) < int(match[1]):
        rest += sock.recv(65536)
    return head, gap, rest


@pytest.mark.parametrize("options", ["close", "keep-alive, close", ""])
def test_http_1_0_closes_otherwise(port: int, options: str):
    extra = f"Connection: {options}\r\n" if options else ""
    assert b"connection: close" in ask(port, post(BODY, "1.0", extra)).lower()


def test_an_http_1_0_stream_ends_with_its_connection(port: int):
    answer = ask(port, post(STREAM, "1.0", "Connection: keep-alive\r\n"))
    assert b"connection: close" in answer.lower() and b"chunked" not in answer
    assert answer.endswith(b"data: [DONE]\n\n")
