"""A server on 127.0.0.1 that receives webhooks at the end of batches and jobs."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Message:
    headers: dict[str, str]
    body: bytes
    #: Whether the response was 200.
    taken: bool

    @property
    def key(self) -> str:
        return self.headers["webhook-id"]


class Receiver(ThreadingHTTPServer):
    """Records all messages, and answers some of them with a 500."""

    daemon_threads = True
    #: Most connections that wait to be accepted. The system drops connections beyond it, which the
    #: client retries a second later: 32 messages arrive at once.
    request_queue_size = 128

    def __init__(self, fails: Callable[[int], bool]):
        """fails: whether the message with that number, counted from 1, is answered with a 500."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self._fails = fails
        self._lock = threading.Lock()
        self.came: list[Message] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hooks/"

    @property
    def taken(self) -> list[Message]:
        return [message for message in self.came if message.taken]

    def take(self, headers: dict[str, str], body: bytes) -> bool:
        with self._lock:
            accepted = not self._fails(len(self.came) + 1)
            self.came.append(Message(headers, body, accepted))
        return accepted


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        accepted = self.server.take(dict(self.headers), body)
        self.send_response(200 if accepted else 500)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def receiving(fails: Callable[[int], bool]) -> Iterator[Receiver]:
    with Receiver(fails) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)


class Dripper(socketserver.ThreadingTCPServer):
    """Answers each message with headers that never end, a byte at a time."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Drip)
        #: Set when the server stops.
        self.over = threading.Event()
        #: Number of accepted connections, and of those that the client has closed.
        self.came = self.ended = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hooks/"


class _Drip(socketserver.BaseRequestHandler):
    server: Dripper

    def handle(self) -> None:
        self.server.came += 1
        try:
            self.request.sendall(b"HTTP/1.1 200 OK\r\nx-slow: ")
            while not self.server.over.wait(0.02):
                self.request.sendall(b"x")
        except OSError:
            self.server.ended += 1


@contextmanager
def dripping() -> Iterator[Dripper]:
    with Dripper() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join(10)
