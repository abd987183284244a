"""Clients that read slowly or not at all, that come in crowds, and that still send when they are
answered: real sockets, a fake engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from api_fakes import PATIENCE_S, FakeClient, Script, http_client, make_app, run, served, until
from places import SUPPORT
from server_settings import server_settings

from jitney.engine.common.key_file import digest_key
from jitney.engine.common.machine import raise_descriptor_limit
from jitney.engine.server.http import connections as connections_module
from jitney.engine.server.http import protocol
from jitney.engine.server.http.connections import Connections, connections_within
from jitney.engine.server.http.listen import listen
from jitney.engine.server.http.settings import ServerSettings

#: Bytes that a connection may have waiting: the transport's own mark, and a block.
_MOST_WAITING = 300_000
#: Bytes from which on more is not written to a connection.
_STUCK = 1 << 16
#: Some 400 kB as an answer.
_BIG: dict[str, Any] = {
    "model": "m",
    "prompt": "ab",
    "logprobs": 20,
    "max_tokens": 2000,
    "ignore_eos": True,
}
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


class _SmallBuffers(protocol._BoundedProtocol):
    """The system keeps little for a client that does not read; by default it is megabytes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        super().connection_made(transport)


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setattr(protocol, "_BoundedProtocol", _SmallBuffers)


@contextlib.contextmanager
def server(
    script: Script | None = None, **settings
) -> Iterator[tuple[FakeClient, Connections, int]]:
    engine = FakeClient(script, context_length=100_000, pages=8192)
    limits = server_settings(**settings)
    connections = Connections(limits)
    app = make_app(engine, **settings)
    with served(app, limits, connections, keep_alive_s=60) as (_, port):
        yield engine, connections, port


def connect(port: int, receive_buffer: int = 4096) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(PATIENCE_S)
    sock.connect(("127.0.0.1", port))
    return sock


