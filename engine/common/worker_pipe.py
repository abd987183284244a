"""The worker's side of `worker_pool`: answers messages on its standard streams. A message is
msgpack after four bytes of length; end of file on standard input ends the worker.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

#: Bytes of a message's length.
LENGTH = struct.Struct("!I")


class WorkerPipe:
    """Reads and writes messages on the standard streams; print() then writes to standard error."""

    def __init__(self):
        # These signals reach the whole process group; the parent decides when a worker ends.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self._requests = sys.stdin.buffer
        self._answers = sys.stdout.buffer
        sys.stdout = sys.stderr

    def read(self) -> bytes | None:
        """The next message; None at end of file."""
        head = self._requests.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        return self._requests.read(LENGTH.unpack(head)[0])

    def send(self, message: msgspec.Struct) -> None:
        self._answers.write(framed(message))
        self._answers.flush()


def answer_requests[Setup: msgspec.Struct, Request: msgspec.Struct](
    setup: type[Setup],
    request: type[Request],
    start: Callable[[Setup], tuple[msgspec.Struct, Callable[[Request], msgspec.Struct]]],
) -> int:
    """Answer requests until stdin ends; returns the status. start: setup -> (ready, answerer)."""
    pipe = WorkerPipe()
    first = pipe.read()
    if first is None:
        return 0
    ready, answer = start(msgspec.msgpack.decode(first, type=setup))
    pipe.send(ready)
    decoder = msgspec.msgpack.Decoder(request)
    while (message := pipe.read()) is not None:
        pipe.send(answer(decoder.decode(message)))
    return 0


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End the process by SIGALRM if the block takes longer."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def framed(message: msgspec.Struct) -> bytes:
    """A message as bytes with its length."""
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data


def limit_memory(more: int) -> None:
    """Limit this process to `more` bytes beyond its present memory (on Linux only)."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
