"""Feeds and their viewers: each viewer has a bounded queue of the same bytes as the others."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar

from jitney.dashboard import sse
from jitney.engine.server import EVERYBODY, Identity

_log = logging.getLogger("jitney.dashboard")

#: Most queued events of a viewer: those of a few seconds.
_QUEUE = 64

_HELLO = b"event: hello"


class TooManyViewers(Exception):
    """The feed has its maximum number of viewers, which the message names."""

    def __init__(self, places: int):
        super().__init__(f"all {places} viewers' places are taken")


class Viewer:
    """One page that watches."""

    #: Most viewers of a feed.
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


class LiveFeed(ABC):
    """A feed, sent by one task while there are viewers; lives on one asyncio loop."""

    #: What is sent, in messages.
    _what: ClassVar[str]

    def __init__(self) -> None:
        self._max_viewers = Viewer.most
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def sending(self) -> bool:
        """Whether the task runs."""
        return self._task is not None and not self._task.done()

    @contextmanager
    def viewer(self, last_id: str = "", identity: Identity = EVERYBODY) -> Iterator[Viewer]:
        """A viewer for as long as the block runs; last_id: of the last event it had, if any;
        identity: whose it is, which decides what it is shown. Raises TooManyViewers.
        """
        self._check_room(identity)
        viewer = self._welcome(last_id, identity)
        self._viewers.add(viewer)
        self._start()
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                self._stop()

    def _check_room(self, identity: Identity) -> None:
        """Raise TooManyViewers."""
        if len(self._viewers) >= self._max_viewers:
            raise TooManyViewers(self._max_viewers)

    @abstractmethod
    def _welcome(self, last_id: str, identity: Identity) -> Viewer:
        """A new viewer with its first events."""

    @abstractmethod
    async def _send_all(self) -> str:
        """Send events to the viewers; returns why the feed ends, if it does."""

    def _start(self) -> None:
        """Send from now on."""
        if not self.sending:
            self._task = asyncio.create_task(self._run())

    def _stop(self) -> None:
        """Send nothing more: the last viewer has left, or the feed has ended."""
        if self._task is not None:
            self._task.cancel()
        self._task = None  # it ends later; a viewer that comes before needs a new task

    async def _run(self) -> None:
        try:
            reason = await self._send_all()
        except Exception:
            _log.exception("%s failed", self._what)
            reason = f"{self._what} failed; the server's log says why"
        for viewer in self._viewers:
            viewer.close(sse.bye(reason))
