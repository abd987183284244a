"""One sampler for all viewers: it looks at the engine a few times a second while anybody watches,
and not at all otherwise. Every viewer gets the same bytes; one that cannot keep up starts again
from a key frame.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from jitney.dashboard import latency, sse
from jitney.dashboard.notes import Notes
from jitney.dashboard.snapshot import Look, PageCells, page_cells, scalars, seat_columns
from jitney.dashboard.viewers import MAX_VIEWERS, TooManyViewers, Viewer
from jitney.engine.errors import RequestError
from jitney.engine.process.client import EngineClient
from jitney.engine.types import EngineInfo

log = logging.getLogger("jitney.dashboard")

#: Seconds from one key frame to the next, between two looks at the pages, and that a first frame
#: waits for them.
KEY_S, PAGES_S, FIRST_PAGES_S = 2.0, 0.5, 0.25
#: Seconds without a change after which a frame goes out all the same.
HEARTBEAT_S = 1.0
#: Looks kept for those who come back within a few seconds.
KEPT_LOOKS = 30
#: Seconds that percentiles look back, and that histograms do; how often percentiles are renewed.
RECENT_S, HISTOGRAM_S, RENEW_S = 30.0, 60.0, 1.0


class Feed:
    """The live feed of one engine; lives on one asyncio loop.

    hz: frames a second while there is a viewer. keys, text: told to the page (see `sse.hello`).
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        hz: float = 10.0,
        keys: bool = False,
        text: bool = False,
        max_viewers: int = MAX_VIEWERS,
    ):
        self.client = client
        self.run = uuid.uuid4().hex[:8]
        self.hz = hz
        self._keys, self._text, self._max_viewers = keys, text, max_viewers
        self._viewers: set[Viewer] = set()
        self._sampler: asyncio.Task[None] | None = None
        self._notes = Notes()
        self._frames = 0
        self._last: Look | None = None
        self._last_key = b""
        self._recent: deque[tuple[str, list[bytes]]] = deque(maxlen=KEPT_LOOKS)

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    @property
    def notes(self) -> list[dict[str, Any]]:
        """The newest notes that were told, oldest first."""
        return list(self._notes.kept)

    @property
    def sampling(self) -> bool:
        """True while the engine is being looked at."""
        return self._sampler is not None and not self._sampler.done()

    @contextmanager
    def viewer(self, last_id: str = "") -> Iterator[Viewer]:
        """A viewer for as long as the block runs; last_id: of the last frame it had, if any. Raises
        TooManyViewers.
        """
        if len(self._viewers) >= self._max_viewers:
            raise TooManyViewers
        viewer = self._welcome(last_id)
        self._viewers.add(viewer)
        if not self.sampling:
            self._last, self._last_key = None, b""
            self._recent.clear()
            self._sampler = asyncio.create_task(self._sample())
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)
            if not self._viewers and self._sampler is not None:
                self._sampler.cancel()
                self._sampler = None  # it ends later, and whoever comes before that needs a new one

    def _welcome(self, last_id: str) -> Viewer:
        """Hello, and then what was missed if that is known, else a key frame."""
        if not self.sampling or self._last is None:
            return Viewer([self._hello()], lost=True)
        ids = [id for id, _ in self._recent]
        if last_id in ids:
            missed = [
                event
                for _, events in list(self._recent)[ids.index(last_id) + 1 :]
                for event in events
            ]
            return Viewer([self._hello(), *missed])
        return Viewer([self._hello(), self._key()])

    def _hello(self) -> bytes:
        return sse.hello(
            self.client.info,
            run=self.run,
            hz=self.hz,
            key_s=KEY_S,
            keys=self._keys,
            text=self._text,
            t=time.monotonic(),
            wall=time.time(),
        )

    async def _sample(self) -> None:
        """Frames until nobody watches, or the engine is dead for good, which ends the feed."""
        reason = "the page's feed failed; the server's log says why"
        try:
            await Sampler(self).run()
            reason = "the engine is dead"
        except Exception:
            log.exception("the page's feed failed")
        for viewer in self._viewers:
            viewer.close(sse.bye(reason))

    def tell_hello(self) -> None:
        """Another engine runs than the viewers know of."""
        for viewer in self._viewers:
            viewer.put(self._hello())

    def tell(self, look: Look, records: np.ndarray, *, with_key: bool) -> None:
        """Send a look: what happened, notes, and a key frame or what changed; nothing if nothing
        did.
        """
        before, found = self._last, None
        if before is not None and not with_key and sse.follows(before, look):
            found = sse.delta(before, look)
            if (
                sse.quiet(found)
                and look.t - before.t < HEARTBEAT_S
                and before.n_life == look.n_life
            ):
                return
        extra = self._news(before, look, records)
        self._frames += 1
        self._last, self._last_key = look, b""
        last = self._key() if found is None else sse.event("d", found, self._id())
        self._recent.append((self._id(), [*extra, last]))
        self._broadcast(extra, last)

    def _news(self, before: Look | None, look: Look, records: np.ndarray) -> list[bytes]:
        """Life events and notes since the look before."""
        notes = self._notes.compare(look, records)
        look.notes = list(self._notes.kept)
        news = [sse.event("note", note) for note in notes]
        if before is not None and (happened := self.client.history.life_since(before.n_life)):
            news.insert(0, sse.life(happened, look.n_life - len(happened)))
        return news

    def _broadcast(self, extra: list[bytes], last: bytes) -> None:
        for viewer in self._viewers:
            if viewer.lost:
                viewer.lost = False
                viewer.put(self._key())
                continue
            for event in (*extra, last):
                viewer.put(event)

    def _id(self) -> str:
        return f"{self.run}:{self._frames}"

    def _key(self) -> bytes:
        """The newest look as a key frame, encoded once."""
        if not self._last_key:
            assert self._last is not None
            info = self.client.info
            self._last_key = sse.key(self._last, info.page_size if info else 1, self._id())
        return self._last_key


