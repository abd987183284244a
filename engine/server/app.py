"""The HTTP generation endpoint, assembled from the table of routes."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.routing import BaseRoute

from jitney.engine.server.http.access import ApiKeys
from jitney.engine.server.http.edge import application
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
    generates = attrgetter("generates")
    app = application(service, settings, routes, generates, extra_routes, keys, service.close)
    app.state.service = service
    return app
