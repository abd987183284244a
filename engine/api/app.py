"""The HTTP generation endpoint, assembled."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from jitney.engine.api.endpoints import chat_completions, completions
from jitney.engine.api.errors import error_response
from jitney.engine.api.middleware import BearerAuth, BodyLimit, ErrorMiddleware, HeaderLimits
from jitney.engine.api.ops import ops_routes
from jitney.engine.api.service import Service, context_of
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
    lifespan: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
) -> Starlette:
    """The application; `app.state.service` is its `Service`.

    tokenizer may be None while the model is being fetched; set `app.state.service.tokenizer` when
    it is there. `app.state.service.begin_drain()` refuses new requests, `await
    app.state.service.drained()` waits for the open ones. extra_routes stand behind the same keys
    and limits. lifespan runs around the server's life, on its event loop.
    """
    service = Service(client, tokenizer, settings, model_name)

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        async with lifespan():
            yield
        service.close()

    app = Starlette(
        routes=[
            Route("/v1/completions", completions(service), methods=["POST"]),
            Route("/v1/chat/completions", chat_completions(service), methods=["POST"]),
            *ops_routes(service),
            *extra_routes,
        ],
        middleware=[
            Middleware(ErrorMiddleware, service=service),
            Middleware(HeaderLimits, settings=settings),
            Middleware(BearerAuth, settings=settings),
            Middleware(BodyLimit, settings=settings),
        ],
        exception_handlers={HTTPException: _router_error},
        lifespan=life,
    )
    app.router.redirect_slashes = False  # the redirect would repeat the client's Host header
    app.state.service = service
    return app


async def _router_error(request: Request, error: Exception) -> Response:
    return error_response(error, context_of(request.scope).request_id)
