"""Addresses with ports, and free ports of this machine for processes that will listen on them."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from typing import NamedTuple

#: Ports below the range of outgoing connections, and how many of them are tried.
_QUIET, _TRIED = range(20_000, 32_768), 50


class HostAddress(NamedTuple):
    """An address as HOST:PORT; an IPv6 host is in brackets."""

    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> HostAddress:
        host, _, port = text.rpartition(":")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def free_port(host: str = "127.0.0.1") -> int:
    """A free port that no outgoing connection takes before it is listened on. Raises OSError if
    `host` is no address of this machine.
    """
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    for port in random.sample(_QUIET, _TRIED):
        with suppress(OSError):
            return _bound(family, host, port)
    return _bound(family, host, 0)


def _bound(family: int, host: str, port: int) -> int:
    with socket.socket(family) as probe:
        probe.bind((host, port))
        return probe.getsockname()[1]
