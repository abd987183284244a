"""Requests that a browser sends for a web page of another site. Browsers mark them in
Sec-Fetch-Site, which no page can set, and in Origin; other clients (curl, SDKs) send neither.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Scope

from jitney.engine.server.http.context import Notes
from jitney.engine.server.http.errors import HttpError, echo
from jitney.engine.server.http.settings import ServerSettings

#: Values of Sec-Fetch-Site for a page of this server, and for an address typed by the user.
_OURS = ("same-origin", "none")
#: Response headers that pages of other sites may read.
_READABLE = (
    "x-request-id",
    "x-session-id",
    *Notes.HEADERS,
    "openai-processing-ms",
    "retry-after",
    "retry-after-ms",
)


def refuse_other_sites(scope: Scope, allowed: Sequence[str]) -> None:
    """Raise HttpError 403 for a page of another site. allowed: as `cors_origins`. Another port is
    another site: on one machine it may be another user's.
    """
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    site = headers.get("sec-fetch-site")
    if site in _OURS or "*" in allowed or (origin is not None and _is_among(origin, allowed)):
        return
    if site is None and (origin is None or _is_own(origin, headers.get("host", ""))):
        return
    raise HttpError(
        403,
        f"a page of another site ({echo(origin or site)}) may not do this; if it should, start the "
        "server with its origin in cors_origins (--cors-origins)",
        code="cross_site",
        close=True,
    )


def cors(settings: ServerSettings) -> list[Middleware]:
    """CORS middleware, outermost. Pages of allowed sites send no cookies: they need a key."""
    origins = settings.server.cors_origins
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=[origin for origin in origins if not _has_wildcard(origin)],
            allow_origin_regex=_pattern(origins),
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=_READABLE,
        )
    ]


def _has_wildcard(origin: str) -> bool:
    """Whether the origin is a pattern of several origins; `*` alone, for all, is none."""
    return "*" in origin and origin != "*"


@cache
def _pattern(origins: Sequence[str]) -> str | None:
    """A regular expression that matches the origins with wildcards; None if there are none."""
    patterns = [
        re.escape(origin).replace(r"\*", "[A-Za-z0-9_-]+")
        for origin in origins
        if _has_wildcard(origin)
    ]
    return "|".join(patterns) or None


def _is_among(origin: str, allowed: Sequence[str]) -> bool:
    pattern = _pattern(tuple(allowed))
    return origin in allowed or (pattern is not None and bool(re.fullmatch(pattern, origin)))


def _is_own(origin: str, host: str) -> bool:
    """Whether the origin is this server, by the Host header; the scheme may differ (proxies)."""
    _, _, authority = origin.partition("://")
    return bool(authority) and authority.lower() == host.lower()
