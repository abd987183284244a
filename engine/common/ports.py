"""Ports of this machine that nobody has, for processes that will listen on them."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

#: Ports below those that systems give to connections that go out, and how many of them are tried.
_QUIET, _TRIED = range(20_000, 32_768), 50


def free_port(host: str = "127.0.0.1") -> int:
    """One that nobody has now at this address of ours, and that no connection gets by itself in the
    seconds until somebody listens on it. Raises OSError if the address is not ours.
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
