"""One sampler for all viewers: it looks at the engine a few times a second while anybody watches, and not at all
otherwise. Every viewer gets the same bytes; one that cannot keep up loses the oldest of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from jitney.dashboard import frames
from jitney.engine.client import EngineClient
from jitney.engine.errors import RequestError
from jitney.engine.types import EngineInfo
from jitney.engine.wire import Slots

log = logging.getLogger("jitney.dashboard")

MAX_VIEWERS = 32
#: Frames that wait for a slow viewer: about a second and a half of them.
QUEUE = 8
#: Seconds that a frame waits for the engine to say who sits where; a long step answers when it is done.
SLOTS_S = 1.0


class TooManyViewers(Exception):
    """All places are taken."""


class Viewer:
    """One page that watches: a bounded queue of events. dropped: events it was too slow for."""

    def __init__(self, first: bytes):
        self.dropped = 0
        self._events = deque([first])
        self._news = asyncio.Event()
        self._news.set()
        self._closed = False

    def put(self, event: bytes) -> None:
        """Queue an event; over QUEUE, the oldest goes, but never one that says what runs ("hello")."""
        if self._closed:
            return
        self._events.append(event)
        if len(self._events) > QUEUE:
            oldest = next((i for i, old in enumerate(self._events) if not old.startswith(b"event: hello")), 0)
            del self._events[oldest]
            self.dropped += 1
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


class Feed:
    """The live feed of one engine; lives on one asyncio loop.

    hz: frames a second while there is a viewer. keys: told to the page (see `frames.hello`).
    """

    def __init__(self, client: EngineClient, *, hz: float = 5.0, keys: bool = False, max_viewers: int = MAX_VIEWERS):
        self.client = client
        self.run = uuid.uuid4().hex[:8]
        self._hz, self._keys, self._max_viewers = hz, keys, max_viewers
        self._viewers: set[Viewer] = set()
        self._sampler: asyncio.Task[None] | None = None
        self._frames = 0

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    @property
    def sampling(self) -> bool:
        """True while the engine is being looked at."""
        return self._sampler is not None and not self._sampler.done()

    @contextmanager
    def viewer(self) -> Iterator[Viewer]:
        """A viewer for as long as the block runs. Raises TooManyViewers."""
        if len(self._viewers) >= self._max_viewers:
            raise TooManyViewers
        viewer = Viewer(self._hello())
        self._viewers.add(viewer)
        if not self.sampling:
            self._sampler = asyncio.create_task(self._sample())
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)
            if not self._viewers and self._sampler is not None:
                self._sampler.cancel()
                self._sampler = None  # it ends later, and whoever comes before that needs a new one

    def _hello(self) -> bytes:
        return frames.hello(self.client.info, self.run, self._hz, self._keys)

    async def _sample(self) -> None:
        """Frames until nobody watches, or the engine is dead for good, which ends the feed."""
        reason = "the page's feed failed; the server's log says why"
        try:
            await self._sample_until_dead()
            reason = "the engine is dead"
        except Exception:
            log.exception("the page's feed failed")
        for viewer in self._viewers:
            viewer.close(frames.bye(reason))

    async def _sample_until_dead(self) -> None:
        client, info = self.client, self.client.info
        step = client.counters.gauge("step")
        due = time.monotonic()
        while True:
            info = self._tell_changes(info)
            slots = await self._slots()
            records = client.records(step)
            step = int(records[-1]["step"]) if len(records) else step
            self._frames += 1
            self._broadcast(frames.key_frame(client, slots, records, time.monotonic(), self._frames))
            if client.state == "dead":
                return
            due = max(due + 1 / self._hz, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    def _tell_changes(self, known: EngineInfo | None) -> EngineInfo | None:
        """Say hello again if another engine runs than the viewers know of."""
        if self.client.info is not known:
            self._broadcast(self._hello())
        return self.client.info

    async def _slots(self) -> Slots | None:
        """Who sits where, or None if there is no engine to ask or it is busy for too long."""
        if self.client.info is None or self.client.state not in ("ready", "draining"):
            return None
        try:
            async with asyncio.timeout(SLOTS_S):
                return await self.client.slots()
        except (RequestError, TimeoutError):
            return None

    def _broadcast(self, event: bytes) -> None:
        for viewer in self._viewers:
            viewer.put(event)
