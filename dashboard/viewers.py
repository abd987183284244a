"""Viewers of a feed: each has a bounded queue of the same bytes as the others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import ClassVar

from jitney.engine.server import EVERYBODY, Identity

#: Events that wait for a slow viewer: a few seconds of them.
_QUEUE = 64

_HELLO = b"event: hello"


class TooManyViewers(Exception):
    """All places are taken; says how many there are."""

    def __init__(self, places: int):
        super().__init__(f"all {places} viewers' places are taken")


class Viewer:
    """One page that watches."""

    #: Of one feed, at most, unless it is made for others.
    most: ClassVar[int] = 32

    def __init__(
        self, first: Iterable[bytes], *, lost: bool = False, identity: Identity = EVERYBODY
    ):
        #: Who looks, which decides what is shown; all administrators see the same.
        self.identity = identity
        #: Events that it was too slow for.
        self.dropped = 0
        #: It needs a key frame before anything else.
        self.lost = lost
        self._events = deque(first)
        self._changed = asyncio.Event()
        self._changed.set()
        self._closed = False

    def put(self, event: bytes) -> None:
        """Queue an event. Over QUEUE all that waits goes, but for what says what runs ("hello"):
        deltas build on each other, so a new key frame is worth more than the rest of them."""
        if self._closed:
            return
        self._events.append(event)
        if len(self._events) > _QUEUE:
            self._drop()
        self._changed.set()

    def _drop(self) -> None:
        hellos = [event for event in self._events if event.startswith(_HELLO)]
        remaining = hellos[-1:]
        self.dropped += len(self._events) - len(remaining)
        self._events = deque(remaining)
        self.lost = True

    def take_queued(self) -> bytes:
        """Remove all queued events; they can be sent in one write."""
        queued = b"".join(self._events)
        self._events.clear()
        return queued

    def close(self, last: bytes) -> None:
        """End the feed once `last` and what waits before it are taken."""
        self.put(last)
        self._closed = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            while self._events:
                yield self._events.popleft()
            if self._closed:
                return
            self._changed.clear()
            await self._changed.wait()
