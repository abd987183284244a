"""The routes of completions and chats."""

from __future__ import annotations

from pydantic import RootModel
from starlette.requests import Request
from starlette.types import ASGIApp

from jitney.engine.common.requests import JsonDict
from jitney.engine.server.chat.endpoints import GenerationAnswer, checked_body, read_fields
from jitney.engine.server.chat.openai.answers import (
    ChatAnswer,
    ChatChunk,
    CompletionAnswer,
    CompletionChunk,
)
from jitney.engine.server.chat.openai.conversation import chat_request
from jitney.engine.server.chat.openai.format import ChatFormat, CompletionFormat
from jitney.engine.server.chat.openai.schema import ChatBody, CompletionBody
from jitney.engine.server.chat.request import RequestBuilder
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.routing import HttpRoute
from jitney.engine.server.http.service import Service


class InvocationBody(RootModel[ChatBody | CompletionBody]):
    """POST /invocations: what a chat or a completion takes."""


async def _completions(service: Service, request: Request) -> ASGIApp:
    return await _complete(service, request, await read_fields(service, request))


async def _complete(service: Service, request: Request, fields: JsonDict) -> ASGIApp:
    body = checked_body(request, CompletionBody, fields)
    generation = await RequestBuilder(service, body, Context.of(request)).completion()
    return GenerationAnswer(service, generation, CompletionFormat)


async def _chat_completions(service: Service, request: Request) -> ASGIApp:
    return await _chat(service, request, await read_fields(service, request))


async def _chat(service: Service, request: Request, fields: JsonDict) -> ASGIApp:
    body = checked_body(request, ChatBody, fields)
    generation = await chat_request(RequestBuilder(service, body, Context.of(request)))
    return GenerationAnswer(service, generation, ChatFormat)


async def _invocations(service: Service, request: Request) -> ASGIApp:
    """A chat if it has messages, else a completion."""
    fields = await read_fields(service, request)
    answer = _complete if fields.get("messages") is None else _chat
    return await answer(service, request, fields)


OPENAI_ROUTES = (
    HttpRoute(
        "POST /v1/completions",
        _completions,
        "complete prompts",
        generates=True,
        body=CompletionBody,
        answer=CompletionAnswer,
        event=CompletionChunk,
    ),
    HttpRoute(
        "POST /v1/chat/completions",
        _chat_completions,
        "answer a chat",
        generates=True,
        body=ChatBody,
        answer=ChatAnswer,
        event=ChatChunk,
    ),
    HttpRoute(
        "POST /invocations",
        _invocations,
        "answer a chat, or complete prompts, as SageMaker asks for it",
        generates=True,
        body=InvocationBody,
        answer=ChatAnswer | CompletionAnswer,
        event=ChatChunk | CompletionChunk,
    ),
)
