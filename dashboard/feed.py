"""The live feed of an engine. One sampler takes a snapshot a few times a second while there are
viewers. All viewers get the same bytes; one that cannot keep up continues from a new key frame.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np

from jitney.dashboard import sse
from jitney.dashboard.latency import Latencies
from jitney.dashboard.notes import Notes
from jitney.dashboard.snapshot import PageCells, Recent, Snapshot, seat_columns
from jitney.dashboard.sse import Delta, Note
from jitney.dashboard.view import View
from jitney.dashboard.viewers import LiveFeed, TooManyViewers, Viewer
from jitney.engine.common.device_use import DeviceUse
from jitney.engine.common.errors import RequestError
from jitney.engine.common.messages import SequenceEvent
from jitney.engine.common.requests import JsonDict
from jitney.engine.server import EVERYBODY, EngineClient, Identity

#: Seconds from one key frame to the next.
_KEY_FRAME_S = 2.0
#: Seconds between two requests for the page map; most seconds that a first frame waits for it.
_PAGES_S, _FIRST_PAGES_S = 0.5, 0.05
#: Most seconds between two frames, even without a change.
_HEARTBEAT_S = 1.0
#: Most viewers of one user.
_MOST_OF_A_USER = 8
#: Frames stored for viewers that reconnect within a few seconds.
_KEPT_FRAMES = 30
#: Windows of percentiles and of histograms, and the interval of new percentiles, in seconds.
_RECENT_S, _HISTOGRAM_S, _RENEW_S = 30.0, 60.0, 1.0


_KEY_FRAME = b"event: key_frame"


class Feed(LiveFeed):
    """The live feed of one engine.

    hz: frames a second while there is a viewer. needs_key, shows_text, history_h: for the page, see
    `sse.FeedStart`. notes: of the engine; None: the feed looks for its own.
    """

    _what = "the page's feed"

    def __init__(
        self,
        client: EngineClient,
        *,
        hz: float = 10.0,
        needs_key: bool = False,
        shows_text: bool = False,
        history_h: float = 0.0,
        notes: Notes | None = None,
    ):
        super().__init__()
        self.client = client
        self.run = uuid.uuid4().hex[:8]
        self.hz = hz
        self._needs_key = needs_key
        self._shows_text = shows_text
        self._history_h = history_h
        self._notes = notes or Notes(client)
        #: Notes that were sent.
        self._n_notes = 0
        #: Frames sent since the start.
        self._n_frames = 0
        #: The newest snapshot that was sent, and its encoded key frames by kind of viewer.
        self._last: Snapshot | None = None
        self._key_frames: dict[Identity, bytes] = {}
        #: The newest frames: id, and the events sent to administrators.
        self._recent: deque[tuple[str, list[bytes]]] = deque(maxlen=_KEPT_FRAMES)

    async def first_events(self, identity: Identity) -> list[bytes]:
        """The events that a new viewer gets, up to the first key frame. Raises TooManyViewers."""
        events: list[bytes] = []
        with self.viewer(identity=identity) as viewer:
            async for event in viewer:
                events.append(event)
                if event.startswith(_KEY_FRAME):
                    break
        return events

    def _check_room(self, identity: Identity) -> None:
        """Raise TooManyViewers."""
        n_of_user = sum(viewer.identity == identity for viewer in self._viewers)
        if not identity.is_admin and n_of_user >= _MOST_OF_A_USER:
            raise TooManyViewers(_MOST_OF_A_USER)
        super()._check_room(identity)

    def _start(self) -> None:
        if not self.sending:
            self._last = None
            self._key_frames.clear()
            self._recent.clear()
        super()._start()

    def _welcome(self, last_id: str, identity: Identity) -> Viewer:
        """The hello event, then the missed events if they are stored, else a key frame."""
        if identity.is_admin:
            identity = EVERYBODY  # all administrators get the same events
        hello = self._hello(identity)
        if not self.sending or self._last is None:
            return Viewer([hello], lost=True, identity=identity)
        missed = self._missed_since(last_id) if identity.is_admin else None
        if missed is None:
            missed = [self._key_frame(identity)]
        return Viewer([hello, *missed], identity=identity)

    def _missed_since(self, last_id: str) -> list[bytes] | None:
        """All events after the frame with this id; None if it is not stored."""
        missed: list[bytes] | None = None
        for frame_id, events in self._recent:
            if missed is not None:
                missed += events
            elif frame_id == last_id:
                missed = []
        return missed

    def _hello(self, identity: Identity) -> bytes:
        return sse.hello(
            self.client.info,
            run=self.run,
            hz=self.hz,
            key_frame_s=_KEY_FRAME_S,
            needs_key=self._needs_key,
            shows_text=self._shows_text and identity.is_admin,
            role=identity.role.name.lower(),
            history_h=self._history_h,
            t=round(time.monotonic(), 4),
            unix_time=round(time.time(), 3),
        )

    async def _send_all(self) -> str:
        await _Sampler(self).run()
        return "the engine is dead"

    def send_hello(self) -> None:
        """Send a hello event, since another engine runs now."""
        for viewer in self._viewers:
            viewer.put(self._hello(viewer.identity))

    def send(self, now: Snapshot, *, with_key_frame: bool) -> None:
        """Send a snapshot: events, notes, and a key frame or a delta; nothing if nothing has
        changed.
        """
        before = self._last
        changes = None
        if before is not None and not with_key_frame and now.follows(before):
            changes = now.delta(before)
            silent = now.n_events == before.n_events and _is_quiet(changes)
            if silent and now.t - before.t < _HEARTBEAT_S:
                return
        self._notes.look(now.t)
        new_notes = [] if before is None else self._notes.since(self._n_notes)
        self._n_notes = self._notes.n
        frame = _Frame(self._happened(before), new_notes, changes)
        now.notes = list(self._notes.newest)
        self._n_frames += 1
        self._last = now
        self._key_frames.clear()
        self._broadcast(frame, now.n_events - len(frame.happened))

    def _happened(self, before: Snapshot | None) -> list[SequenceEvent]:
        return [] if before is None else self.client.history.events.since(before.n_events)

    def _broadcast(self, frame: _Frame, first: int) -> None:
        """Send to each viewer the part that it may see. first: number of the frame's first
        event.
        """
        encoded = {EVERYBODY: self._encode(frame, first, EVERYBODY)}
        self._recent.append((self._frame_id(), encoded[EVERYBODY]))
        for viewer in self._viewers:
            identity = viewer.identity
            if viewer.lost:
                viewer.lost = False
                viewer.put(self._key_frame(identity))
                continue
            if identity not in encoded:
                encoded[identity] = self._encode(frame, first, identity)
            for event in encoded[identity]:
                viewer.put(event)

    def _encode(self, frame: _Frame, first: int, identity: Identity) -> list[bytes]:
        view = View(self.client.history, identity)
        events = [sse.encode("note", note) for note in frame.notes]
        if frame.happened:
            events.insert(0, sse.events(view.events(frame.happened), first))
        if frame.changes is None:
            events.append(self._key_frame(identity))
        else:
            events.append(sse.encode("delta", view.delta(frame.changes), self._frame_id()))
        return events

    def _frame_id(self) -> str:
        return f"{self.run}:{self._n_frames}"

    def _key_frame(self, identity: Identity) -> bytes:
        """The newest snapshot as a key frame, encoded once per kind of viewer."""
        if identity not in self._key_frames:
            assert self._last is not None
            info = self.client.info
            page_size = info.sizes.page_size if info is not None else 1
            frame = self._last.key_frame(page_size, View(self.client.history, identity))
            self._key_frames[identity] = sse.encode("key_frame", frame, self._frame_id())
        return self._key_frames[identity]


def _is_quiet(changes: Delta) -> bool:
    """Whether a delta has no news: only the time, and perhaps an empty step."""
    timing = {"t", "step", "n_events", "last_step_age_s", "metrics"}
    return changes.keys() <= timing and changes.get("metrics", {}) in ({}, {"longest_step_s": None})


@dataclass(frozen=True, slots=True)
class _Frame:
    """Changes since the frame before."""

    happened: list[SequenceEvent]
    notes: list[Note]
    #: None: a key frame is due.
    changes: Delta | None


class _Sampler:
    """Takes snapshots of the engine for a feed, from its first viewer to its last."""

    def __init__(self, feed: Feed):
        self.feed = feed
        self.client = feed.client
        #: The engine that the newest hello event named.
        self._info = feed.client.info
        #: The newest step of the snapshot before.
        self._last_step = feed.client.history.records.last_step
        self._pages: PageCells | None = None
        self._asking: asyncio.Task[None] | None = None
        #: Times of the last page request, the last percentiles and the last key frame.
        self._pages_asked_at = self._renewed = self._sent_key_frame = -np.inf
        self._recent = Recent()
        self._histograms: JsonDict | None = None

    async def run(self) -> None:
        """Take and send snapshots until the engine is dead for good."""
        due = time.monotonic()
        try:
            while True:
                await self._frame()
                if self.client.state == "dead":
                    return
                due = max(due + 1 / self.feed.hz, time.monotonic())
                await asyncio.sleep(due - time.monotonic())
        finally:
            if self._asking is not None:
                self._asking.cancel()

    async def _frame(self) -> None:
        self._greet_again()
        await self._refresh_pages()
        records = self.client.history.records.since(self._last_step)
        if len(records):
            self._last_step = int(records[-1]["step"])
        now = time.monotonic()
        with_key_frame = now - self._sent_key_frame >= _KEY_FRAME_S
        self._renew_latencies(now, with_key_frame)
        self.feed.send(self._snapshot(records, now), with_key_frame=with_key_frame)

    def _renew_latencies(self, now: float, with_key_frame: bool) -> None:
        history = self.client.history
        if with_key_frame:
            self._sent_key_frame = now
            self._histograms = Latencies.between(history, now - _HISTOGRAM_S, now).histograms()
        if now - self._renewed >= _RENEW_S:
            self._renewed = now
            latency = Latencies.between(history, now - _RECENT_S, now).summary()
            use = DeviceUse.of(self.client.info, history.records, now)
            self._recent = Recent(latency, msgspec.to_builtins(use))

    def _snapshot(self, records: np.ndarray, now: float) -> Snapshot:
        snapshot = Snapshot.of(self.client, records, self._recent, now)
        snapshot.histograms = self._histograms
        if self._runs:
            snapshot.seats = seat_columns(self.client.history)
            snapshot.pages = self._pages
        return snapshot

    @property
    def _runs(self) -> bool:
        """Whether the engine serves."""
        return self.client.info is not None and self.client.state in ("ready", "draining")

    def _greet_again(self) -> None:
        """Send a hello event if another engine runs than before."""
        if self.client.info is not self._info:
            self._info = self.client.info
            self.feed.send_hello()
            self._pages = None
            self._sent_key_frame = -np.inf

    async def _refresh_pages(self) -> None:
        """Request the page map regularly, in the background; wait briefly only for the first
        one.
        """
        if not self._runs or time.monotonic() - self._pages_asked_at < _PAGES_S:
            return
        if self._asking is not None and not self._asking.done():
            return
        self._pages_asked_at = time.monotonic()
        self._asking = asyncio.create_task(self._ask_pages())
        if self._pages is None:
            await asyncio.wait((self._asking,), timeout=_FIRST_PAGES_S)

    async def _ask_pages(self) -> None:
        try:
            pages = await self.client.page_map()
        except RequestError:
            return  # busy, or gone: the page keeps the last map
        self._pages = PageCells.of(pages) if pages.page_states else None
