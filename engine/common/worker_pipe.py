"""Workers: processes of ours that answer messages on their standard streams, and may be ended in
the middle of one.

A message is msgpack behind four bytes of length. The end of standard input ends a worker.
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
    """The worker's side. It takes the standard streams, and whatever prints goes to the log."""

    def __init__(self):
        # They reach the whole process group; whoever started this one decides when it ends.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self._requests = sys.stdin.buffer
        self._answers = sys.stdout.buffer
        sys.stdout = sys.stderr

    def read(self) -> bytes | None:
        """The next message, None at the end."""
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
    """Answer requests until standard input ends; the exit status. start: from the first message to
    the one that says that the worker is ready, and the function that answers a request.
    """
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
    """A message as it is sent."""
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data


def limit_memory(more: int) -> None:
    """Let this process take so many more bytes than it has, where the system says how much that is
    (Linux).
    """
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
