"""The routes of /v1/messages, and its messages as chat templates know them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.types import ASGIApp

from jitney.engine.common.requests import JsonDict
from jitney.engine.common.slices import Work
from jitney.engine.server.chat.anthropic.answers import CountAnswer, MessageAnswer, MessageEvent
from jitney.engine.server.chat.anthropic.format import MessageFormat
from jitney.engine.server.chat.anthropic.schema import (
    CountTokensBody,
    MessageParam,
    MessagesBody,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from jitney.engine.server.chat.conversation.formats import TurnFormat
from jitney.engine.server.chat.conversation.tools import ToolMode, ToolUse, made_call
from jitney.engine.server.chat.endpoints import GenerationAnswer, read_body
from jitney.engine.server.chat.request import Conversation, RequestBuilder, RouteKind, continuing
from jitney.engine.server.chat.schema import ReasoningEffort
from jitney.engine.server.http.context import Context, Notes
from jitney.engine.server.http.jsonio import json_answer
from jitney.engine.server.http.routing import HttpRoute
from jitney.engine.server.http.service import Service

_KIND = RouteKind(
    "msg_",
    "messages",
    names={
        "reasoning_effort": "thinking",
        "response_format": "output_config.format",
        "thinking_token_budget": "thinking.budget_tokens",
    },
    clamps=True,
    tool_schema="input_schema",
)
#: Messages between two stops of `TimeSlices`.
_GROUP = 64
#: The mode of a choice.
_MODES: dict[str, ToolMode] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}


async def _create_message(service: Service, request: Request) -> ASGIApp:
    body = await read_body(service, request, MessagesBody)
    if body.metadata is not None:
        body = body.model_copy(update={"user": body.metadata.user_id})
    notes = Context.of(request).notes
    builder = RequestBuilder(service, body, Context.of(request))
    own = {
        "max_tokens": body.max_tokens,
        "stop": tuple(body.stop_sequences or ()),
    }
    sampling = builder.sampling(own)
    conversation = await service.slices.result(_conversation_of(body, service, notes))
    generation = await builder.answer(conversation, sampling)
    return GenerationAnswer(service, generation, partial(MessageFormat, body=body))


async def _count_tokens(service: Service, request: Request) -> ASGIApp:
    body = await read_body(service, request, CountTokensBody)
    service.check_model(body.model)
    notes = Context.of(request).notes
    builder = RequestBuilder(service, body, Context.of(request))
    builder.sampling({})  # raises the same errors as /v1/messages
    conversation = await service.slices.result(_conversation_of(body, service, notes))
    prompt = await conversation.prompt(service, notes)
    return json_answer(CountAnswer(len(prompt.ids)))


def _conversation_of(body: CountTokensBody, service: Service, notes: Notes) -> Work[Conversation]:
    messages = yield from _template_messages(body, notes)
    if len(messages) > 1 and _is_empty_turn(messages[-1]):
        messages.pop()  # an empty turn cannot be continued
    budget = None if body.thinking is None else body.thinking.budget_tokens
    end = service.turns.format.thoughts_end
    if budget is not None and end is not None and end not in service.turns.special_texts:
        notes.ignored.append("thinking.budget_tokens")  # cannot be enforced exactly
        budget = None
    return Conversation(
        kind=_kind_of(body),
        messages=messages,
        variables=continuing(messages),
        tools=_tool_use(body),
        effort=_effort(body, service.turns.format),
        thinking_budget=budget,
    )


def _kind_of(body: CountTokensBody) -> RouteKind:
    """The route's kind, with the name of the field that sets the effort."""
    if body.output_config is None or body.output_config.effort is None:
        return _KIND
    names: dict[str | None, str] = {"reasoning_effort": "output_config.effort"}
    return replace(_KIND, names={**_KIND.names, **names})


def _is_empty_turn(message: JsonDict) -> bool:
    """Whether the assistant neither says nor calls anything in it."""
    is_said = message["content"] or "tool_calls" in message
    return message["role"] == "assistant" and not is_said


def _effort(body: CountTokensBody, turns: TurnFormat) -> ReasoningEffort | None:
    """The reasoning effort that a body asks for; None: the model's default."""
    thinking = None if body.thinking is None else body.thinking.type
    if thinking == "disabled":
        return "none"
    wish = None if body.output_config is None else body.output_config.effort
    always_thinks = turns.thinks and not turns.takes_effort
    if wish is None and thinking == "enabled" and not always_thinks:
        return "medium"
    return wish


def _template_messages(body: CountTokensBody, notes: Notes) -> Work[list[JsonDict]]:
    """Neighbours of one role are one message."""
    messages: list[JsonDict] = []
    if body.system is not None:
        messages.append({"role": "system", "content": body.system})
    for place, message in enumerate(body.messages):
        if message.role == "assistant":
            _add_assistant(messages, message)
        else:
            _add_said(messages, message)
        notes.warnings.extend(f"messages[{place}]: {kind} left out" for kind in message.replaced)
        if place % _GROUP == 0:
            yield
    return messages


def _add_said(messages: list[JsonDict], message: MessageParam) -> None:
    """Add a message of the user or the system, after the results of tools that it has."""
    results = [block for block in message.content if isinstance(block, ToolResultBlock)]
    for block in results:
        messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text})
    texts = [block.text for block in message.content if isinstance(block, TextBlock)]
    if texts or not results:
        _say(messages, message.role, "\n".join(texts))


def _add_assistant(messages: list[JsonDict], message: MessageParam) -> None:
    texts = [block.text for block in message.content if isinstance(block, TextBlock)]
    said = _say(messages, "assistant", "\n".join(texts))
    for block in message.content:
        if isinstance(block, ThinkingBlock):
            said["reasoning_content"] = said.get("reasoning_content", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            said.setdefault("tool_calls", []).append(made_call(block.id, block.name, block.input))


def _say(messages: list[JsonDict], role: str, text: str) -> JsonDict:
    """Add the text to the last message if it has this role, else to a new one; returns it."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": ""})
    last = messages[-1]
    texts = [each for each in (last["content"], text) if each]
    last["content"] = "\n".join(texts)
    return last


def _tool_use(body: CountTokensBody) -> ToolUse | None:
    tools = list(body.client_tools())
    choice = body.tool_choice
    if choice is None:
        return ToolUse.of(tools, "auto", None, parallel=True)
    parallel = not choice.disable_parallel_tool_use and choice.type != "tool"
    return ToolUse.of(tools, _MODES[choice.type], body.chosen_names, parallel=parallel)


MESSAGE_ROUTES = (
    HttpRoute(
        "POST /v1/messages",
        _create_message,
        "answer a conversation, in Anthropic's form",
        generates=True,
        body=MessagesBody,
        answer=MessageAnswer,
        event=MessageEvent,
    ),
    HttpRoute(
        "POST /v1/messages/count_tokens",
        _count_tokens,
        "the tokens of such a conversation",
        body=CountTokensBody,
        answer=CountAnswer,
    ),
)
