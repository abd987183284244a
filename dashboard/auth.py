"""What stands around the page's routes: headers on every answer, the session check, and the feed's
stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jitney.dashboard.sessions import COOKIE, Sessions
from jitney.dashboard.viewers import TooManyViewers, Viewer
from jitney.engine.api.errors import HttpError, error_response

#: Nothing from elsewhere, no inline script; Plotly sets inline styles and draws its icons from
#: data: URLs.
POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "style-src 'self' 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
#: A report is one file with its scripts in it, so it runs apart from the page: in a sandbox, with
#: no session.
REPORT, REPORT_POLICY = (
    "/report",
    (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: "
        "blob:; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; sandbox allow-scripts "
        "allow-downloads"
    ),
)
#: All else is data: the page itself turns into the sign-in form, and assets hold none.
OPEN_PATHS, OPEN_PREFIX = frozenset({"/", "", "/sign-in"}), "/assets/"


@dataclass(frozen=True, slots=True)
class Guard:
    """Security headers for all, data for those who may look."""

    app: ASGIApp
    sessions: Sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        path = scope["path"].removeprefix(scope.get("root_path", ""))

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if path.endswith(REPORT):
                    headers["content-security-policy"] = REPORT_POLICY
                headers.setdefault("cache-control", "no-store")
            await send(message)

        is_open = path in OPEN_PATHS or path.startswith(OPEN_PREFIX)
        if not is_open and not self.sessions.admits(Request(scope).cookies.get(COOKIE)):
            refusal = error_response(
                HttpError(401, "sign in on the page first", code="not_signed_in"), "none"
            )
            return await refusal(scope, receive, guarded)
        await self.app(scope, receive, guarded)


class Watchable(Protocol):
    """A feed, of an engine here or elsewhere."""

    @property
    def viewers(self) -> int: ...
    def viewer(self, last_id: str = "") -> AbstractContextManager[Viewer]: ...


@dataclass(frozen=True, slots=True)
class LiveFeed:
    """The feed as an endless response. It ends with the engine, or when the client leaves, which is
    waited for at the same time: a viewer that is gone frees its place at once."""

    feed: Watchable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self.feed.viewer(Request(scope).headers.get("last-event-id", "")) as viewer:
                await self._stream(viewer if scope["method"] != "HEAD" else None, receive, send)
        except TooManyViewers:
            raise HttpError(
                503,
                f"all {self.feed.viewers} viewers' places are taken",
                code="too_many_viewers",
                headers={"retry-after": "5"},
            ) from None

    async def _stream(self, viewer: Viewer | None, receive: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")],
            }
        )
        if viewer is not None:
            leaving = asyncio.create_task(_left(receive))
            sending = asyncio.create_task(_send_all(viewer, send))
            try:
                await asyncio.wait((leaving, sending), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (leaving, sending):
                    task.cancel()
                await asyncio.gather(leaving, sending, return_exceptions=True)
            if not sending.cancelled() and (error := sending.exception()):
                raise error
        with contextlib.suppress(OSError):
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_all(events: Viewer, send: Send) -> None:
    async for event in events:
        await send({"type": "http.response.body", "body": event, "more_body": True})
