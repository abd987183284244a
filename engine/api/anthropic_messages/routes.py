"""The routes of /v1/messages."""

from __future__ import annotations

from functools import partial

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from jitney.engine.api.anthropic_messages.answers import CountAnswer, MessageAnswer
from jitney.engine.api.anthropic_messages.conversation import conversation_of
from jitney.engine.api.anthropic_messages.format import MessageFormat
from jitney.engine.api.anthropic_messages.schema import CountTokensBody, MessagesBody
from jitney.engine.api.context import Context
from jitney.engine.api.endpoints import GenerationAnswer, read_body
from jitney.engine.api.errors import HttpError, echo
from jitney.engine.api.request import (
    RequestBuilder,
    RouteKind,
)
from jitney.engine.api.routing import HttpRoute
from jitney.engine.api.service import Service

_KIND = RouteKind(
    "msg_",
    "messages",
    names={
        "reasoning_effort": "thinking",
        "response_format": "output_config.format",
        "thinking_token_budget": "thinking.budget_tokens",
    },
    clamps=True,
)
#: Of the API, as a header says them. The second takes no temperature, top_p and top_k; here both
#: do.
_VERSIONS = ("2023-06-01", "2026-10-21")
_KNOWN = " and ".join(_VERSIONS)


async def _create_message(service: Service, request: Request) -> ASGIApp:
    _check_version(request)
    body, headers = await read_body(service, request, MessagesBody)
    if body.metadata is not None:
        body = body.model_copy(update={"user": body.metadata.user_id})
    builder = RequestBuilder(service, body, Context.of(request))
    own = {
        "max_tokens": body.max_tokens,
        "stop": tuple(body.stop_sequences or ()),
    }
    sampling = builder.sampling(own)
    conversation = await service.slices.result(conversation_of(body, _KIND, service.turns))
    wanted = await builder.answer(conversation, sampling)
    return GenerationAnswer(service, wanted, partial(MessageFormat, body=body), headers)


async def _count_tokens(service: Service, request: Request) -> ASGIApp:
    _check_version(request)
    body, headers = await read_body(service, request, CountTokensBody)
    service.check_model(body.model)
    builder = RequestBuilder(service, body, Context.of(request))
    builder.sampling({})  # what a message is refused for is refused here too
    conversation = await service.slices.result(conversation_of(body, _KIND, service.turns))
    prompt = await conversation.prompt(service)
    counted = orjson.dumps({"input_tokens": len(prompt.ids)})
    return Response(counted, headers=headers, media_type="application/json")


def _check_version(request: Request) -> None:
    """A request need not name the version of the API: answers are the same in all."""
    version = request.headers.get("anthropic-version", _VERSIONS[0])
    if version not in _VERSIONS:
        raise HttpError(400, f"anthropic-version: not {echo(version)}; {_KNOWN} are known here")


MESSAGE_ROUTES = (
    HttpRoute(
        "/v1/messages",
        ("POST",),
        _create_message,
        "answer a conversation, in Anthropic's form",
        generates=True,
        body=MessagesBody,
        answer=MessageAnswer,
    ),
    HttpRoute(
        "/v1/messages/count_tokens",
        ("POST",),
        _count_tokens,
        "the tokens of such a conversation",
        body=CountTokensBody,
        answer=CountAnswer,
    ),
)
