"""The forms of the answers of /v1/messages, for the document that describes the routes."""

from __future__ import annotations

from typing import Literal

from jitney.engine.common.requests import JsonDict
from jitney.engine.server.http.answers import Described


class TextContent(Described):
    """What the model said."""

    type: Literal["text"]
    text: str


class ThinkingContent(Described):
    """What it thought before. signature: of no meaning here but that of being there."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(Described):
    """A call that the client is asked to make."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonDict


class ThinkingTokens(Described):
    """Of the output, thoughts."""

    thinking_tokens: int


class MessageUsage(Described):
    """Tokens of a message. What is written to the prefix cache is not counted."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessageAnswer(Described):
    """POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextContent | ThinkingContent | ToolUseContent]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: MessageUsage


class CountAnswer(Described):
    """POST /v1/messages/count_tokens."""

    input_tokens: int
