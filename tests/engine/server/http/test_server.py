"""The endpoint behind a real server: sockets, slow and broken clients, the openai client."""

from __future__ import annotations

import json
import socket
import time

import openai
import pytest
from api_fakes import PATIENCE_S, FakeClient, Script, http_client, make_app, served, until
from server_settings import server_settings

from jitney.engine.common.errors import ErrorInfo
from jitney.engine.common.key_file import digest_key

PROMPT = {"model": "m", "prompt": "ab"}
QUICK = {"read_timeout_s": 0.3, "body_limit": 10_000}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def shared():
    """One server for the tests that do not stop it; its engine forgets between tests."""
    engine = FakeClient()
    with served(make_app(engine, **QUICK), server_settings(**QUICK)) as (url, _):
        yield engine, url


@pytest.fixture
def engine(shared):
    engine, _ = shared
    engine.__init__(Script("Hello, wörld!"))
    return engine


@pytest.fixture
def url(shared, engine):
    return shared[1]


def talk(url: str, data: bytes) -> bytes:
    """Send bytes, return all that comes until the server closes."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as sock:
        sock.sendall(data)
        answer = b""
        while chunk := sock.recv(65536):
            answer += chunk
        return answer


def refusal(answer: bytes) -> tuple[int, dict]:
    """Status and error of a raw answer that closes its connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower() and b"x-request-id: " in head.lower()
    return int(head.split(b" ")[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"garbage\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (HEAD + b"Content-Length: -1\r\n\r\n", 400),
        (HEAD + b"Content-Length: abc\r\n\r\n", 400),
        (HEAD + b"Content-Length: +5\r\n\r\n", 400),
        (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (HEAD + b"Bad Name: x\r\n\r\n", 400),
        (HEAD + b"X: a\0b\r\n\r\n", 400),
        (HEAD + b"X: " + b"y" * 300_000 + b"\r\n\r\n", 431),
        (HEAD + b"X: y\r\n" * 60_000 + b"\r\n", 431),
        (HEAD + b"Content-Length: 10001\r\n\r\n" + b"x" * 10_001, 413),
        (HEAD + b"Content-Length: 99999999\r\n\r\n", 413),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"3e8\r\n" + b"x" * 1000 + b"\r\n", 408),
        (
            HEAD
            + b"Transfer-Encoding: chunked\r\n\r\n"
            + b"2711\r\n"
            + b"x" * 10_001
            + b"\r\n0\r\n\r\n",
            413,
        ),
        (HEAD + b"Content-Length: 50\r\n\r\n{", 408),
        (HEAD, 408),
        (b"", 408),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_broken_and_slow_requests_are_answered_and_closed(url, engine, data, status):
    got, error = refusal(talk(url, data))
    assert got == status
    assert set(error) == {"message", "type", "param", "code"} and not engine.requests


def test_a_head_that_drips_is_cut_off(url):
    host, port = url.removeprefix("http://").split(":")
    with (
        socket.create_connection((host, int(port)), timeout=20) as sock,
        pytest.raises(OSError),
    ):
        for byte in HEAD * 100:
            sock.sendall(bytes([byte]))
            time.sleep(0.02)


def test_connections_are_kept_and_reused(url):
    with http_client(url) as client:
        for _ in range(3):
            answer = client.post("/v1/completions", json=PROMPT)
            assert answer.status_code == 200 and "connection" not in answer.headers
            time.sleep(0.4)  # longer than a head may take: between requests other rules hold


def test_a_storm_of_cancellations():
    engine = FakeClient(Script(hang=True))
    with served(make_app(engine)) as (_, port):
        body = json.dumps(PROMPT).encode()
        data = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
        for sock in socks:
            sock.sendall(data)
        until(lambda: len(engine.open) == 200)
        for sock in socks:
            sock.close()
        until(lambda: not engine.open)
        assert sorted(abort[0] for abort in engine.aborts) == sorted(
            request.id for request in engine.requests
        )


def openai_client(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=url + "/v1", api_key=key, http_client=openai.DefaultHttpxClient(trust_env=False)
    )


@pytest.fixture
def client(url):
    with openai_client(url) as client:
        yield client


def test_openai_client_streams_to_a_whole_answer(client):
    asked: list = [{"role": "user", "content": "hi"}]
    with client.chat.completions.stream(model="m", messages=asked) as events:
        assert events.get_final_completion().choices[0].message.content == "Hello, wörld!"


def test_openai_client_retries_what_is_refused_for_now(client, engine):
    full = Script(error=ErrorInfo("queue_full", "full", retry_after=0.3))
    engine.scripts = [full, full]
    answer = client.with_options(max_retries=2).completions.create(model="m", prompt="ab")
    assert answer.choices[0].text == "Hello, wörld!" and len(engine.requests) == 3
    engine.scripts = [full]
    with pytest.raises(openai.RateLimitError) as refused:
        client.with_options(max_retries=0).completions.create(model="m", prompt="ab", stream=True)
    assert (
        refused.value.code == "queue_full"
        and refused.value.response.headers["retry-after-ms"] == "300"
    )


def test_openai_client_sees_an_error_inside_a_stream(client, engine):
    engine.script = Script("abcdef", fail_after=2, delay_s=0.01)
    got = ""
    with pytest.raises(openai.APIError, match="the engine stopped"):
        for chunk in client.completions.create(model="m", prompt="ab", stream=True):
            got += chunk.choices[0].text
    assert got == "ab"


def test_openai_client_with_a_key():
    app = make_app(api_keys=(digest_key("sekrit"),))
    with (
        served(app) as (url, _),
        openai_client(url, "sekrit") as good,
        openai_client(url, "nope") as bad,
    ):
        assert good.completions.create(model="m", prompt="ab").choices[0].text
        with pytest.raises(openai.AuthenticationError):
            bad.completions.create(model="m", prompt="ab")
