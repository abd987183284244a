"""Answers of /v1/messages: the message of content blocks, and the stream of its events."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from jitney.engine.common.slices import Pieces
from jitney.engine.core import TokenBytes
from jitney.engine.server.chat.anthropic.answers import (
    BlockEvent,
    Content,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MessageAnswer,
    MessageDelta,
    MessageEnd,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    SignatureDelta,
    StopReason,
    TextContent,
    TextDelta,
    ThinkingContent,
    ThinkingDelta,
    ToolUseContent,
)
from jitney.engine.server.chat.anthropic.schema import MessagesBody
from jitney.engine.server.chat.choices import Choice, ChoiceDelta
from jitney.engine.server.chat.conversation.events import (
    AssistantEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    arguments_object,
)
from jitney.engine.server.chat.formats import Format
from jitney.engine.server.chat.generation import Generation
from jitney.engine.server.http.errors import ErrorReply
from jitney.engine.server.http.jsonio import to_json


class _ContentBlocks:
    """The content of one message, one block open at a time."""

    def __init__(self, *, shows_thoughts: bool):
        self._shows_thoughts = shows_thoughts
        #: The blocks; the text of one that is open stands in `_texts` until it is closed.
        self.content: list[Content] = []
        self._open: Content | None = None
        self._texts: list[str] = []

    def push(self, event: AssistantEvent) -> Iterator[BlockEvent]:
        """Add an event of the model's turn; returns the events of the stream."""
        match event:
            case ToolCallStart():
                yield from self._begin(ToolUseContent(event.id, event.name, {}))
                return
            case ContentDelta():
                if not isinstance(self._open, TextContent):
                    yield from self._begin(TextContent())
                delta = TextDelta(event.text)
            case ReasoningDelta():
                if not isinstance(self._open, ThinkingContent):
                    yield from self._begin(ThinkingContent())
                delta = ThinkingDelta(event.text) if self._shows_thoughts else None
            case ToolCallArguments():
                delta = InputJsonDelta(event.text)
        self._texts.append(event.text)
        if delta is not None:
            yield ContentBlockDelta(len(self.content) - 1, delta)

    def close(self) -> Iterator[BlockEvent]:
        """Complete the block that is open, if one is."""
        index, text = len(self.content) - 1, "".join(self._texts)
        self._texts.clear()
        match self._open:
            case None:
                return
            case TextContent() as block:
                block.text = text
            case ThinkingContent() as block:
                block.thinking = text if self._shows_thoughts else ""
                digest = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
                block.signature = digest.hexdigest()
                yield ContentBlockDelta(index, SignatureDelta(block.signature))
            case ToolUseContent() as block:
                block.input = arguments_object(text)
        self._open = None
        yield ContentBlockStop(index)

    def _begin(self, block: Content) -> Iterator[BlockEvent]:
        yield from self.close()
        self._open = block
        self.content.append(block)
        index = len(self.content) - 1
        yield ContentBlockStart(index, block)
        if index == 0:
            yield Ping()


class MessageFormat(Format):
    """One message. It has one choice."""

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, generation: Generation, tokenizer: TokenBytes, body: MessagesBody):
        super().__init__(generation, tokenizer)
        self._max_tokens = body.max_tokens
        self._blocks = _ContentBlocks(shows_thoughts=body.shows_thoughts)

    def add(self, choice: Choice, delta: ChoiceDelta) -> None:
        for event in delta.events:
            for _ in self._blocks.push(event):
                pass

    def whole(self) -> Pieces:
        for _ in self._blocks.close():
            yield b""
        [choice] = self.generation.choices
        message = self._message()
        message.content = self._blocks.content
        message.stop_reason = self._stop_reason(choice)
        message.stop_sequence = choice.stop_string
        yield to_json(message)

    def opening(self) -> bytes:
        return _frame(MessageStart(self._message()))

    def chunks(self, choice: Choice, delta: ChoiceDelta) -> Iterator[bytes]:
        for event in delta.events:
            yield from map(_frame, self._blocks.push(event))

    def tail(self) -> Pieces:
        [choice] = self.generation.choices
        yield from map(_frame, self._blocks.close())
        end = MessageEnd(self._stop_reason(choice), choice.stop_string)
        yield _frame(MessageDelta(end, MessageUsage.of(self.generation)))
        yield _frame(MessageStop())

    def failure(self, error: Exception, request_id: str) -> Pieces:
        yield _frame(ErrorReply.of(error, request_id).anthropic())

    def _message(self) -> MessageAnswer:
        """The message without its content and stop reason."""
        return MessageAnswer(
            id=self.request.id,
            model=self.request.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=MessageUsage.of(self.generation),
        )

    def _stop_reason(self, choice: Choice) -> StopReason:
        if choice.finish == "length":
            allowed = choice.engine_request.sampling.max_tokens
            is_cut = allowed is not None and allowed < self._max_tokens
            return "model_context_window_exceeded" if is_cut else "max_tokens"
        if choice.n_calls:
            return "tool_use"
        return "end_turn" if choice.stop_string is None else "stop_sequence"


def _frame(event: MessageEvent) -> bytes:
    kind = event.__struct_config__.tag
    return b"event: %b\ndata: %b\n\n" % (str(kind).encode(), to_json(event))
