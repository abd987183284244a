"""The open connections of a server: how many there may be, and who of them does not read.

One between two requests is kept for long, so that clients close first: who sends at the moment at
which we close is not answered. It makes room as soon as somebody else needs its place, unless its
next request is there already.

A client that stops reading costs what waits for it, and keeps its sequences in their seats. So what
was written to a connection must have left within `write_timeout_s`, and all that waits for slow
readers together is bounded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from jitney.engine.api.settings import ServerSettings

_log = logging.getLogger("jitney.api")

#: Bytes that may wait for all clients together.
_MOST_BYTES = 64 << 20
#: Connections beyond `max_connections` that are still told so; more are closed without a word.
_SPARE = 64
#: Seconds between two looks, at most.
_LOOK_S = 1.0
#: The write timeout during a drain.
_HURRY_S = 2.0


class _Connection(Protocol):
    """What is asked of a connection."""

    @property
    def written(self) -> int:
        """Bytes written to it so far."""
        ...

    @property
    def waiting(self) -> int:
        """How many of them wait for the client to read."""
        ...

    @property
    def idle_since(self) -> float | None:
        """time.monotonic() since which it is between two requests; None: it is not."""
        ...

    @property
    def has_unread(self) -> bool:
        """Something has come that was not read yet."""
        ...

    def drop(self) -> None:
        """Close it at once; what waits is lost."""
        ...

    def close(self) -> None:
        """Close it once what was written has left."""
        ...

    @property
    def key(self) -> str:
        """Digest of the key of its newest request; empty: it had none."""
        ...

    def leave(self) -> None:
        """Close it at once between two requests, or behind an answer that is able to say why it
        ends (`Context.end`) or has not begun; another answer is broken off.
        """
        ...


@dataclass(slots=True)
class _Mark:
    """What a client has to have taken, and since when."""

    written: int
    since: float


class Connections:
    """Lives on one event loop; looks at the connections now and then while there are any."""

    def __init__(self, settings: ServerSettings, *, most_bytes: int = _MOST_BYTES):
        self.most = settings.max_connections
        self.timeout_s = settings.server.write_timeout_s
        self._most_bytes = most_bytes
        self._open: dict[_Connection, _Mark] = {}
        self._look: asyncio.TimerHandle | None = None

    @property
    def n_open(self) -> int:
        return len(self._open)

    @property
    def crowded(self) -> bool:
        """More are open than may be."""
        return len(self._open) > self.most

    @property
    def waiting(self) -> int:
        """Bytes that wait for all clients together."""
        return sum(connection.waiting for connection in self._open)

    def opened(self, connection: _Connection) -> None:
        """A client has come; it is dropped at once if not even a refusal can be spared for it."""
        if len(self._open) >= self.most + _SPARE:
            connection.drop()
            return
        if len(self._open) >= self.most:
            self._make_room()
        self._open[connection] = _Mark(0, time.monotonic())
        if self._look is None:
            self._look_later()

    def _make_room(self) -> None:
        """Close the connection that has been idle for longest, if one is."""
        for connection in self._idle():
            if not connection.has_unread:
                self.closed(connection)
                connection.close()
                return

    def _idle(self) -> list[_Connection]:
        """Those between two requests, the one that is so for longest first."""
        since: dict[_Connection, float] = {}
        for connection in self._open:
            idle_since = connection.idle_since
            if idle_since is not None:
                since[connection] = idle_since
        return sorted(since, key=since.__getitem__)

    def closed(self, connection: _Connection) -> None:
        self._open.pop(connection, None)

    def close_of(self, keys: Collection[str]) -> None:
        """Keys are not accepted any more: close their connections, see `_Connection.leave`."""
        for connection in list(self._open):
            if connection.key in keys:
                connection.leave()

    def hurry(self) -> None:
        """The server is about to stop: who does not read is not waited for."""
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
