"""Answers of /v1/messages: the message, made of content blocks, and the stream of typed events that
makes one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from jitney.engine.core import TokenBytes
from jitney.engine.server.chat.anthropic.answers import (
    BlockEvent,
    Content,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    Delta,
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
from jitney.engine.server.http.slices import Pieces


class _Block:
    """A block that is being written."""

    def begun(self) -> Content:
        """The block as it begins."""
        raise NotImplementedError

    def more(self, text: str) -> Iterator[Delta]:
        """Deltas that add a text."""
        raise NotImplementedError

    def ended(self) -> Iterator[Delta]:
        """Deltas that come last."""
        yield from ()

    def shown(self) -> Content:
        """The whole block."""
        raise NotImplementedError


class _Text(_Block):
    def __init__(self) -> None:
        self._texts: list[str] = []

    def begun(self) -> TextContent:
        return TextContent()

    def more(self, text: str) -> Iterator[TextDelta]:
        self._texts.append(text)
        yield TextDelta(text)

    def shown(self) -> TextContent:
        return TextContent("".join(self._texts))


class _Thinking(_Block):
    """is_shown: else the block says only that there were thoughts."""

    def __init__(self, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._texts: list[str] = []
        self._digest = hashlib.sha256()

    def begun(self) -> ThinkingContent:
        return ThinkingContent()

    def more(self, text: str) -> Iterator[ThinkingDelta]:
        self._digest.update(text.encode("utf-8", "surrogatepass"))
        if self._is_shown:
            self._texts.append(text)
            yield ThinkingDelta(text)

    def ended(self) -> Iterator[SignatureDelta]:
        yield SignatureDelta(self._digest.hexdigest())

    def shown(self) -> ThinkingContent:
        return ThinkingContent("".join(self._texts), self._digest.hexdigest())


class _ToolUse(_Block):
    def __init__(self, id: str, name: str) -> None:
        self._id = id
        self._name = name
        self._texts: list[str] = []

    def begun(self) -> ToolUseContent:
        return ToolUseContent(self._id, self._name, {})

    def more(self, text: str) -> Iterator[InputJsonDelta]:
        self._texts.append(text)
        yield InputJsonDelta(text)

    def shown(self) -> ToolUseContent:
        return ToolUseContent(self._id, self._name, arguments_object("".join(self._texts)))


class _ContentBlocks:
    """The content of one message, one block open at a time. shows_thoughts: else they are left
    out of their blocks.
    """

    def __init__(self, *, shows_thoughts: bool):
        self._shows_thoughts = shows_thoughts
        self._blocks: list[_Block] = []
        self._open: _Block | None = None

    def content(self) -> list[Content]:
        return [block.shown() for block in self._blocks]

    def push(self, event: AssistantEvent) -> Iterator[BlockEvent]:
        """One more event of the model's turn, and what a stream says of it."""
        match event:
            case ContentDelta():
                if not isinstance(self._open, _Text):
                    yield from self._begin(_Text())
            case ReasoningDelta():
                if not isinstance(self._open, _Thinking):
                    yield from self._begin(_Thinking(self._shows_thoughts))
            case ToolCallStart():
                yield from self._begin(_ToolUse(event.id, event.name))
                return
            case ToolCallArguments():
                pass
        assert self._open is not None
        yield from self._deltas(self._open.more(event.text))

    def close(self) -> Iterator[BlockEvent]:
        """End the block that is open, if one is."""
        if self._open is not None:
            yield from self._deltas(self._open.ended())
            yield ContentBlockStop(len(self._blocks) - 1)
            self._open = None

    def _begin(self, block: _Block) -> Iterator[BlockEvent]:
        yield from self.close()
        self._open = block
        self._blocks.append(block)
        index = len(self._blocks) - 1
        yield ContentBlockStart(index, block.begun())
        if index == 0:
            yield Ping()

    def _deltas(self, deltas: Iterator[Delta]) -> Iterator[ContentBlockDelta]:
        index = len(self._blocks) - 1
        for delta in deltas:
            yield ContentBlockDelta(index, delta)


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
        yield b""
        [choice] = self.generation.choices
        message = self._message()
        message.content = self._blocks.content()
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
        """Without its content and its end."""
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