def post(sock: socket.socket, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    sock.sendall(_HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data)


def read_all(sock: socket.socket) -> bytes:
    answer = b""
    while chunk := sock.recv(1 << 16):
        answer += chunk
    return answer


def lives(port: int) -> bool:
    with http_client(f"http://127.0.0.1:{port}") as client:
        return client.get("/livez").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_who_does_not_read_is_let_go_and_costs_little(stream):
    script = Script("x" * 2000, chunk=50)
    with server(script, write_timeout_s=0.5) as (engine, connections, port):
        socks = [connect(port) for _ in range(4)]
        for sock in socks:
            post(sock, _BIG | {"stream": stream})
        until(lambda: connections.waiting > _STUCK)
        most = 0
        deadline = time.monotonic() + 30
        while connections.n_open:
            assert time.monotonic() < deadline
            most = max(most, connections.waiting)
            time.sleep(0.01)
        assert most < len(socks) * _MOST_WAITING
        until(lambda: not engine.open)
        assert lives(port)
        for sock in socks:
            sock.close()


def test_who_reads_slowly_gets_everything():
    script = Script("x" * 2000, chunk=2000)
    with server(script, write_timeout_s=30.0) as (_, connections, port), connect(port) as sock:
        post(sock, _BIG)
        answer = bytearray()
        while not answer.endswith(b"0\r\n\r\n"):
            answer += sock.recv(1 << 15)
            time.sleep(0.002)
        assert len(answer) > 400_000 and connections.n_open == 1


def test_a_drain_does_not_wait_for_who_does_not_read(monkeypatch):
    monkeypatch.setattr(connections_module, "_HURRY_S", 0.3)
    script = Script("x" * 2000, chunk=50)
    with (
        server(script, write_timeout_s=60.0) as (engine, connections, port),
        connect(port) as sock,
    ):
        post(sock, _BIG | {"stream": True})
        until(lambda: connections.waiting > _STUCK)
        connections.hurry()
        until(lambda: not engine.open and not connections.n_open)


def test_all_that_waits_together_is_bounded():
    class Reader:
        has_unread = False
        key = ""

        def __init__(self, waiting: int):
            self.written = self.waiting = waiting
            self.dropped = False

        def drop(self) -> None:
            self.dropped = True

        def give_way(self) -> None:
            raise AssertionError("it is not idle")

        def leave(self) -> None:
            raise AssertionError("its key is accepted")

    async def look() -> list[bool]:
        connections = Connections(ServerSettings(), most_bytes=100)
        readers = [Reader(size) for size in (10, 60, 50, 30)]
        for reader in readers:
            connections.opened(reader)
        connections._look_around()
        assert connections.n_open == 3 and connections.waiting == 90
        return [reader.dropped for reader in readers]

    assert run(look()) == [False, True, False, False]


def test_connections_beyond_the_limit_are_told_so_and_probes_are_answered(monkeypatch):
    monkeypatch.setattr(connections_module, "SPARE", 2)
    with server(max_connections=2) as (_, connections, port):
        kept = [connect(port) for _ in range(2)]
        until(lambda: connections.n_open == 2)
        with connect(port) as third:
            post(third, {"model": "m", "prompt": "a"})
            head, _, body = read_all(third).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in head
            assert json.loads(body)["error"]["code"] == "too_many_connections"
        until(lambda: connections.n_open == 2)
        assert lives(port)
        until(lambda: connections.n_open == 2)
        more = [connect(port) for _ in range(2)]
        until(lambda: connections.n_open == 4)
        assert lives(port), "the first beyond the limit gives way"
        with contextlib.suppress(ConnectionError):
            assert more[0].recv(100) == b""
        for sock in [*kept, *more]:
            sock.close()
        until(lambda: not connections.n_open)
        with http_client(f"http://127.0.0.1:{port}") as client:
            assert client.get("/v1/models").status_code == 200


def read_answer(sock: socket.socket) -> bytes:
    """One stream, of a connection that stays open."""
    answer = b""
    while not answer.endswith(b"\r\n0\r\n\r\n"):
        piece = sock.recv(1 << 16)
        assert piece
        answer += piece
    return answer


def test_an_idle_connection_makes_room_for_a_new_client():
    """The one that has been idle for longest, and none that is at work."""
    gate = threading.Event()
    slow = Script("x" * 20, gate=gate, free=1)
    body: dict[str, Any] = {"model": "m", "prompt": "a", "max_tokens": 2}
    body |= {"ignore_eos": True, "stream": True}
    with server(max_connections=3) as (engine, connections, port):
        socks = [connect(port) for _ in range(3)]
        for sock in socks:
            post(sock, body)
            assert read_answer(sock).startswith(b"HTTP/1.1 200")
        engine.scripts = [slow]
        post(socks[0], body | {"max_tokens": 20})
        until(lambda: bool(engine.open))
        with connect(port) as fourth:
            post(fourth, body)
            assert read_answer(fourth).startswith(b"HTTP/1.1 200")
            assert socks[1].recv(100) == b"", "idle for longest"
            post(socks[2], body)
            assert read_answer(socks[2]).startswith(b"HTTP/1.1 200")
            gate.set()
            assert read_answer(socks[0]).startswith(b"HTTP/1.1 200")
        for sock in socks:
            sock.close()
        until(lambda: not connections.n_open)


_PROBE = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"


def probed(sock: socket.socket) -> bool:
    """Whether a probe is answered on this connection, which stays open."""
    sock.sendall(_PROBE)
    answer = b""
    while not answer.endswith(b"}"):
        answer += sock.recv(1 << 16)
    return answer.startswith(b"HTTP/1.1 200")


def test_idle_connections_give_way_however_many_they_are(monkeypatch):
    """Also those that came as all others had come and none had asked yet."""
    monkeypatch.setattr(connections_module, "SPARE", 2)
    with server(max_connections=4) as (_, connections, port):
        idle = [connect(port) for _ in range(6)]
        until(lambda: connections.n_open == 6)
        assert all([probed(sock) for sock in idle])
        for _ in range(3):
            with http_client(f"http://127.0.0.1:{port}") as client:
                reply = client.post("/v1/completions", json={"model": "m", "prompt": "a"})
                assert reply.status_code == 200
        assert connections.n_open <= 4
        for sock in idle:
            sock.close()


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp"], ids=["nothing", "half a head"])
def test_a_connection_that_asks_nothing_gives_way(sent: bytes, monkeypatch):
    """Once it has been open for a moment; and none that has an answer coming."""
    monkeypatch.setattr(connections_module, "_GRACE_S", 0.0)
    gate = threading.Event()
    script = Script("x" * 200, gate=gate, free=1)
    with (
        server(script, max_connections=2) as (engine, connections, port),
        connect(port) as busy,
    ):
        post(busy, _SHORT | {"max_tokens": 200, "ignore_eos": True})
        until(lambda: bool(engine.open))
        with connect(port) as silent, connect(port) as other:
            silent.sendall(sent)
            engine.script = Script("ab")
            post(other, _SHORT)
            assert read_answer(other).startswith(b"HTTP/1.1 200")
            with contextlib.suppress(ConnectionError):
                assert silent.recv(100) == b""
            gate.set()
            assert read_answer(busy).startswith(b"HTTP/1.1 200")
            assert connections.n_open == 2


def test_a_connection_beyond_the_limit_is_served_once_another_is_idle():
    gate = threading.Event()
    script = Script("x" * 20, gate=gate, free=1)
    with (
        server(script, max_connections=1) as (engine, _, port),
        connect(port) as first,
        connect(port) as second,
    ):
        post(first, _SHORT)
        until(lambda: bool(engine.open))
        assert probed(second)
        gate.set()
        assert read_answer(first).startswith(b"HTTP/1.1 200")
        post(second, _SHORT)
        assert read_answer(second).startswith(b"HTTP/1.1 200")
        assert first.recv(100) == b""


def test_probes_are_answered_while_all_connections_are_at_work(monkeypatch):
    """And while more come that say nothing."""
    monkeypatch.setattr(connections_module, "SPARE", 3)
    script = Script("x" * 500, gate=threading.Event(), free=1)
    with server(script, max_connections=2) as (engine, connections, port):
        socks = [connect(port) for _ in range(2)]
        for sock in socks:
            post(sock, _SHORT | {"max_tokens": 500, "ignore_eos": True})
        until(lambda: len(engine.open) == 2)
        socks += [connect(port) for _ in range(10)]
        until(lambda: connections.n_open == 5)
        for path in ("/livez", "/readyz", "/ping", "/metrics"):
            with http_client(f"http://127.0.0.1:{port}") as client:
                assert client.get(path).status_code == 200
                full = client.post("/v1/completions", json={"model": "m", "prompt": "a"})
                assert full.status_code == 503
                assert full.json()["error"]["code"] == "too_many_connections"
        assert len(engine.open) == 2
        for sock in socks:
            sock.close()
        until(lambda: not engine.open)


def generating(sock: socket.socket, key: str = "") -> None:
    """Begin a long stream."""
    body = json.dumps(_SHORT | {"max_tokens": 500, "ignore_eos": True}).encode()
    shown = f"Authorization: Bearer {key}\r\n".encode() if key else b""
    sock.sendall(_HEAD + shown + b"Content-Length: %d\r\n\r\n" % len(body) + body)


@pytest.mark.parametrize("by", ["key", "address"])
def test_no_client_takes_all_connections(by: str):
    """Three quarters are the most; what another one asks is answered."""
    keys = {"api_keys": (digest_key("much"), digest_key("little"))} if by == "key" else {}
    script = Script("x" * 500, gate=threading.Event(), free=1)
    with server(script, max_connections=4, **keys) as (engine, _, port):
        socks = [connect(port) for _ in range(3)]
        for sock in socks:
            generating(sock, "much" if keys else "")
        until(lambda: len(engine.open) == 3)
        much, little = (
            {"authorization": f"Bearer {name}"} if keys else {} for name in ("much", "little")
        )
        source = "" if keys else "127.0.0.2"
        url = f"http://127.0.0.1:{port}/v1/models"
        assert httpx.get(url, headers=much, trust_env=False).status_code == 429
        transport = httpx.HTTPTransport(local_address=source or None, trust_env=False)
        with httpx.Client(transport=transport) as other:
            assert other.get(url, headers=little).status_code == 200
        socks.pop().close()
        until(lambda: len(engine.open) == 2)
        assert httpx.get(url, headers=much, trust_env=False).status_code == 200
        for sock in socks:
            sock.close()
        until(lambda: not engine.open)


#: One short answer of a connection that stays open.
_SHORT: dict[str, Any] = {"model": "m", "prompt": "a", "max_tokens": 2, "stream": True}


def send_unread(sock: socket.socket, connection: protocol._BoundedProtocol) -> None:
    """Called on the server's loop, which cannot read meanwhile: a request comes."""
    post(sock, _SHORT)
    poll = select.poll()
    poll.register(connection._bare.get_extra_info("socket"), select.POLLIN)
    assert poll.poll(30_000)


def test_a_request_that_comes_just_before_an_idle_connection_is_closed_is_answered(monkeypatch):
    clients: list[socket.socket] = []

    class Racing(_SmallBuffers):
        def timeout_keep_alive_handler(self) -> None:
            if clients:
                send_unread(clients.pop(), self)
            super().timeout_keep_alive_handler()

    monkeypatch.setattr(protocol, "_BoundedProtocol", Racing)
    settings = ServerSettings()
    engine = FakeClient()
    with (
        served(make_app(engine), settings, Connections(settings), keep_alive_s=1) as (_, port),
        connect(port) as sock,
    ):
        post(sock, _SHORT)
        assert read_answer(sock).startswith(b"HTTP/1.1 200")
        clients.append(sock)
        assert read_answer(sock).startswith(b"HTTP/1.1 200")
        assert not clients and len(engine.requests) == 2


def test_a_request_that_comes_just_after_finds_an_end_and_no_reset():
    """Nobody has begun with it, so that it may be sent again."""
    settings = ServerSettings()
    engine = FakeClient()
    connections = Connections(settings)
    with served(make_app(engine), settings, connections, keep_alive_s=1) as (_, port):
        with connect(port) as sock:
            post(sock, _SHORT)
            assert read_answer(sock).startswith(b"HTTP/1.1 200")
            assert sock.recv(1, socket.MSG_PEEK) == b"", "closed as idle"
            post(sock, _SHORT)
            assert read_all(sock) == b""
        until(lambda: not connections.n_open)
        assert len(engine.requests) == 1


def test_who_has_just_sent_a_request_does_not_make_room():
    """The next one that is idle does."""
    clients: list[socket.socket] = []

    class Racing(Connections):
        def opened(self, connection: Any) -> None:
            if clients:
                oldest: Any = next(iter(self._idle))
                send_unread(clients.pop(), oldest)
            super().opened(connection)

    settings = ServerSettings(max_connections=2)
    engine = FakeClient()
    connections = Racing(settings)
    app = make_app(engine, max_connections=2)
    with served(app, settings, connections, keep_alive_s=60) as (_, port):
        oldest, next_one = connect(port), connect(port)
        for sock in (oldest, next_one):
            post(sock, _SHORT)
            assert read_answer(sock).startswith(b"HTTP/1.1 200")
        clients.append(oldest)
        with connect(port) as third:
            post(third, _SHORT)
            assert read_answer(third).startswith(b"HTTP/1.1 200")
        assert read_answer(oldest).startswith(b"HTTP/1.1 200")
        assert next_one.recv(100) == b""
        oldest.close()
        next_one.close()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (_HEAD + b"Content-Length: %d\r\n\r\n", 413),
        (_HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n", 413),
        (_HEAD + b"Host: y\r\nContent-Length: %d\r\n\r\n", 400),
        (_HEAD.replace(b"json", b"xml") + b"Content-Length: %d\r\n\r\n", 415),
        (_HEAD + b"X: y\r\n" * 300 + b"Z: z\r\nContent-Length: %d\r\n\r\n", 431),
        (_HEAD.replace(b"POST", b"GET") + b"Content-Length: %d\r\n\r\n", 405),
    ],
    ids=["length", "chunked", "two hosts", "type", "headers", "method"],
)
def test_a_refusal_reaches_who_writes_all_before_reading(head, status):
    size = 30 << 20
    with server(body_limit=10_000) as (_, connections, port):
        with connect(port) as sock:
            sock.sendall(head % size + b"x" * size)
            answer = read_all(sock)
            assert answer.startswith(b"HTTP/1.1 %d" % status)
        until(lambda: not connections.n_open)


