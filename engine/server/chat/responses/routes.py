"""The routes of /v1/responses, and the conversion of items to messages of a chat template."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Literal

import orjson
from pydantic import AfterValidator, BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.slices import Work
from jitney.engine.server.chat.conversation.tools import ToolUse, custom_arguments, made_call
from jitney.engine.server.chat.endpoints import GenerationAnswer, read_body
from jitney.engine.server.chat.request import Conversation, RequestBuilder, RouteKind
from jitney.engine.server.chat.responses.answers import (
    AnyResponseEvent,
    DeletedResponse,
    InputItems,
    InputTokens,
    ResponseAnswer,
)
from jitney.engine.server.chat.responses.format import ResponsesFormat
from jitney.engine.server.chat.responses.items import ReferenceItem, hosted_call, hosted_output
from jitney.engine.server.chat.responses.output import new_item_id
from jitney.engine.server.chat.responses.schema import InputTokensBody, ResponsesBody, includable
from jitney.engine.server.chat.responses.store import KeptResponse, KeptTurn, ResponseStore
from jitney.engine.server.chat.responses.tools import CallForm, NamedTool
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.errors import HttpError, echo
from jitney.engine.server.http.jsonio import json_answer, to_json
from jitney.engine.server.http.queries import read_query
from jitney.engine.server.http.routing import HttpRoute
from jitney.engine.server.http.service import Service

_KIND = RouteKind(
    "resp_",
    "input",
    names={
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
    },
    tool_schema="parameters",
)

#: How ids of thoughts begin.
_THOUGHTS = "rs_"
#: Items between two stops of `TimeSlices`.
_GROUP = 64
_Include = Annotated[list[str], AfterValidator(includable)]


class _ResponseQuery(BaseModel):
    """GET /v1/responses/{response_id}. Log-probabilities are not stored, so they are not
    included.
    """

    include: _Include = []
    include_obfuscation: Literal["false"] | None = None


class _InputItemsQuery(BaseModel):
    """GET /v1/responses/{response_id}/input_items. after: the id of an item."""

    include: _Include = []
    after: Annotated[str, Field(max_length=512)] | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"

    def page(self, items: list[JsonDict]) -> tuple[list[JsonDict], bool]:
        """A page of these items, and whether more follow. Raises RequestError."""
        ordered = items if self.order == "asc" else items[::-1]
        start = 0
        if self.after is not None:
            ids = [item["id"] for item in ordered]
            if self.after not in ids:
                raise RequestError("after must be the id of an item of the list", param="after")
            start = ids.index(self.after) + 1
        end = start + self.limit
        return ordered[start:end], end < len(ordered)


async def _create_response(service: Service, request: Request) -> ASGIApp:
    body = await read_body(service, request, ResponsesBody)
    context = Context.of(request)
    service.check_model(body.model)
    before = _previous(service, body, context.tenant)
    builder = RequestBuilder(service, body, context)
    logprobs = (body.top_logprobs or 0) if body.shows_logprobs else None
    sampling = builder.sampling({"max_tokens": body.max_output_tokens, "logprobs": logprobs})
    items = await service.slices.result(_kept_items(body, service.responses, context))
    conversation = await _conversation(service, body, before, items)
    generation = await builder.answer(conversation, sampling)
    turn = KeptTurn(before, orjson.dumps(items))

    def keep(response: ResponseAnswer) -> None:
        turn.output = to_json(response.output)
        service.responses.put(context.tenant, generation.id, turn, to_json(response))

    format = partial(ResponsesFormat, body=body, keep=None if body.store is False else keep)
    return GenerationAnswer(service, generation, format)


async def _count_tokens(service: Service, request: Request) -> Response:
    body = await read_body(service, request, InputTokensBody)
    context = Context.of(request)
    service.check_model(body.model)
    before = _previous(service, body, context.tenant)
    RequestBuilder(service, body, context).sampling({})  # raises the same errors as a response
    items = await service.slices.result(_kept_items(body, service.responses, context))
    conversation = await _conversation(service, body, before, items)
    prompt = await conversation.prompt(service, context.notes)
    return json_answer(InputTokens(len(prompt.ids)))


async def _conversation(
    service: Service, body: InputTokensBody, before: KeptTurn | None, items: list[JsonDict]
) -> Conversation:
    """The conversation of a body. before: the turn that it continues; items: of the body."""
    earlier: list[JsonDict] = []
    if before is not None:
        earlier = await service.slices.result(before.all_items())
    messages = await service.slices.result(_template_messages(body.instructions, earlier + items))
    return Conversation(kind=_KIND, messages=messages, tools=_tool_use(body), effort=body.effort)


def _tool_use(body: InputTokensBody) -> ToolUse | None:
    tools = [each.as_tool() for each in body.client_tools]
    names_one = isinstance(body.tool_choice, NamedTool)
    parallel = body.parallel_tool_calls is not False and not names_one
    return ToolUse.of(tools, body.tool_mode, body.chosen_names, parallel=parallel)


def _previous(service: Service, body: InputTokensBody, tenant: str) -> KeptTurn | None:
    """The turn of `previous_response_id`. Raises HttpError 404."""
    if body.previous_response_id is None:
        return None
    stored = service.responses.get(tenant, body.previous_response_id, "previous_response_id")
    return stored.turn


def _kept_items(
    body: InputTokensBody, store: ResponseStore, context: Context
) -> Work[list[JsonDict]]:
    """The items as stored, with ids and without references. Raises RequestError."""
    items: list[JsonDict] = []
    left_out: list[tuple[int, str]] = []
    for place, item in enumerate(body.input):
        if not isinstance(item, ReferenceItem):
            shown = item.shown()
            items.append({"id": new_item_id(shown["type"])} | shown)
            left_out += [(place, kind) for kind in item.replaced]
        elif (referred := store.item(context.tenant, item.id)) is not None:
            items.append(referred)
        elif item.id.startswith(_THOUGHTS):
            left_out.append((place, "reasoning that is not kept"))
        else:
            raise RequestError(
                f"no item {echo(item.id)} in the responses that are kept",
                param=f"input[{place}].id",
            )
        if place % _GROUP == 0:
            yield
    context.notes.warnings.extend(f"input[{place}]: {kind} left out" for place, kind in left_out)
    return items


def _template_messages(instructions: str | None, items: Iterable[JsonDict]) -> Work[list[JsonDict]]:
    """The messages of items; adjacent thoughts, content and calls form one message."""
    messages: list[JsonDict] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for place, item in enumerate(items):
        _add(messages, item)
        if place % _GROUP == 0:
            yield
    if all(message["role"] == "system" for message in messages):
        messages.append({"role": "user", "content": ""})  # most templates need a user turn
    return messages


def _add(messages: list[JsonDict], item: JsonDict) -> None:
    match item["type"]:
        case "message" if item["role"] == "assistant":
            message = _assistant(messages, "content")
            message["content"] = _text_of(item)
        case "message":
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": _text_of(item)})
        case "reasoning":
            thoughts = "".join(thought["text"] for thought in item["content"])
            if thoughts:
                _assistant(messages, "reasoning_content")["reasoning_content"] = thoughts
        case "function_call":
            _add_call(messages, _call(item, item["arguments"]))
        case "custom_tool_call":
            _add_call(messages, _call(item, custom_arguments(item["input"])))
        case "function_call_output" | "custom_tool_call_output":
            messages.append(
                {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
            )
        case _:
            _add_hosted(messages, item)


def _call(item: JsonDict, arguments: str) -> JsonDict:
    """A call in the form of chat templates."""
    name = CallForm(item["name"], item.get("namespace")).flat_name
    return made_call(item["call_id"], name, arguments)


def _add_call(messages: list[JsonDict], call: JsonDict) -> None:
    _assistant(messages).setdefault("tool_calls", []).append(call)


def _add_hosted(messages: list[JsonDict], item: JsonDict) -> None:
    """Add the readable part of an item of a provider's own tools."""
    call, output = hosted_call(item), hosted_output(item)
    if call is not None:
        _add_call(messages, call)
    elif output is not None:
        messages.append(output)


