"""The open connections of a server: how many, which give way to new ones, who does not read. A
connection is kept between requests for long, so that clients close first: a request sent while the
server closes would not be answered. It is closed when a new connection needs its place, as is one
that sends no request. A new one is always accepted: a few beyond `max_connections`, for probes and
for errors that the server is full. A client that stops reading costs memory and seats. So bytes
written to a connection must have left within `write_timeout_s`, and all unsent bytes together are
bounded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from jitney.engine.common.machine import descriptor_limit
from jitney.engine.server.http.settings import ServerSettings

_log = logging.getLogger("jitney.api")

#: Bytes that may wait for all clients together.
_MOST_BYTES = 64 << 20
#: Connections beyond `max_connections`, refused but for probes; of more the oldest is closed.
SPARE = 64
#: Descriptors reserved for logs, libraries, listening sockets, files and webhooks.
_OWN_FILES = 128
#: Connections accepted in one turn of the loop, and turns until a refused one is closed.
ACCEPTED_AT_ONCE, _TURNS = 16, 5
#: Seconds that a client has for the head of its request while others need its place.
_GRACE_S = 1.0
#: Most seconds between two checks of the connections.
_LOOK_S = 1.0
#: The write timeout during a drain.
_HURRY_S = 2.0


class _Connection(Protocol):
    """The interface of a connection."""

    @property
    def written(self) -> int:
        """Bytes written to it so far."""
        ...

    @property
    def waiting(self) -> int:
        """Written bytes that the client has not read."""
        ...

    @property
    def has_unread(self) -> bool:
        """Bytes have arrived that the protocol has not read yet."""
        ...

    def drop(self) -> None:
        """Close it at once; unsent bytes are lost."""
        ...

    def give_way(self) -> None:
        """Close it at once if no bytes are unsent."""
        ...

    @property
    def key(self) -> str:
        """Digest of the key of its newest request; empty: it had none."""
        ...

    def leave(self) -> None:
        """Close it: with an error in the answer if one is under way that can have it, else at
        once.
        """
        ...


@dataclass(slots=True)
class _Mark:
    """The bytes that a client must have read, and since when."""

    written: int
    since: float


class Connections:
    """Registry of connections, on one event loop, checked periodically. Each reports its state:
    `works`, `is_kept` or `is_awaited`.
    """

    def __init__(self, settings: ServerSettings, *, most_bytes: int = _MOST_BYTES):
        self.most = settings.max_connections
        self.timeout_s = settings.server.write_timeout_s
        self._most_bytes = most_bytes
        self._open: dict[_Connection, _Mark] = {}
        #: Connections between two requests, the longest idle first.
        self._idle: dict[_Connection, None] = {}
        #: Connections with no request under way, and since when; the longest first.
        self._awaited: dict[_Connection, float] = {}
        #: Connections accepted beyond the limit, the oldest first.
        self._extra: dict[_Connection, None] = {}
        self._look: asyncio.TimerHandle | None = None

    @property
    def n_open(self) -> int:
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Unsent bytes of all connections."""
        return sum(connection.waiting for connection in self._open)

    def opened(self, connection: _Connection) -> None:
        self._make_room(1)
        if len(self._open) >= self.most + SPARE:
            self._close(next(iter(self._extra)))
        if len(self._open) >= self.most:
            self._extra[connection] = None
        self._open[connection] = _Mark(0, time.monotonic())
        self.is_awaited(connection)
        if self._look is None:
            self._look_later()

    def works(self, connection: _Connection) -> None:
        """A request is under way on it."""
        self._idle.pop(connection, None)
        self._awaited.pop(connection, None)

    def is_kept(self, connection: _Connection) -> None:
        """The connection is between two requests."""
        self._awaited.pop(connection, None)
        if connection in self._open:
            self._idle.setdefault(connection)

    def is_awaited(self, connection: _Connection) -> None:
        """The connection awaits a part of a request, and no request is under way on it."""
        self._idle.pop(connection, None)
        if connection in self._open:
            self._awaited.setdefault(connection, time.monotonic())

    def has_place(self, connection: _Connection) -> bool:
        """Whether a request may run on the connection; if so, it counts as working."""
        if connection not in self._extra:
            return True
        self.works(connection)
        self._make_room(0)
        if len(self._open) > self.most:
            return False
        del self._extra[connection]
        return True

    def closed(self, connection: _Connection) -> None:
        self.works(connection)
        self._extra.pop(connection, None)
        self._open.pop(connection, None)

    def _make_room(self, places: int) -> None:
        """Close connections without a request until `places` are free, or none is left to close."""
        while len(self._open) + places > self.most:
            idle = self._first_idle()
            if idle is None:
                return
            self._close(idle)

    def _first_idle(self) -> _Connection | None:
        """The connection to close next."""
        for connection in self._idle:
            if _may_go(connection):
                return connection
        latest = time.monotonic() - _GRACE_S
        for connection, since in self._awaited.items():
            if since > latest:
                return None
            if _may_go(connection):
                return connection
        return None

    def _close(self, connection: _Connection) -> None:
        self.closed(connection)
        if connection.waiting:
            connection.drop()
        else:
            connection.give_way()

    def close_of(self, keys: Collection[str]) -> None:
        """Keys are not accepted any more: close their connections, see `_Connection.leave`."""
        for connection in list(self._open):
            if connection.key in keys:
                connection.leave()

    def hurry(self) -> None:
        """Shorten the write timeout, since the server is about to stop."""
        self.timeout_s = min(self.timeout_s, _HURRY_S)
        for mark in self._open.values():
            mark.since = time.monotonic()

    def _look_later(self) -> None:
        pause = min(_LOOK_S, self.timeout_s / 4)
        self._look = asyncio.get_running_loop().call_later(pause, self._look_around)

    def _look_around(self) -> None:
        self._look = None
        now = time.monotonic()
        for connection, mark in list(self._open.items()):
            if connection.written - connection.waiting >= mark.written:
                mark.written, mark.since = connection.written, now
            elif now - mark.since > self.timeout_s:
                self._let_go(connection, f"did not read for {self.timeout_s:g} s")
        while self._open and self.waiting > self._most_bytes:
            largest = max(self._open, key=lambda connection: connection.waiting)
            self._let_go(largest, "reads too slowly, and too much waits for all clients")
        if self._open:
            self._look_later()

    def _let_go(self, connection: _Connection, why: str) -> None:
        _log.warning("a client %s: let go, with %d bytes unread", why, connection.waiting)
        self.closed(connection)
        connection.drop()


def _may_go(connection: _Connection) -> bool:
    """Whether it may be closed: no bytes are unsent and none are unread."""
    return not connection.waiting and not connection.has_unread


def connections_within(connections: int, limit: int | None = None) -> int:
    """Connections that the limit of open files (None: this process's) allows; warns if fewer."""
    if limit is None:
        limit = descriptor_limit()
    possible = max(1, limit - _OWN_FILES - SPARE - _TURNS * ACCEPTED_AT_ONCE)
    if possible >= connections:
        return connections
    logging.getLogger("jitney").warning(
        "only %d files may be open (ulimit -Hn): at most %d connections instead of %d",
        limit,
        possible,
        connections,
    )
    return possible
