"""The HTTP generation endpoint, assembled from the table of routes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from jitney.engine.common.errors import RequestError
from jitney.engine.server.chat.endpoints import Endpoint
from jitney.engine.server.http.access import ApiKeys
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.disconnect import until_disconnect
from jitney.engine.server.http.edge import application
from jitney.engine.server.http.errors import HttpError
from jitney.engine.server.http.routes import ROUTES
from jitney.engine.server.http.routing import HttpRoute
from jitney.engine.server.http.service import Service
from jitney.engine.server.http.settings import ServerSettings
from jitney.engine.server.process.client import EngineClient

if TYPE_CHECKING:
    from jitney.engine.core import Tokenizer


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer | None,
    settings: ServerSettings,
    model_name: str,
    extra_routes: Sequence[BaseRoute] = (),
    *,
    routes: Sequence[HttpRoute] = ROUTES,
    keys: ApiKeys | None = None,
) -> Starlette:
    """The application; `app.state.service` is its `Service`, whose `tokenizer` may be set later.
    `begin_drain` refuses new requests, `drained` waits for the open ones. extra_routes have
    the same keys and limits; lifespans of mounted applications are run. keys: None: the settings'.
    """
    service = Service(client, tokenizer, settings, model_name)
    endpoint = partial(_endpoint_of, service)
    app = application(service, settings, routes, endpoint, extra_routes, keys, service.close)
    app.state.service = service
    return app


class _GenerationEndpoint(Endpoint[Service]):
    """Runs a generating handler within its key's limits, and cancels it when the client leaves."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = Context.of(scope)
        request = Request(scope, receive)
        try:
            # Reading the body here lets later calls of `receive` wait for the client's disconnect.
            await request.body()
            with self.service.generating(context), self.service.quotas.open(context.tenant):
                answering = self._answer(request, send)
                if context.background:
                    answering = self.service.until_drain(answering)
                context.left = await until_disconnect(receive, answering)
        except ClientDisconnect:
            context.left = True
        except (RequestError, HttpError) as error:
            code = error.info.code if isinstance(error, RequestError) else error.code
            self.service.metrics.rejected.labels(code or "invalid_request").inc()
            raise
        if context.left:
            self.service.metrics.disconnects.inc()


def _endpoint_of(service: Service, route: HttpRoute) -> Endpoint[Service]:
    kind = _GenerationEndpoint if route.generates else Endpoint
    return kind(service, route.handler)