class Sampler:
    """Looks at the engine for a feed, from its first viewer to its last."""

    def __init__(self, feed: Feed):
        self.feed, self.client = feed, feed.client
        self._pages: PageCells | None = None
        self._asking: asyncio.Task[None] | None = None
        self._asked = self._renewed = self._keyed = -np.inf
        self._latency: dict[str, object] = {}
        self._hist: dict[str, object] | None = None

    async def run(self) -> None:
        """Look until the engine is dead for good."""
        try:
            await self._run()
        finally:
            if self._asking is not None:
                self._asking.cancel()

    async def _run(self) -> None:
        client, info = self.client, self.client.info
        step, due = client.history.records.last_step, time.monotonic()
        while True:
            info = self._tell_changes(info)
            await self._refresh_pages()
            records = client.records(step)
            step = int(records[-1]["step"]) if len(records) else step
            now = time.monotonic()
            with_key = now - self._keyed >= KEY_S
            if with_key:
                self._keyed = now
                self._hist = latency.histograms(client.history, now - HISTOGRAM_S, now)
            self.feed.tell(self._look(records, now), records, with_key=with_key)
            if client.state == "dead":
                return
            due = max(due + 1 / self.feed.hz, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    def _look(self, records: np.ndarray, now: float) -> Look:
        client, history = self.client, self.client.history
        progress = client.progress if client.state == "loading" else None
        if now - self._renewed >= RENEW_S:
            self._renewed = now
            self._latency = latency.summary(history, now - RECENT_S, now)
        there = client.info is not None and client.state in ("ready", "draining")
        return Look(
            t=now,
            step=history.records.last_step,
            state=client.state,
            age=round(client.last_step_age(), 1),
            progress=None if progress is None else msgspec.to_builtins(progress),
            seats=seat_columns(history) if there else None,
            pages=self._pages if there else None,
            scalars=scalars(client, records) | {"latency": self._latency},
            n_life=history.n_life,
            hist=self._hist,
        )

    def _tell_changes(self, known: EngineInfo | None) -> EngineInfo | None:
        if self.client.info is not known:
            self.feed.tell_hello()
            self._pages, self._keyed = None, -np.inf
        return self.client.info

    async def _refresh_pages(self) -> None:
        """Ask for the pages now and then, without waiting for the answer, but for the first one a
        moment.
        """
        if self.client.info is None or self.client.state not in ("ready", "draining"):
            return
        if self._asking is not None and not self._asking.done():
            return
        if time.monotonic() - self._asked >= PAGES_S:
            self._asked = time.monotonic()
            self._asking = asyncio.create_task(self._ask_pages())
            if self._pages is None:
                await asyncio.wait((self._asking,), timeout=FIRST_PAGES_S)

    async def _ask_pages(self) -> None:
        try:
            states = await self.client.page_states()
        except RequestError:
            return  # busy, or gone: what was known stays on the page
        self._pages = page_cells(states) if states else None
