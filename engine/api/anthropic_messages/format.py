"""Answers of /v1/messages: the message, and the stream of typed events that makes one."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from jitney.engine.api.anthropic_messages.blocks import ContentBlocks, MessageEvent
from jitney.engine.api.anthropic_messages.schema import MessagesBody
from jitney.engine.api.choices import Choice, ChoiceDelta
from jitney.engine.api.errors import ErrorReply
from jitney.engine.api.formats import Format
from jitney.engine.api.generation import Generation
from jitney.engine.api.slices import Pieces
from jitney.engine.text.detokenizer import TokenBytes
from jitney.engine.types import JsonDict


class MessageFormat(Format):
    """One message. It has one choice."""

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, generation: Generation, tokenizer: TokenBytes, body: MessagesBody):
        super().__init__(generation, tokenizer)
        self._max_tokens = body.max_tokens
        self._blocks = ContentBlocks(shows_thoughts=body.shows_thoughts)

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


def _frame(event: MessageEvent) -> bytes:
    return b"event: " + event["type"].encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"
