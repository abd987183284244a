"""The HTTP generation endpoint, assembled from the table of routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route

from jitney.engine.api.batches.service import Batches
from jitney.engine.api.edge import answer_unrouted, edge
from jitney.engine.api.endpoints import Endpoint, GenerationEndpoint
from jitney.engine.api.jobs.service import Jobs, at_work
from jitney.engine.api.jobs.table import JOB_ENDS
from jitney.engine.api.openapi import document
from jitney.engine.api.routes import ROUTES
from jitney.engine.api.routing import HttpRoute, RouteTable
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
        async with at_work(batches, jobs):
            yield
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


def _starlette_route(route: HttpRoute, service: Service) -> Route:
    kind = GenerationEndpoint if route.generates else Endpoint
    return Route(route.path, kind(service, route.handler), methods=route.methods)
