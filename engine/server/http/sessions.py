"""Sessions of browsers if API keys are set: a browser sends a key once, and then a random session
id in a cookie.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Literal, TypedDict

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from jitney.engine.common.key_file import digest_key
from jitney.engine.server.http.access import (
    EVERYBODY,
    NOBODY,
    ApiKeys,
    Identity,
    address_of,
)

_COOKIE = "jitney_session"
#: Seconds until a browser must sign in again.
_LIFETIME_S = 12 * 3600
#: Most sessions in memory; the oldest are dropped.
_MAX_SESSIONS = 1024


_Clock = Callable[[], float]


class Sessions:
    """Open sessions, in memory alone: a restart of the server ends them all, and so does the
    removal of their key.

    keys: without any, every client may look. clock: seconds.
    """

    def __init__(self, keys: ApiKeys, clock: _Clock = time.monotonic):
        self.keys = keys
        self._clock = clock
        #: Digest of the session id -> time of its end, and holder; oldest first.
        self._open: dict[str, tuple[float, Identity]] = {}

    @property
    def needed(self) -> bool:
        """False where every client may look."""
        return self.keys.needed

    def open(self, identity: Identity) -> str:
        session = secrets.token_urlsafe(32)
        self._open[digest_key(session)] = (self._clock() + _LIFETIME_S, identity)
        while len(self._open) > _MAX_SESSIONS:
            del self._open[next(iter(self._open))]
        return session

    def close(self, session: str | None) -> None:
        if session:
            self._open.pop(digest_key(session), None)

    def identify(self, session: str | None) -> Identity:
        """The holder of a session id, looked up by digest, so that timing reveals nothing."""
        if not self.needed:
            return EVERYBODY
        if not session:
            return NOBODY
        end, identity = self._open.get(digest_key(session), (0.0, NOBODY))
        return self.keys.current(identity) if self._clock() < end else NOBODY

    def begin(self, key: str, request: Request, response: Response) -> None:
        """A new session for the holder of the key, in a cookie that scripts cannot read and other
        sites cannot send. Raises HttpError as `ApiKeys.identify`.
        """
        session = self.open(self.keys.identify(key, address_of(request.scope)))
        response.set_cookie(_COOKIE, session, max_age=_LIFETIME_S, **_cookie_of(request))

    def end(self, request: Request, response: Response) -> None:
        """End the session of the request's sender."""
        self.close(request.cookies.get(_COOKIE))
        response.delete_cookie(_COOKIE, **_cookie_of(request))

    def of_request(self, scope: Scope) -> Identity:
        """The sender of a request, by its cookie."""
        return self.identify(Request(scope).cookies.get(_COOKIE))


class _CookieAttributes(TypedDict):
    """Attributes that limit the requests with which a browser sends the cookie."""

    path: str
    httponly: bool
    samesite: Literal["strict"]
    secure: bool


def _cookie_of(request: Request) -> _CookieAttributes:
    """Requests to this page only, and over TLS only if this request came over TLS."""
    return {
        "path": request.scope.get("root_path") or "/",
        "httponly": True,
        "samesite": "strict",
        "secure": request.url.scheme == "https",
    }
