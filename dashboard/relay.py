"""Relay of a remote engine's feed: one connection for all viewers, while there are any."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from jitney.dashboard import sse
from jitney.dashboard.remote import RemoteEngine, Unreachable
from jitney.dashboard.viewers import TooManyViewers, Viewer
from jitney.engine.server import EVERYBODY, Identity

_log = logging.getLogger("jitney.dashboard")

_HELLO, _KEY_FRAME, _BYE = b"event: hello", b"event: key_frame", b"event: bye"
#: Most events stored since the newest key frame; more than come between two of them.
_KEPT = 512
_ENDED = sse.bye("the engine's feed ended")


class Relay:
    """Forwards an engine's events unchanged. A new viewer gets the events since the newest key
    frame.
    """

    def __init__(self, engine: RemoteEngine, max_viewers: int = Viewer.most):
        self.engine = engine
        self._max_viewers = max_viewers
        self._viewers: set[Viewer] = set()
        self._source: asyncio.Task[None] | None = None
        #: The engine's newest hello.
        self._hello: bytes = b""
        #: The newest key frame and the events after it.
        self._since_key_frame: list[bytes] = []

    @contextmanager
    def viewer(self, last_id: str = "", identity: Identity = EVERYBODY) -> Iterator[Viewer]:
        """A viewer for as long as the block runs; last_id does not matter here, and all viewers see
        what the engine shows to our key. Raises TooManyViewers.
        """
        if len(self._viewers) >= self._max_viewers:
            raise TooManyViewers(self._max_viewers)
        viewer = self._welcome()
        self._viewers.add(viewer)
        if self._source is None or self._source.done():
            self._source = asyncio.create_task(self._pass_on())
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)
            if not self._viewers and self._source is not None:
                self._source.cancel()
                self._forget()

    def _welcome(self) -> Viewer:
        if self._since_key_frame:
            return Viewer([self._hello, *self._since_key_frame])
        return Viewer([], lost=True)

    def _forget(self) -> None:
        self._source = None
        self._hello = b""
        self._since_key_frame = []

    async def _pass_on(self) -> None:
        """Forward events until the engine's feed ends; then end the viewers' feeds. When they
        reconnect, the relay tries again.
        """
        last = _ENDED
        try:
            async for event in self.engine.feed():
                self._take(event)
        except Unreachable as error:
            last = sse.bye(str(error))
        except Exception:
            _log.exception("the feed of %s could not be passed on", self.engine.url)
        self._forget()
        for viewer in self._viewers:
            viewer.close(last)

    def _take(self, event: bytes) -> None:
        if event.startswith(_HELLO):
            self._hello = event
        elif event.startswith(_KEY_FRAME):
            self._since_key_frame = [event]
        elif self._since_key_frame and len(self._since_key_frame) < _KEPT:
            self._since_key_frame.append(event)
        for viewer in self._viewers:
            self._give(viewer, event)

    def _give(self, viewer: Viewer, event: bytes) -> None:
        """Send an event to a viewer. One that is new or has lost deltas gets no deltas before a key
        frame.
        """
        if event.startswith(_KEY_FRAME):
            viewer.lost = False
        if not viewer.lost or event.startswith((_HELLO, _BYE)):
            viewer.put(event)
