"""The routes of /v1/responses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from jitney.engine.api.context import Context
from jitney.engine.api.endpoints import GenerationAnswer, read_body
from jitney.engine.api.errors import HttpError
from jitney.engine.api.queries import listed, read_query
from jitney.engine.api.request import (
    Conversation,
    RequestBuilder,
    RouteKind,
)
from jitney.engine.api.responses.answers import DeletedResponse, InputItems, ResponseAnswer
from jitney.engine.api.responses.format import RepeatedFields, ResponsesFormat
from jitney.engine.api.responses.items import earlier_items, kept_items, template_messages
from jitney.engine.api.responses.queries import InputItemsQuery, ResponseQuery
from jitney.engine.api.responses.schema import ResponsesBody
from jitney.engine.api.responses.store import KeptResponse, KeptTurn, ResponseStore
from jitney.engine.api.responses.tools import tool_use
from jitney.engine.api.routing import HttpRoute
from jitney.engine.api.service import Service
from jitney.engine.types import JsonDict

_KIND = RouteKind(
    "resp_",
    "input",
    names={
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
    },
)


async def _create_response(service: Service, request: Request) -> ASGIApp:
    body, headers = await read_body(service, request, ResponsesBody)
    context = Context.of(request)
    service.check_model(body.model)
    before = _previous(service, body, context.tenant)
    builder = RequestBuilder(service, body, context)
    sampling = builder.sampling(_own_sampling(body))
    earlier = await service.slices.result(earlier_items(before))
    items = await service.slices.result(kept_items(body.input, service.responses, context.tenant))
    messages = await service.slices.result(template_messages(body.instructions, earlier + items))
    conversation = Conversation(
        kind=_KIND, messages=messages, tools=tool_use(body), effort=body.effort
    )
    wanted = await builder.answer(conversation, sampling)
    turn = KeptTurn(before, orjson.dumps(items))
    keep = _Keeper(service.responses, context.tenant, wanted.id, turn)
    asked = RepeatedFields(body, None if body.store is False else keep)
    return GenerationAnswer(service, wanted, partial(ResponsesFormat, asked=asked), headers)


def _previous(service: Service, body: ResponsesBody, tenant: str) -> KeptTurn | None:
    """The turn that the body goes on from. Raises HttpError 404."""
    if body.previous_response_id is None:
        return None
    kept = service.responses.get(tenant, body.previous_response_id, "previous_response_id")
    return kept.turn


def _own_sampling(body: ResponsesBody) -> JsonDict:
    """Fields that the route has a meaning of its own for."""
    logprobs = (body.top_logprobs or 0) if body.shows_logprobs else None
    return {"max_tokens": body.max_output_tokens, "logprobs": logprobs}


@dataclass(frozen=True, slots=True)
class _Keeper:
    """Keeps a response at its end."""

    store: ResponseStore
    tenant: str
    id: str
    turn: KeptTurn

    def __call__(self, response: JsonDict, items: list[JsonDict]) -> None:
        self.turn.output = orjson.dumps(items)
        self.store.put(self.tenant, self.id, self.turn, response)


async def _show_response(service: Service, request: Request) -> Response:
    read_query(request, ResponseQuery)
    return _json(_kept(service, request).body)


async def _delete_response(service: Service, request: Request) -> Response:
    kept = _kept(service, request)
    service.responses.discard(Context.of(request).tenant, kept.id)
    return _written({"id": kept.id, "object": "response", "deleted": True})


async def _cancel_response(service: Service, request: Request) -> Response:
    _kept(service, request)
    raise HttpError(
        400,
        "only a response in the background can be cancelled; to end another, close its connection",
    )


async def _list_input_items(service: Service, request: Request) -> Response:
    """What the response was asked with; not what came before it."""
    query = read_query(request, InputItemsQuery)
    items: list[JsonDict] = orjson.loads(_kept(service, request).turn.input)
    page, has_more = query.page(items)
    return _written(listed(page, more=has_more, none=""))


def _kept(service: Service, request: Request) -> KeptResponse:
    tenant = Context.of(request).tenant
    return service.responses.get(tenant, request.path_params["response_id"], "response_id")


def _written(body: JsonDict) -> Response:
    return _json(orjson.dumps(body))


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


RESPONSE_ROUTES = (
    HttpRoute(
        "/v1/responses",
        ("POST",),
        _create_response,
        "answer a conversation of items, which may be kept",
        generates=True,
        body=ResponsesBody,
        answer=ResponseAnswer,
    ),
    HttpRoute(
        "/v1/responses/{response_id}",
        ("GET",),
        _show_response,
        "a response that is kept",
        query=ResponseQuery,
        answer=ResponseAnswer,
    ),
    HttpRoute(
        "/v1/responses/{response_id}",
        ("DELETE",),
        _delete_response,
        "forget a response",
        answer=DeletedResponse,
    ),
    HttpRoute(
        "/v1/responses/{response_id}/cancel",
        ("POST",),
        _cancel_response,
        "end a response in the background; there are none",
        answer=ResponseAnswer,
    ),
    HttpRoute(
        "/v1/responses/{response_id}/input_items",
        ("GET",),
        _list_input_items,
        "what a response was asked with",
        query=InputItemsQuery,
        answer=InputItems,
    ),
)
