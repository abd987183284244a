"""Relay of a remote engine's feed: one connection for all viewers, while there are any."""

from __future__ import annotations

from jitney.dashboard.remote import RemoteEngine, Unreachable
from jitney.dashboard.viewers import LiveFeed, Viewer
from jitney.engine.server import Identity

_HELLO, _KEY_FRAME, _BYE = b"event: hello", b"event: key_frame", b"event: bye"
#: Most events stored since the newest key frame; more than come between two of them.
_KEPT = 512


class Relay(LiveFeed):
    """Forwards an engine's events unchanged: all viewers see what the engine shows to our key. A
    new viewer gets the events since the newest key frame. When viewers reconnect after the end, the
    relay tries again.
    """

    _what = "the engine's feed"

    def __init__(self, engine: RemoteEngine):
        super().__init__()
        self.engine = engine
        #: The engine's newest hello.
        self._hello: bytes = b""
        #: The newest key frame and the events after it.
        self._since_key_frame: list[bytes] = []

    def _welcome(self, last_id: str, identity: Identity) -> Viewer:
        if self.sending and self._since_key_frame:
            return Viewer([self._hello, *self._since_key_frame])
        return Viewer([], lost=True)

    def _start(self) -> None:
        if not self.sending:
            self._hello, self._since_key_frame = b"", []
        super()._start()

    async def _send_all(self) -> str:
        try:
            async for event in self.engine.feed():
                self._take(event)
        except Unreachable as error:
            return str(error)
        return "the engine's feed ended"

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
