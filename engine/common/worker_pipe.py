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
