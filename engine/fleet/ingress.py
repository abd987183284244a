"""The endpoint of a fleet: it has the engine's API, and forwards every request to a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from jitney.engine.common.requests import JsonDict
from jitney.engine.fleet.fleet import Fleet
from jitney.engine.fleet.forwarding import ProxiedAnswer, stream_failure
from jitney.engine.fleet.request import READING, WRITING, ProxiedRequest
from jitney.engine.fleet.request import Route as ModelRoute
from jitney.engine.fleet.rollout.rollout_routes import ROLLOUT_ROUTES
from jitney.engine.server import (
    ApiKeys,
    Context,
    HttpError,
    HttpRoute,
    ResponseModel,
    Role,
    ServerSettings,
    StreamingWriter,
    application,
    front_routes,
    json_answer,
    without_tag,
)

#: SageMaker's route for completions and chats.
_INVOCATIONS = "/invocations"
_NAMING = WRITING | READING
#: Ollama's routes whose body names the model; clients may add a tag to the name.
_TO_TAGGED_MODELS = {route for route in _NAMING if route.startswith("/api/")} | {"/api/show"}
#: Other routes of an engine whose body names the model.
_TO_MODELS = (_NAMING - _TO_TAGGED_MODELS) | {
    "/v1/responses/input_tokens",
    "/v1/messages/count_tokens",
    _INVOCATIONS,
    "/tokenize",
    "/detokenize",
    "/apply-template",
}
#: Routes about one stored answer, which only one engine has.
_TO_KEEPERS = (
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel",
    "/v1/responses/{response_id}/input_items",
)


class ReplicaList(ResponseModel):
    """GET /fleet/replicas: by model, the engines as the fleet knows them."""

    models: dict[str, list[JsonDict]]


@dataclass(frozen=True, slots=True)
class _Sending:
    """ASGI application that sends a client the answer of the request's model."""

    fleet: Fleet
    request: ProxiedRequest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, model = Context.of(scope), self.fleet.models[self.request.model]
        with self.fleet.quotas.holding(context.tenant, self.request) as account:
            async with model.answer(self.request) as answer:
                await self._send(account.watched(answer), context, send)

    async def _send(self, answer: ProxiedAnswer, context: Context, send: Send) -> None:
        """Send the answer. The status is sent with the first byte, so that an earlier failure can
        still set the status.
        """
        body = aiter(answer.body)
        first = await anext(body, b"")
        if not context.background:
            first_s = context.elapsed_ms / 1000
            self.fleet.metrics.first_byte.labels(self.request.model).observe(first_s)
        self.fleet.note_keeper(self.request, answer.replica, first)
        headers = answer.headers
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        parts = StreamingWriter(send)
        await parts.write(first)
        if answer.is_stream:
            await self._send_stream(body, context, parts)
        else:
            async for data in body:
                await parts.write(data)
        await parts.end()

    async def _send_stream(
        self, body: AsyncIterator[bytes], context: Context, parts: StreamingWriter
    ) -> None:
        """Send the rest of a stream, up to its end or to the error passed to `Context.end`."""
        task = asyncio.current_task()
        assert task is not None  # a coroutine always runs in a task
        early: list[Exception] = []

        def end(error: Exception) -> None:
            early.append(error)
            task.cancel()

        context.end = end
        try:
            async for data in body:
                await parts.write(data)
        except asyncio.CancelledError:
            if not early:
                raise
            task.uncancel()
            await parts.write(stream_failure(early[0], self.request))
        finally:
            context.end = None


async def _to_model(fleet: Fleet, request: Request) -> ASGIApp:
    """Forward a request to the model that its body names."""
    fields = await fleet.json_body(request)
    return await _sending(fleet, request, fields, fleet.model_name(fields.get("model")))


async def _to_tagged_model(fleet: Fleet, request: Request) -> ASGIApp:
    """Like `_to_model`, for bodies in Ollama's form."""
    fields = await fleet.json_body(request)
    name = fields.get("model") or fields.get("name")
    if isinstance(name, str) and name not in fleet.models and name not in fleet.adapters:
        name = without_tag(name)
    return await _sending(fleet, request, fields, fleet.model_name(name))


async def _sending(fleet: Fleet, request: Request, fields: JsonDict, name: str) -> _Sending:
    """Prepare a client's request for its model. name: a model or an adapter of the fleet."""
    proxied = await ProxiedRequest.of(request, fields)
    if proxied.route == _INVOCATIONS:
        is_chat = fields.get("messages") is not None
        proxied = replace(proxied, path=ModelRoute.CHAT if is_chat else ModelRoute.COMPLETIONS)
    if name in fleet.adapters:
        proxied = replace(proxied, model=fleet.adapters[name], adapter=name)
    else:
        proxied = replace(proxied, model=name)
    keeper = await fleet.earlier_keeper(proxied)
    if keeper is not None and keeper.model == proxied.model:
        proxied = replace(proxied, keeper=keeper.replica)
    return _Sending(fleet, proxied)


async def _to_keeper(fleet: Fleet, request: Request) -> ASGIApp:
    """Forward a request to the engine that stores the answer that its path names."""
    proxied = await ProxiedRequest.of(request)
    id = request.path_params["response_id"]
    keeper = await fleet.keeper(proxied, id)
    if keeper is None:
        raise HttpError.missing("response", id, code="response_not_found", param="response_id")
    return _Sending(fleet, replace(proxied, model=keeper.model, keeper=keeper.replica))


async def _list_replicas(fleet: Fleet, request: Request) -> Response:
    shown = {name: [each.shown() for each in replicas] for name, replicas in fleet.replicas.items()}
    return json_answer(ReplicaList(shown))


#: Path -> handler, of the engine's routes that are forwarded.
_PASSED = {
    **dict.fromkeys(_TO_MODELS, _to_model),
    **dict.fromkeys(_TO_TAGGED_MODELS, _to_tagged_model),
    **dict.fromkeys(_TO_KEEPERS, _to_keeper),
}
_FRONT_ROUTES = front_routes(_PASSED)
[_LIVEZ] = [route for route in _FRONT_ROUTES if route.path == "/livez"]
_FLEET_ROUTES = (
    *_FRONT_ROUTES,
    replace(_LIVEZ, call="GET /healthz", summary="the same as /livez"),
    HttpRoute(
        "GET /fleet/replicas",
        _list_replicas,
        "the engines as the fleet knows them",
        role=Role.ADMIN,
        answer=ReplicaList,
    ),
    *ROLLOUT_ROUTES,
)


def create_ingress(
    fleet: Fleet,
    settings: ServerSettings,
    *,
    extra_routes: Sequence[BaseRoute] = (),
    keys: ApiKeys | None = None,
) -> Starlette:
    """The ASGI application; `app.state.fleet` is the fleet. extra_routes: need the same keys and
    have the same limits. keys: the accepted keys; None: those of the settings. Unfinished batches
    and jobs of an earlier process continue when the application's lifespan begins.
    """
    fleet.settings = settings
    app = application(
        fleet, settings, _FLEET_ROUTES, lambda route: route.path in _PASSED, extra_routes, keys
    )
    app.state.fleet = fleet
    return app
