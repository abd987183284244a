"""Access to a page in a browser, which is checked apart from that to the API: a sign-in, a role for
each route, security headers, and no answer to pages of other sites.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jitney.engine.common.errors import JitneyError
from jitney.engine.server.http.access import AccessControl, ApiKeys
from jitney.engine.server.http.cross_site import cors, refuse_other_sites
from jitney.engine.server.http.errors import ErrorReply, HttpError
from jitney.engine.server.http.middleware import HeaderLimits
from jitney.engine.server.http.routing import Role, route_path
from jitney.engine.server.http.sessions import Sessions
from jitney.engine.server.http.settings import ServerSettings

#: The headers of the answer to a path.
type _HeadersOf = Callable[[str], Mapping[str, str]]
type _Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


class PageLine(NamedTuple):
    """A line of a page's table of routes."""

    route: Route | Mount
    #: Least role of its users.
    role: Role = Role.USER


class PageAccess:
    """Makes the applications of a page, which let its users in by session.

    settings: allowed_hosts, cors_origins and keys are used. keys: the accepted ones; None: those of
    the settings. headers_of: security headers of the answer to a path.
    """

    def __init__(
        self, settings: ServerSettings, keys: ApiKeys | None, headers_of: _HeadersOf
    ) -> None:
        self.sessions = Sessions(keys or ApiKeys(settings))
        self._settings = settings
        self._headers_of = headers_of

    def mounted(self, lines: Sequence[PageLine], lifespan: _Lifespan) -> Starlette:
        """The page within another application, which must not require a bearer key, but must check
        hosts and headers.
        """
        app = Starlette(
            routes=[line.route for line in lines],
            middleware=self._middleware(lines),
            exception_handlers=_HANDLERS,
            lifespan=lifespan,
        )
        app.router.redirect_slashes = False
        return app

    def by_itself(self, lines: Sequence[PageLine], lifespan: _Lifespan) -> Starlette:
        """The page as an application of its own."""
        router = Router([line.route for line in lines], redirect_slashes=False)
        inner: Any = HeaderLimits(router, self._settings)
        return Starlette(
            routes=[Mount("/", app=inner)],
            exception_handlers=_HANDLERS,
            lifespan=lifespan,
            middleware=[*cors(self._settings), *self._middleware(lines)],
        )

    def _middleware(self, lines: Sequence[PageLine]) -> list[Middleware]:
        """The middleware of the routes, outermost first."""
        return [
            Middleware(_PageGuard, self._headers_of, self._settings.server.cors_origins),
            Middleware(
                AccessControl,
                keys=self.sessions.keys,
                role_of=partial(_role_of, lines),
                identify=self.sessions.of_request,
                missing=_not_signed_in,
            ),
        ]


async def _failed(request: Request, error: Exception) -> Response:
    """Errors in the endpoint's own form."""
    context = request.scope.get("jitney")
    return ErrorReply.of(error, context.request_id if context is not None else "none").response()


#: Exception -> its handler.
_HANDLERS: dict[Any, Any] = {HTTPException: _failed, JitneyError: _failed}


@dataclass(frozen=True, slots=True)
class _PageGuard:
    """Security headers on every answer, and no answer to pages of other sites.

    cors_origins: other origins whose pages may read answers.
    """

    app: ASGIApp
    headers_of: _HeadersOf
    cors_origins: Sequence[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = route_path(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(self.headers_of(path))
                headers.setdefault("cache-control", "no-store")
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


def _role_of(lines: Sequence[PageLine], scope: Scope) -> Role:
    path = route_path(scope) or "/"
    for route, role in lines:
        if route.path_regex.match(path):
            return role
    return Role.USER


def _not_signed_in() -> HttpError:
    return HttpError(401, "sign in on the page first", code="not_signed_in")
