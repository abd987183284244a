"""Answers of /v1/messages: the message, made of content blocks, and the stream of typed events that
makes one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import orjson

from jitney.engine.common.requests import JsonDict
from jitney.engine.core import TokenBytes
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
from jitney.engine.server.http.slices import Pieces

type _Event = JsonDict


class _Block:
    """A block that is being written."""

    def begun(self) -> JsonDict:
        """The block as it begins."""
        raise NotImplementedError

    def more(self, text: str) -> Iterator[JsonDict]:
        """Deltas that add a text."""
        raise NotImplementedError

    def ended(self) -> Iterator[JsonDict]:
        """Deltas that come last."""
        yield from ()

    def shown(self) -> JsonDict:
        """The whole block."""
        raise NotImplementedError


class _Text(_Block):
    def __init__(self) -> None:
        self._texts: list[str] = []

    def begun(self) -> JsonDict:
        return {"type": "text", "text": ""}

    def more(self, text: str) -> Iterator[JsonDict]:
        self._texts.append(text)
        yield {"type": "text_delta", "text": text}

    def shown(self) -> JsonDict:
        return {"type": "text", "text": "".join(self._texts)}


class _Thinking(_Block):
    """is_shown: else the block says only that there were thoughts."""

    def __init__(self, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._texts: list[str] = []
        self._digest = hashlib.sha256()

    def begun(self) -> JsonDict:
        return {"type": "thinking", "thinking": "", "signature": ""}

    def more(self, text: str) -> Iterator[JsonDict]:
        self._digest.update(text.encode("utf-8", "surrogatepass"))
        if self._is_shown:
            self._texts.append(text)
            yield {"type": "thinking_delta", "thinking": text}

    def ended(self) -> Iterator[JsonDict]:
        yield {"type": "signature_delta", "signature": self._digest.hexdigest()}

    def shown(self) -> JsonDict:
        text = "".join(self._texts)
        return {"type": "thinking", "thinking": text, "signature": self._digest.hexdigest()}


class _ToolUse(_Block):
    def __init__(self, id: str, name: str) -> None:
        self._id = id
        self._name = name
        self._texts: list[str] = []

    def begun(self) -> JsonDict:
        return {"type": "tool_use", "id": self._id, "name": self._name, "input": {}}

    def more(self, text: str) -> Iterator[JsonDict]:
        self._texts.append(text)
        yield {"type": "input_json_delta", "partial_json": text}

    def shown(self) -> JsonDict:
        return self.begun() | {"input": arguments_object("".join(self._texts))}


class _ContentBlocks:
    """The content of one message, one block open at a time. shows_thoughts: else they are left
    out of their blocks.
    """

    def __init__(self, *, shows_thoughts: bool):
        self._shows_thoughts = shows_thoughts
        self._blocks: list[_Block] = []
        self._open: _Block | None = None

    def content(self) -> list[JsonDict]:
        return [block.shown() for block in self._blocks]

    def push(self, event: AssistantEvent) -> Iterator[_Event]:
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

    def close(self) -> Iterator[_Event]:
        """End the block that is open, if one is."""
        if self._open is not None:
            yield from self._deltas(self._open.ended())
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}
            self._open = None

    def _begin(self, block: _Block) -> Iterator[_Event]:
        yield from self.close()
        self._open = block
        self._blocks.append(block)
        index = len(self._blocks) - 1
        yield {"type": "content_block_start", "index": index, "content_block": block.begun()}
        if index == 0:
            yield {"type": "ping"}

    def _deltas(self, deltas: Iterator[JsonDict]) -> Iterator[_Event]:
        index = len(self._blocks) - 1
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}


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
        message = self._message() | {"content": self._blocks.content()} | self._end()
        yield orjson.dumps(message)

    def opening(self) -> bytes:
        return _frame({"type": "message_start", "message": self._message()})

    def chunks(self, choice: Choice, delta: ChoiceDelta) -> Iterator[bytes]:
        for event in delta.events:
            yield from map(_frame, self._blocks.push(event))

    def tail(self) -> Pieces:
        yield from map(_frame, self._blocks.close())
        yield _frame({"type": "message_delta", "delta": self._end(), "usage": self._usage()})
        yield _frame({"type": "message_stop"})

    def failure(self, error: Exception, request_id: str) -> Pieces:
        yield _frame(ErrorReply.of(error, request_id).anthropic())

    def _message(self) -> JsonDict:
        """Without its content and its end."""
        return {
            "id": self.request.id,
            "type": "message",
            "role": "assistant",
            "model": self.request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _end(self) -> JsonDict:
        [choice] = self.generation.choices
        return {"stop_reason": self._stop_reason(choice), "stop_sequence": choice.stop_string}

    def _reached(self, choice: Choice) -> str:
        """The limit that ended it."""
        allowed = choice.engine_request.sampling.max_tokens
        is_cut = allowed is not None and allowed < self._max_tokens
        return "model_context_window_exceeded" if is_cut else "max_tokens"

    def _stop_reason(self, choice: Choice) -> str:
        if choice.finish == "length":
            return self._reached(choice)
        if choice.n_calls:
            return "tool_use"
        return "end_turn" if choice.stop_string is None else "stop_sequence"

    def _usage(self) -> JsonDict:
        """As things stand now. Input tokens that were cached are no part of input_tokens."""
        counts = self.generation.counts
        return {
            "input_tokens": counts.prompt - counts.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counts.cached,
            "output_tokens": counts.completion,
            "output_tokens_details": {"thinking_tokens": counts.reasoning},
        }


def _frame(event: _Event) -> bytes:
    return b"event: " + event["type"].encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"
