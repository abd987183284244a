"""The response bodies of /v1/messages, and the events of its streams."""

from __future__ import annotations

from typing import Literal

from jitney.engine.common.requests import JsonDict
from jitney.engine.server.chat.generation import Generation
from jitney.engine.server.http.answers import ResponseModel
from jitney.engine.server.http.errors import AnthropicErrorAnswer


class TextContent(ResponseModel, tag_field="type", tag="text"):
    """A text of the model."""

    text: str = ""


class ThinkingContent(ResponseModel, tag_field="type", tag="thinking"):
    """The model's thoughts before its answer. signature: required by clients, unused here."""

    thinking: str = ""
    signature: str = ""


class ToolUseContent(ResponseModel, tag_field="type", tag="tool_use"):
    """A call that the client is asked to make."""

    id: str
    name: str
    input: JsonDict


type Content = TextContent | ThinkingContent | ToolUseContent


class ThinkingTokens(ResponseModel):
    """Output tokens that were thoughts."""

    thinking_tokens: int


class MessageUsage(ResponseModel, kw_only=True):
    """Tokens of a message. input_tokens excludes cached tokens; writes to the prefix cache are
    not counted.
    """

    input_tokens: int
    cache_creation_input_tokens: Literal[0] = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens

    @classmethod
    def of(cls, generation: Generation) -> MessageUsage:
        counts = generation.counts
        return cls(
            input_tokens=counts.prompt - counts.cached,
            cache_read_input_tokens=counts.cached,
            output_tokens=counts.completion,
            output_tokens_details=ThinkingTokens(counts.reasoning),
        )


type StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class MessageAnswer(ResponseModel, kw_only=True):
    """POST /v1/messages. stop_reason: null only where a stream begins."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class CountAnswer(ResponseModel):
    """POST /v1/messages/count_tokens."""

    input_tokens: int


class TextDelta(ResponseModel, tag_field="type", tag="text_delta"):
    """More of a text."""

    text: str


class ThinkingDelta(ResponseModel, tag_field="type", tag="thinking_delta"):
    """More of a thought."""

    thinking: str


class SignatureDelta(ResponseModel, tag_field="type", tag="signature_delta"):
    """The end of a thought."""

    signature: str


class InputJsonDelta(ResponseModel, tag_field="type", tag="input_json_delta"):
    """More of a call's input, as JSON text."""

    partial_json: str


class MessageStart(ResponseModel, tag_field="type", tag="message_start"):
    """The first event: the message without its content and its end."""

    message: MessageAnswer


class ContentBlockStart(ResponseModel, tag_field="type", tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: Content


class ContentBlockDelta(ResponseModel, tag_field="type", tag="content_block_delta"):
    """More of the block that is open."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(ResponseModel, tag_field="type", tag="content_block_stop"):
    """A block ends."""

    index: int


class MessageEnd(ResponseModel):
    """The stop reason of a message."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(ResponseModel, tag_field="type", tag="message_delta"):
    """The end of the message."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(ResponseModel, tag_field="type", tag="message_stop"):
    """The last event."""


class Ping(ResponseModel, tag_field="type", tag="ping"):
    """A sign of life."""


BlockEvent = ContentBlockStart | ContentBlockDelta | ContentBlockStop | Ping
MessageEvent = BlockEvent | MessageStart | MessageDelta | MessageStop | AnthropicErrorAnswer
