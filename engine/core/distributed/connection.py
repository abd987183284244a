"""TCP connections between hosts; messages are framed as in `worker_pipe`."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from typing import ClassVar

import msgspec

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.ports import HostAddress
from jitney.engine.common.worker_pipe import LENGTH, framed
from jitney.engine.core.distributed import messages

#: Most bytes of a message.
_MOST = 1 << 30
_decode: Callable[[bytes], messages.Message] = msgspec.msgpack.Decoder(messages.Message).decode


def listen_at(address: HostAddress) -> socket.socket:
    """A listening socket. Raises ConfigError if this host does not have the address."""
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(address, family=family)
    except OSError as error:
        raise ConfigError(
            f"coordinator {address} must be an address of the first host, and free: "
            f"{error.strerror or error}"
        ) from None


class Connection:
    """A connection to another host. Any thread may send; one thread receives."""

    #: Seconds without a message after which the other host counts as lost. The end of a process
    #: closes the connection at once; this timeout is for the loss of a machine.
    silent_s: ClassVar[float] = 20.0

    def __init__(self, connected: socket.socket):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(self.silent_s)
        self._socket = connected
        self._reader = connected.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raises OSError."""
        self.send_frame(framed(message))

    def send_frame(self, frame: bytes) -> None:
        """Send a framed message. Raises OSError."""
        with self._sending:
            self._socket.sendall(frame)

    def receive(self, most: int = _MOST) -> messages.Message:
        """The next message. Raises OSError after `silent_s` seconds of silence, EOFError at the
        end, msgspec.DecodeError if it is invalid or longer than `most` bytes.
        """
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        if length > most:
            raise msgspec.DecodeError("a message is too long")
        return _decode(self._exactly(length))

    def _exactly(self, count: int) -> bytes:
        data = self._reader.read(count)
        if len(data) < count:
            raise EOFError
        return data

    @property
    def ended(self) -> bool:
        """True if the other host has closed the connection; valid while it sends nothing."""
        try:
            readable, _, _ = select.select([self._socket], [], [], 0)
            return bool(readable) and not self._socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def close(self) -> None:
        """Close the connection, also for a thread that is receiving."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