def test_what_is_thrown_away_is_bounded(monkeypatch):
    monkeypatch.setattr(protocol, "_DISCARDED_BYTES", 1 << 20)
    monkeypatch.setattr(protocol._BoundedProtocol, "_left_to_discard", 1 << 20)
    monkeypatch.setattr(protocol, "_DISCARDING_S", 0.5)
    with server(body_limit=10_000) as (_, connections, port):
        with connect(port) as flood, pytest.raises(OSError):
            flood.sendall(_HEAD + b"Content-Length: %d\r\n\r\n" % (1 << 30))
            for _ in range(1000):
                flood.sendall(b"x" * (1 << 20))
        with connect(port) as drip, pytest.raises(OSError):
            drip.sendall(_HEAD + b"Content-Length: 1000000\r\n\r\n")
            for _ in range(1000):
                drip.sendall(b"x")
                time.sleep(0.02)
        until(lambda: not connections.n_open)


def test_parts_of_an_answer_do_not_wait_for_each_other(monkeypatch):
    """On the socket that `jitney serve` listens on."""
    options: list[int] = []

    class Looking(_SmallBuffers):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            sock = transport.get_extra_info("socket")
            options.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(protocol, "_BoundedProtocol", Looking)
    with listen("127.0.0.1", 0) as bound, served(make_app(), sockets=[bound]) as (_, port):
        assert lives(port) and options == [1]


