"""The HTTP generation endpoint, assembled from the table of routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from jitney.engine.api.access import AccessControl, Identify, Identity, Keys, bearer
from jitney.engine.api.batches.service import Batches
from jitney.engine.api.context import context_of
from jitney.engine.api.cross_site import SiteGuard, cors
from jitney.engine.api.endpoints import Endpoint, GenerationEndpoint
from jitney.engine.api.errors import HttpError, echo, error_response
from jitney.engine.api.jobs.service import Jobs
from jitney.engine.api.jobs.table import JOB_ENDS
from jitney.engine.api.middleware import BodyLimit, ErrorMiddleware, HeaderLimits, Told
from jitney.engine.api.openapi import document
from jitney.engine.api.routes import ROUTES
from jitney.engine.api.routing import HttpRoute, Role, RouteTable, route_path
from jitney.engine.api.service import Service
from jitney.engine.api.settings import ServerSettings
from jitney.engine.process.client import EngineClient

if TYPE_CHECKING:
    from jitney.engine.text.tokenizer import Tokenizer


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer | None,
    settings: ServerSettings,
    model_name: str,
    extra_routes: Sequence[BaseRoute] = (),
    *,
    routes: Sequence[HttpRoute] = ROUTES,
) -> Starlette:
    """The application; `app.state.service` is its `Service`.

    tokenizer may be None while the model is being fetched; set `app.state.service.tokenizer` when
    it is there. `app.state.service.begin_drain()` refuses new requests, `await
    app.state.service.drained()` waits for the open ones. extra_routes stand behind the same keys
    and limits.
    """
    service = Service(client, tokenizer, settings, model_name)
    service.openapi = document(tuple(routes))
    table = RouteTable(routes)
    batches = service.batches = Batches(service, table, [JOB_ENDS])
    jobs = service.jobs = Jobs(service, table, batches)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await batches.start()
        await jobs.start()
        yield
        await jobs.close()
        await batches.close()
        service.close()

    app = Starlette(
        routes=[*(_starlette_route(route, service) for route in routes), *extra_routes],
        middleware=edge(service, settings, table),
        exception_handlers={HTTPException: partial(answer_unrouted, table)},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # the redirect would repeat the client's Host header
    app.state.service = service
    return app


def edge(told: Told, settings: ServerSettings, table: RouteTable) -> list[Middleware]:
    """What every request passes before a handler sees it, outermost first."""
    return [
        *cors(settings),
        Middleware(ErrorMiddleware, service=told, table=table),
        Middleware(HeaderLimits, settings=settings),
        Middleware(SiteGuard, settings=settings),
        Middleware(
            AccessControl,
            role_of=partial(_role_of, settings),
            identify=_identify(Keys(settings)),
            missing=_no_key,
        ),
        Middleware(BodyLimit, settings=settings),
    ]


def _starlette_route(route: HttpRoute, service: Service) -> Route:
    kind = GenerationEndpoint if route.generates else Endpoint
    return Route(route.path, kind(service, route.handler), methods=route.methods)


def _role_of(settings: ServerSettings, scope: Scope) -> Role:
    """By the request's line in the table. Decides on the path alone: one rebuilt from the Host
    header can be made to look public.
    """
    route = context_of(scope).route
    if route is not None:
        return route.role
    return Role.ANYBODY if _is_public(settings, route_path(scope)) else Role.USER


def _is_public(settings: ServerSettings, path: str) -> bool:
    return path in settings.public_paths or path.startswith(settings.public_prefixes)


def _identify(keys: Keys) -> Identify:
    by_header = bearer(keys)

    def identify(scope: Scope) -> Identity:
        identity = by_header(scope)
        context_of(scope).tenant = identity.tenant
        return identity

    return identify


def _no_key() -> HttpError:
    return HttpError(
        401,
        "give a valid API key as 'Authorization: Bearer KEY', or as 'x-api-key: KEY'",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
        close=True,
    )


def _no_route(path: str) -> HttpError:
    return HttpError(
        404, f"no route {echo(path)} here; /openapi.json lists what there is", code="not_found"
    )


async def answer_unrouted(table: RouteTable, request: Request, error: Exception) -> Response:
    """Answers to a path or method that no route takes."""
    context = context_of(request)
    error = _router_error(table, route_path(request.scope), error)
    return error_response(error, context.request_id, context.error_form)


def _router_error(table: RouteTable, path: str, error: Exception) -> Exception:
    """The router's error in our words."""
    allowed = table.allowed(path)
    if allowed:  # else the path is one of the extra routes', or nobody's
        return HTTPException(405, headers={"allow": ", ".join(allowed)})
    if isinstance(error, HTTPException) and error.status_code == 404:
        return _no_route(path)
    return error
