"""The middleware of every request, and answers without a route, for engines and fleets."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jitney.engine.server.http.access import AccessControl, ApiKeys, Identity, client_of
from jitney.engine.server.http.background import BackgroundRequests
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.cross_site import cors, refuse_other_sites
from jitney.engine.server.http.endpoint import Endpoint, GenerationEndpoint
from jitney.engine.server.http.errors import ErrorReply, HttpError, echo
from jitney.engine.server.http.middleware import (
    BodyLimit,
    ErrorMiddleware,
    HeaderLimits,
)
from jitney.engine.server.http.openapi import document
from jitney.engine.server.http.quotas import Shares
from jitney.engine.server.http.routing import HttpRoute, Role, RouteTable, route_path
from jitney.engine.server.http.server_context import ServerContext
from jitney.engine.server.http.settings import ServerSettings
from jitney.engine.server.http.tenants import identity_of
from jitney.engine.server.tasks.service import InternalRequests

#: Methods that change nothing. Browsers send OPTIONS before a cross-site request.
_SAFE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})


def application(
    server: ServerContext,
    settings: ServerSettings,
    routes: Sequence[HttpRoute],
    generates: Callable[[HttpRoute], bool],
    extra_routes: Sequence[BaseRoute] = (),
    keys: ApiKeys | None = None,
    at_end: Callable[[], None] = lambda: None,
) -> Starlette:
    """The application of an engine or a fleet: the routes behind the middleware, with their OpenAPI
    document, and with batches and jobs over them. generates: whether
    a drain waits for the requests of a route, which end when their client leaves.
    extra_routes have the same keys and limits; lifespans of mounted applications are run. keys:
    None: those of the settings. at_end: called at its end.
    """
    server.openapi = document(tuple(routes))
    table = RouteTable(routes)
    tasks = server.internal_requests = InternalRequests(server, table)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(tasks.at_work())
            for route in extra_routes:  # mounted ones do not run their lifespans
                if isinstance(route, Mount) and isinstance(route.app, Starlette):
                    await stack.enter_async_context(route.app.router.lifespan_context(route.app))
            yield
        at_end()

    own: list[Route] = []
    for route in routes:
        kind = GenerationEndpoint if generates(route) else Endpoint
        own.append(Route(route.path, kind(server, route.handler), methods=[route.method]))
    app = Starlette(
        routes=[*own, *extra_routes],
        middleware=_edge(server, settings, table, keys or ApiKeys(settings)),
        exception_handlers={HTTPException: partial(_answer_unrouted, table)},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # the redirect would repeat the client's Host header
    return app


def _edge(
    observer: ServerContext, settings: ServerSettings, table: RouteTable, keys: ApiKeys
) -> list[Middleware]:
    """The middleware of every request, outermost first."""
    # Most connections of one client that may have a request under way.
    most = math.ceil(settings.max_connections * 3 / 4)
    whose = "requests (three quarters of max_connections)"
    shares = Shares(most, whose, "too_many_connections")
    return [
        *cors(settings),
        Middleware(ErrorMiddleware, service=observer, table=table),
        Middleware(HeaderLimits, settings=settings),
        Middleware(_SiteGuard, settings=settings),
        Middleware(
            AccessControl,
            keys=keys,
            role_of=partial(_role_of, settings),
            identify=partial(_identify, keys),
            missing=_no_key,
        ),
        Middleware(_ClientShares, shares=shares),
        Middleware(BackgroundRequests),
        Middleware(BodyLimit, settings=settings, service=observer),
    ]


@dataclass(frozen=True, slots=True)
class _SiteGuard:
    """Refuses changes by pages of other sites than those of `cors_origins`."""

    app: ASGIApp
    settings: ServerSettings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method", "GET") not in _SAFE:
            refuse_other_sites(scope, self.settings.server.cors_origins)
        await self.app(scope, receive, send)


@dataclass(frozen=True, slots=True)
class _ClientShares:
    """Limits the connections of one client, so that other clients get some."""

    app: ASGIApp
    shares: Shares

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = Context.of(scope).route if scope["type"] == "http" else None
        if scope["type"] != "http" or (route is not None and route.is_probe):
            await self.app(scope, receive, send)
            return
        with self.shares.one_of(client_of(scope)):
            await self.app(scope, receive, send)


def _role_of(settings: ServerSettings, scope: Scope) -> Role:
    """The role that a route needs, by the path alone: a Host header can fake a rebuilt one."""
    route = Context.of(scope).route
    if route is not None:
        return route.role
    path = route_path(scope)
    is_public = path in settings.public_paths or path.startswith(settings.public_prefixes)
    return Role.ANYBODY if is_public else Role.USER


def _identify(keys: ApiKeys, scope: Scope) -> Identity:
    identity = identity_of(keys.of_request(scope), scope)
    Context.of(scope).tenant = identity.tenant
    return identity


def _no_key() -> HttpError:
    return HttpError(
        401,
        "give a valid API key as 'Authorization: Bearer KEY', or as 'x-api-key: KEY'",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
        close=True,
    )


async def _answer_unrouted(table: RouteTable, request: Request, error: Exception) -> Response:
    """Answers to a path or method that no route takes."""
    context = Context.of(request)
    error = _router_error(table, route_path(request.scope), error)
    return ErrorReply.of(error, context.request_id).response(context.error_form)


def _router_error(table: RouteTable, path: str, error: Exception) -> Exception:
    """The router's error with this server's message."""
    allowed = table.allowed(path)
    if allowed:  # else the path is an extra route or unknown
        return HTTPException(405, headers={"allow": ", ".join(allowed)})
    if isinstance(error, HTTPException) and error.status_code == 404:
        message = f"no route {echo(path)} here; /openapi.json lists what there is"
        return HttpError(404, message, code="not_found")
    return error
