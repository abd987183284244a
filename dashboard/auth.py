"""Middleware of the page's routes: headers on every answer, access by role, and the feed's
stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jitney.dashboard.sessions import Sessions
from jitney.dashboard.viewers import TooManyViewers, Viewer
from jitney.engine.server import (
    EVERYBODY,
    AccessControl,
    ErrorReply,
    HttpError,
    Identity,
    Role,
    refuse_other_sites,
    route_path,
    until_disconnect,
)

#: Content-Security-Policy: nothing from other origins and no inline script. Plotly needs inline
#: styles, and data: URLs for its icons.
_POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "style-src 'self' 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_REPORT = "/report"
#: A report is one file with its scripts in it, so it runs apart from the page: in a sandbox, with
#: no session.
_REPORT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: "
    "blob:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; sandbox allow-scripts "
    "allow-downloads"
)


@dataclass(frozen=True, slots=True)
class _PageGuard:
    """Security headers on every answer, and no answer to pages of other sites.

    cors_origins: other origins whose pages may read answers.
    """

    app: ASGIApp
    cors_origins: Sequence[str] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = route_path(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                _add_headers(message, path)
            await send(message)

        try:
            self._check(scope)
            await self.app(scope, receive, send_with_headers)
        except HttpError as error:
            refusal = ErrorReply.of(error, "none").response()
            await refusal(scope, receive, send_with_headers)

    def _check(self, scope: Scope) -> None:
        """Raise an error for requests of other sites' pages. Links to the page are allowed; scripts
        may not even start a feed: they could not read it, but it would count as a viewer.
        """
        if scope["method"] != "GET" or not _is_navigation(scope):
            refuse_other_sites(scope, self.cors_origins)


def _is_navigation(scope: Scope) -> bool:
    """Whether a user opens this page or follows a link to it, so that no script sees the answer."""
    return Headers(scope=scope).get("sec-fetch-mode") == "navigate"


def page_middleware(
    lines: Sequence[PageLine], sessions: Sessions, cors_origins: Sequence[str]
) -> list[Middleware]:
    """The middleware of a page's routes, outermost first."""
    return [
        Middleware(_PageGuard, cors_origins),
        Middleware(
            AccessControl,
            keys=sessions.keys,
            role_of=partial(_role_of, lines),
            identify=sessions.of_request,
            missing=_not_signed_in,
        ),
    ]


class PageLine(NamedTuple):
    """A line of a page's table of routes."""

    route: Route | Mount
    #: Least role of its users.
    role: Role = Role.USER


def _role_of(lines: Sequence[PageLine], scope: Scope) -> Role:
    path = route_path(scope) or "/"
    for route, role in lines:
        if route.path_regex.match(path):
            return role
    return Role.USER


def _not_signed_in() -> HttpError:
    return HttpError(401, "sign in on the page first", code="not_signed_in")


def _add_headers(message: Message, path: str) -> None:
    headers = MutableHeaders(scope=message)
    headers.update(_HEADERS)
    if path.endswith(_REPORT):
        headers["content-security-policy"] = _REPORT_POLICY
    headers.setdefault("cache-control", "no-store")


class _FeedSource(Protocol):
    """The feed of a local or remote engine."""

    def viewer(
        self, last_id: str = "", identity: Identity = EVERYBODY
    ) -> AbstractContextManager[Viewer]: ...


@dataclass(frozen=True, slots=True)
class FeedEndpoint:
    """The feed as an endless response, which ends with the engine. A disconnect is awaited at the
    same time, so that a viewer who leaves frees its place at once."""

    feed: _FeedSource

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        last_id = Request(scope).headers.get("last-event-id", "")
        try:
            with self.feed.viewer(last_id, Identity.of(scope)) as viewer:
                await _start(send)
                if scope["method"] != "HEAD":
                    await until_disconnect(receive, _send_all(viewer, send))
                with contextlib.suppress(OSError):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TooManyViewers as error:
            raise _full(error) from None


def _full(error: TooManyViewers) -> HttpError:
    return HttpError(503, str(error), code="too_many_viewers", headers={"retry-after": "5"})


async def _start(send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_all(viewer: Viewer, send: Send) -> None:
    async for event in viewer:
        body = event + viewer.take_queued()  # a write costs more than its bytes
        await send({"type": "http.response.body", "body": body, "more_body": True})
