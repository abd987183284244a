"""The handler of a route as an ASGI application."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from jitney.engine.common.errors import RequestError
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.disconnect import until_disconnect
from jitney.engine.server.http.errors import HttpError
from jitney.engine.server.http.routing import Handler
from jitney.engine.server.http.server_context import ServerContext


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Runs a handler. server: the first argument of the handlers."""

    server: ServerContext
    handler: Handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(Request(scope, receive), send)

    async def _answer(self, request: Request, send: Send) -> None:
        answer = await self.handler(self.server, request)
        await answer(request.scope, request.receive, send)


@dataclass(frozen=True, slots=True)
class GenerationEndpoint(Endpoint):
    """Runs a handler as one of the open requests that a drain waits for, and cancels it when the
    client leaves.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, server = Context.of(scope), self.server
        request = Request(scope, receive)
        try:
            # Reading the body here lets later calls of `receive` wait for the client's disconnect.
            await request.body()
            with server.generating(context):
                answering = self._answer(request, send)
                if context.background:
                    answering = server.until_drain(answering)
                context.left = await until_disconnect(receive, answering)
        except ClientDisconnect:
            context.left = True
        except (RequestError, HttpError) as error:
            server.rejected(error)
            raise
        if context.left:
            server.metrics.disconnects.inc()
