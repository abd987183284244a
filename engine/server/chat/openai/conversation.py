"""Chats, as chat templates know conversations."""

from __future__ import annotations

from collections.abc import Iterable

from jitney.engine.common.requests import JsonDict
from jitney.engine.common.slices import Work
from jitney.engine.server.chat.conversation.tools import ToolUse
from jitney.engine.server.chat.generation_request import GenerationRequest
from jitney.engine.server.chat.openai.schema import ChatBody, Message
from jitney.engine.server.chat.request import Conversation, RequestBuilder, RouteKind
from jitney.engine.server.http.service import Service

_KIND = RouteKind("chatcmpl-", "messages")


async def chat_request(builder: RequestBuilder[ChatBody]) -> GenerationRequest:
    """The request that answers a chat. Raises RequestError, HttpError."""
    body = builder.body
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        max_tokens = body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = builder.sampling({"max_tokens": max_tokens, "logprobs": logprobs})
    return await builder.answer(await chat_conversation(builder.service, body), sampling)


async def chat_conversation(service: Service, body: ChatBody) -> Conversation:
    return Conversation(
        kind=_KIND,
        messages=await service.slices.result(_template_messages(body.messages)),
        variables=body.chat_template_kwargs | _template_variables(body),
        tools=_tool_use(body),
        effort=body.reasoning_effort,
        thinking_budget=body.thinking_token_budget,
        shows_reasoning=body.include_reasoning is not False,
        special_tokens=bool(body.add_special_tokens),
    )


def _tool_use(body: ChatBody) -> ToolUse | None:
    tools = list(body.client_tools())
    parallel = body.parallel_tool_calls is not False and not body.names_one_tool
    return ToolUse.of(tools, body.tool_mode, body.chosen_names, parallel=parallel)


def _template_variables(body: ChatBody) -> JsonDict:
    """Variables of the chat template beside the messages."""
    goes_on = bool(body.continue_final_message)
    begins = body.add_generation_prompt
    if begins is None:
        begins = not goes_on
    return {"add_generation_prompt": begins, "continue_final_message": goes_on}


def _template_messages(messages: Iterable[Message]) -> Work[list[JsonDict]]:
    made: list[JsonDict] = []
    for message in messages:
        made.append(_template_message(message))
        yield
    return made


def _template_message(message: Message) -> JsonDict:
    """A message as chat templates know it: no nulls, and "system" for its newer name."""
    fields = message.model_dump(exclude_none=True)
    fields["role"] = "system" if message.role == "developer" else message.role
    fields.setdefault("content", "")
    thoughts = fields.pop("reasoning", None)
    if thoughts is not None:
        fields.setdefault("reasoning_content", thoughts)
    return fields
