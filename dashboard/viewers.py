"""Viewers of a feed: each has a bounded queue of the same bytes as the others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import ClassVar

from jitney.engine.server import EVERYBODY, Identity

#: Most queued events of a viewer: those of a few seconds.
_QUEUE = 64

_HELLO = b"event: hello"


class TooManyViewers(Exception):
    """The feed has its maximum number of viewers, which the message names."""

    def __init__(self, places: int):
        super().__init__(f"all {places} viewers' places are taken")


class Viewer:
    """One page that watches."""

    #: Default of the most viewers of a feed.
    most: ClassVar[int] = 32

    def __init__(
        self, first: Iterable[bytes], *, lost: bool = False, identity: Identity = EVERYBODY
    ):
        #: The client, which decides what is shown; all administrators see the same.
        self.identity = identity
        #: Number of events dropped because it was too slow.
        self.dropped = 0
        #: It needs a key frame before anything else.
        self.lost = lost
        self._events = deque(first)
        self._changed = asyncio.Event()
        self._changed.set()
        self._closed = False

    def put(self, event: bytes) -> None:
        """Queue an event. Beyond QUEUE events, all are dropped except the newest hello: deltas
        build on each other, so a new key frame replaces them."""
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
        """Remove and return all queued events, for one write."""
        queued = b"".join(self._events)
        self._events.clear()
        return queued

    def close(self, last: bytes) -> None:
        """End the feed after the queued events and `last`."""
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