def test_the_limit_of_open_files_is_raised_and_said_when_it_is_low(caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
        assert raise_descriptor_limit() >= min(hard if hard >= 0 else 1 << 20, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert connections_within(1024, 5000) == 1024 and not caplog.text
    assert connections_within(1024, 300) == 28
    assert "at most 28 connections instead of 1024" in caplog.text


#: A server as `jitney serve` has it, that may have few files open; prints its port.
_WITH_FEW_FILES = """
import asyncio, resource, sys
sys.path.append(sys.argv[1])
from api_fakes import make_app
from jitney.engine.config.schema import ServerSection
from jitney.engine.server.http.http_server import HttpServer
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
http = HttpServer.of(ServerSection(port=0))
server = http.serve_app(make_app())
with http.listening():
    print(http.bound.getsockname()[1], flush=True)
    asyncio.run(server.serve(sockets=[http.bound]))
"""


def test_more_connections_than_files_lock_nobody_out():
    """They come at once, while the server looks elsewhere."""
    command = [sys.executable, "-P", "-c", _WITH_FEW_FILES, str(SUPPORT)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            port = int(process.stdout.readline())
            until(lambda: lives(port))
            process.send_signal(signal.SIGSTOP)
            crowd = [connect(port) for _ in range(600)]
            process.send_signal(signal.SIGCONT)
            assert lives(port)
            for sock in crowd:
                sock.close()
        finally:
            process.kill()
        assert "out of system resource" not in process.stderr.read()