def _assistant(messages: list[JsonDict], field: str = "") -> JsonDict:
    """The assistant message for a field: the last one if it can get the field, else a new one."""
    if not _goes_on(messages, field):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _goes_on(messages: list[JsonDict], field: str) -> bool:
    """Whether the last message is the assistant's and may get this field."""
    last = messages[-1] if messages else {}
    is_over = bool(last.get(field)) or (bool(field) and "tool_calls" in last)
    return last.get("role") == "assistant" and not is_over


def _text_of(item: JsonDict) -> str:
    return "".join(part["text"] for part in item["content"])


async def _show_response(service: Service, request: Request) -> Response:
    read_query(request, _ResponseQuery)
    return Response(_stored(service, request).body, media_type="application/json")


async def _delete_response(service: Service, request: Request) -> Response:
    stored = _stored(service, request)
    service.responses.discard(Context.of(request).tenant, stored.id)
    return json_answer(DeletedResponse(stored.id))


async def _cancel_response(service: Service, request: Request) -> Response:
    _stored(service, request)
    raise HttpError(
        400,
        "only a response in the background can be cancelled; to end another, close its connection",
    )


async def _list_input_items(service: Service, request: Request) -> Response:
    """The input of the response, without earlier turns."""
    query = read_query(request, _InputItemsQuery)
    items: list[JsonDict] = orjson.loads(_stored(service, request).turn.input)
    page, has_more = query.page(items)
    ids = [item["id"] for item in page] or [""]
    return json_answer(InputItems(page, ids[0], ids[-1], has_more))


def _stored(service: Service, request: Request) -> KeptResponse:
    tenant = Context.of(request).tenant
    return service.responses.get(tenant, request.path_params["response_id"], "response_id")


RESPONSE_ROUTES = (
    HttpRoute(
        "POST /v1/responses",
        _create_response,
        "answer a conversation of items, which may be kept",
        generates=True,
        body=ResponsesBody,
        answer=ResponseAnswer,
        event=AnyResponseEvent,
    ),
    HttpRoute(
        "POST /v1/responses/input_tokens",
        _count_tokens,
        "the tokens of such a conversation",
        body=InputTokensBody,
        answer=InputTokens,
    ),
    HttpRoute(
        "GET /v1/responses/{response_id}",
        _show_response,
        "a response that is kept",
        query=_ResponseQuery,
        answer=ResponseAnswer,
    ),
    HttpRoute(
        "DELETE /v1/responses/{response_id}",
        _delete_response,
        "forget a response",
        answer=DeletedResponse,
    ),
    HttpRoute(
        "POST /v1/responses/{response_id}/cancel",
        _cancel_response,
        "end a response in the background; there are none",
        answer=ResponseAnswer,
    ),
    HttpRoute(
        "GET /v1/responses/{response_id}/input_items",
        _list_input_items,
        "what a response was asked with",
        query=_InputItemsQuery,
        answer=InputItems,
    ),
)
