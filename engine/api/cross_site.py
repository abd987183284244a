"""Requests that a web page of another site has its visitor's browser send.

A browser says where a request comes from: in Sec-Fetch-Site, which no page can set, and in Origin.
What sends neither (curl, an SDK, a probe) is no browser, and acts for itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Scope

from jitney.engine.api.context import Notes
from jitney.engine.api.errors import HttpError, echo
from jitney.engine.api.settings import ServerSettings

#: Values of Sec-Fetch-Site: a page of this very server, and a person (an address typed in).
_OURS = ("same-origin", "none")
#: Headers of ours that a page of another site may read.
_READABLE = (
    "x-request-id",
    "x-session-id",
    *Notes.HEADERS,
    "openai-processing-ms",
    "retry-after",
    "retry-after-ms",
)


def refuse_other_sites(scope: Scope, allowed: Sequence[str]) -> None:
    """Raise HttpError 403 for a request from a page of another site.

    allowed: origins that may; "*" for all. Another port is another site here: on one machine each
    port may be somebody else's program.
    """
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    site = headers.get("sec-fetch-site")
    if site in _OURS or "*" in allowed or (origin is not None and origin in allowed):
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
    """What tells browsers which pages may read our answers; it must stand before everything that
    answers. Cookies are not among what such a page may send: it needs a key.
    """
    if not settings.server.cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=settings.server.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=_READABLE,
        )
    ]


def _is_own(origin: str, host: str) -> bool:
    """The origin is this server, as the Host header calls it. Its scheme may differ: a proxy in
    front may speak TLS.
    """
    _, _, authority = origin.partition("://")
    return bool(authority) and authority.lower() == host.lower()
