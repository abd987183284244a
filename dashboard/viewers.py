"""Who watches: each viewer has a bounded queue of the same bytes as everybody else."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable

MAX_VIEWERS = 32
#: Events that wait for a slow viewer: a few seconds of them.
QUEUE = 64

_HELLO = b"event: hello"


class TooManyViewers(Exception):
    """All places are taken."""


class Viewer:
    """One page that watches. dropped: events it was too slow for. lost: it needs a key frame before
    anything else.
    """

    def __init__(self, first: Iterable[bytes], *, lost: bool = False):
        self.dropped = 0
        self.lost = lost
        self._events = deque(first)
        self._news = asyncio.Event()
        self._news.set()
        self._closed = False

    def put(self, event: bytes) -> None:
        """Queue an event. Over QUEUE all that waits goes, but for what says what runs ("hello"):
        deltas build on each other, so a new key frame is worth more than the rest of them."""
        if self._closed:
            return
        self._events.append(event)
        if len(self._events) > QUEUE:
            kept = [old for old in self._events if old.startswith(_HELLO)][-1:]
            self.dropped += len(self._events) - len(kept)
            self._events = deque(kept)
            self.lost = True
        self._news.set()

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
            self._news.clear()
            await self._news.wait()
