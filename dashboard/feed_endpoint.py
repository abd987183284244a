"""The endpoint of a feed: an endless response to each viewer."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from jitney.dashboard.viewers import TooManyViewers, Viewer
from jitney.engine.server import HttpError, Identity, StreamingWriter, until_disconnect

_HEADERS = {"content-type": "text/event-stream", "x-accel-buffering": "no"}


class _FeedSource(Protocol):
    """The feed of a local or remote engine."""

    def viewer(self, last_id: str, identity: Identity) -> AbstractContextManager[Viewer]: ...


@dataclass(frozen=True, slots=True)
class FeedEndpoint:
    """The feed as an endless response, which ends with the engine. A disconnect is awaited at the
    same time, so that a viewer who leaves frees its place at once."""

    feed: _FeedSource

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        last_id = Request(scope).headers.get("last-event-id", "")
        parts = StreamingWriter(send)
        try:
            with self.feed.viewer(last_id, Identity.of(scope)) as viewer:
                await parts.begin(_HEADERS)
                if scope["method"] != "HEAD":
                    await until_disconnect(receive, _send_all(viewer, parts))
                with contextlib.suppress(OSError):
                    await parts.end()
        except TooManyViewers as error:
            raise _full(error) from None


def _full(error: TooManyViewers) -> HttpError:
    return HttpError(503, str(error), code="too_many_viewers", headers={"retry-after": "5"})


async def _send_all(viewer: Viewer, parts: StreamingWriter) -> None:
    async for event in viewer:
        await parts.write(event + viewer.take_queued())  # a write costs more than its bytes
