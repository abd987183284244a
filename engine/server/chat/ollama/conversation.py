"""Chats and prompts of Ollama's routes, as chat templates know conversations."""

from __future__ import annotations

from typing import Literal

from jitney.engine.common.requests import JsonDict
from jitney.engine.common.slices import Work
from jitney.engine.server.chat.conversation.tools import ToolUse, made_call
from jitney.engine.server.chat.ollama.schema import (
    NAMES,
    MadeCall,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaTurn,
)
from jitney.engine.server.chat.request import Conversation, RouteKind, continuing
from jitney.engine.server.chat.schema import ReasoningEffort

#: A num_predict beyond the context is reduced to the room left.
CHAT = RouteKind("chat-", "messages", names=NAMES, clamps=True)
PROMPT = RouteKind("gen-", "prompt", names={"messages": "prompt", **NAMES}, clamps=True)


def of_chat(body: OllamaChatBody) -> Work[Conversation]:
    """The conversation of /api/chat; the answer continues a last message of the assistant."""
    messages: list[JsonDict] = []
    calls = _OpenCalls()
    for message in body.messages:
        messages.append(_template_message(message, calls))
        yield
    tools = [tool.function.as_tool() for tool in body.tools]
    return Conversation(
        kind=CHAT,
        messages=messages,
        variables=continuing(messages),
        tools=ToolUse.of(tools, "auto", None, parallel=True),
        effort=_effort(body.think),
    )


def of_prompt(body: OllamaGenerateBody) -> Conversation:
    """A prompt as a user message, after the system message if there is one."""
    messages: list[JsonDict] = [{"role": "user", "content": body.prompt}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    return Conversation(kind=PROMPT, messages=messages, effort=_effort(body.think))


def _effort(think: bool | Literal["low", "medium", "high"] | None) -> ReasoningEffort | None:
    """The reasoning effort for `think`; None: the model's default."""
    match think:
        case True:
            return "medium"
        case False:
            return "none"
    return think


class _OpenCalls:
    """Calls without a result yet. Ollama's clients give calls no ids, and results the name."""

    def __init__(self) -> None:
        #: (id, name of the function), in their order.
        self._open: list[tuple[str, str]] = []
        self._count = 0

    def add(self, call: MadeCall) -> str:
        """The id of a new call."""
        self._count += 1
        id = call.id or f"call{self._count:05}"
        self._open.append((id, call.function.name))
        return id

    def answered(self, result: OllamaTurn) -> str | None:
        """Remove the call of a result: by id, by name, else the first. None: no call is open."""
        by_id = [each for each in self._open if each[0] == result.tool_call_id]
        by_name = [each for each in self._open if result.tool_name in (None, each[1])]
        call = next(iter(by_id or by_name or self._open), None)
        if call is None:
            return result.tool_call_id
        self._open.remove(call)
        return call[0]


def _template_message(message: OllamaTurn, calls: _OpenCalls) -> JsonDict:
    shown: JsonDict = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        shown["reasoning_content"] = message.thinking
    if message.tool_calls:
        shown["tool_calls"] = [
            made_call(calls.add(call), call.function.name, call.function.arguments or {})
            for call in message.tool_calls
        ]
    if message.role == "tool":
        id = calls.answered(message)
        if id is not None:
            shown["tool_call_id"] = id
        if message.tool_name is not None:
            shown["name"] = message.tool_name
    return shown
