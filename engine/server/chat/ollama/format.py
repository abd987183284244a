"""Answers of Ollama's routes that generate: one object, or a stream of lines that each are one. The
last line has the reason of the end, the counts and the durations.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import numpy as np
import orjson

from jitney.engine.common.requests import JsonDict
from jitney.engine.core import TokenBytes
from jitney.engine.server.chat.choices import Choice, ChoiceDelta, TokenList
from jitney.engine.server.chat.conversation.events import (
    AssistantEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    arguments_object,
)
from jitney.engine.server.chat.formats import Format, TokenScores
from jitney.engine.server.chat.generation import Generation
from jitney.engine.server.http.blocks import AnswerParts
from jitney.engine.server.http.errors import ErrorForm, ErrorReply
from jitney.engine.server.http.jsonio import LongJson, in_pieces
from jitney.engine.server.http.slices import Pieces

_SECOND_NS = 1e9


def rfc3339(time: datetime) -> str:
    """A time in UTC as Ollama writes it."""
    return time.isoformat().replace("+00:00", "Z")


def head(model: str) -> JsonDict:
    """What every line begins with."""
    return {"model": model, "created_at": rfc3339(datetime.now(UTC))}


class _LineFormat(Format):
    """A turn of the model. It has one choice."""

    stream_headers = AnswerParts.JSON_LINES

    def __init__(self, generation: Generation, tokenizer: TokenBytes):
        super().__init__(generation, tokenizer)
        self._scores = TokenScores(tokenizer, as_ids=False)
        #: A call whose arguments are still being written, and these: clients take calls whole.
        self._call: ToolCallStart | None = None
        self._arguments: list[str] = []
        # Clients parse every line: an empty one would break their stream.
        self.keep_alive = self._line(self.written({"content": ""}))

    @staticmethod
    def written(turn: JsonDict) -> JsonDict:
        """A part of the model's turn, {content, thinking, tool_calls}, as the route has it. What an
        answer has without a turn is of an empty one.
        """
        raise NotImplementedError

    def whole(self) -> Pieces:
        [choice] = self.generation.choices
        total = self._totals[choice.index]
        turn: JsonDict = {"content": ""}
        for part in self._parts(total):
            for name, more in part.items():
                turn[name] = turn[name] + more if name in turn else more
        shown = head(self.request.model) | self.written(turn) | self._logprobs(total.tokens)
        return in_pieces(shown | self._end())

    def chunks(self, choice: Choice, delta: ChoiceDelta) -> Iterator[bytes]:
        """The tokens stand in the first line, which is empty where none says anything."""
        parts = list(self._parts(delta))
        logprobs = self._logprobs(delta.tokens)
        if logprobs and not parts:
            parts.append({"content": ""})
        for part in parts:
            yield self._line(self.written(part) | logprobs)
            logprobs = {}

    def tail(self) -> Pieces:
        yield self._line(self.written({"content": ""}) | self._end())

    def failure(self, error: Exception, request_id: str) -> Pieces:
        yield orjson.dumps(ErrorReply.of(error, request_id).body(ErrorForm.OLLAMA)) + b"\n"

    def _line(self, fields: JsonDict) -> bytes:
        shown = head(self.request.model) | {"done": False} | fields
        return b"".join(in_pieces(shown)) + b"\n"

    def _parts(self, delta: ChoiceDelta) -> Iterator[JsonDict]:
        """What is new of the turn, in the order in which it came."""
        for event in self._events(delta):
            if isinstance(event, ToolCallArguments):
                self._arguments.append(event.text)
                continue
            yield from self._ended_call()
            match event:
                case ContentDelta():
                    yield {"content": event.text}
                case ReasoningDelta():
                    yield {"content": "", "thinking": event.text}
                case ToolCallStart():
                    self._call = event
        if delta.finish is not None:
            yield from self._ended_call()

    def _events(self, delta: ChoiceDelta) -> list[AssistantEvent]:
        if self.request.make_parser is None and delta.text:
            return [ContentDelta(delta.text)]
        return delta.events

    def _ended_call(self) -> Iterator[JsonDict]:
        """The open call, whole, if there is one."""
        call, self._call = self._call, None
        if call is not None:
            arguments = arguments_object("".join(self._arguments))
            self._arguments.clear()
            function = {"index": call.index, "name": call.name, "arguments": arguments}
            yield {"content": "", "tool_calls": [{"id": call.id, "function": function}]}

    def _logprobs(self, tokens: TokenList) -> JsonDict:
        if self.request.top_logprobs is None or not tokens:
            return {}
        entries = LongJson.of(lambda place: self._scores.entry(tokens, place), len(tokens))
        return {"logprobs": entries}

    def _end(self) -> JsonDict:
        [choice] = self.generation.choices
        counts, times = self.generation.counts, self.generation.times
        return {
            "done": True,
            "done_reason": choice.finish,
            "total_duration": _nanoseconds(times.total_s),
            "load_duration": _nanoseconds(times.queued_s),
            "prompt_eval_count": counts.prompt,
            "prompt_eval_duration": _nanoseconds(times.prompt_s),
            "eval_count": counts.completion,
            "eval_duration": _nanoseconds(times.answer_s),
        }


class ChatFormat(_LineFormat):
    """Of /api/chat."""

    @staticmethod
    def written(turn: JsonDict) -> JsonDict:
        return {"message": {"role": "assistant"} | turn}


class GenerateFormat(_LineFormat):
    """Of /api/generate."""

    @staticmethod
    def written(turn: JsonDict) -> JsonDict:
        thinking = {"thinking": turn["thinking"]} if "thinking" in turn else {}
        return {"response": turn["content"]} | thinking


class EmbedFormat(Format):
    """Of /api/embed: a vector for each text."""

    def whole(self) -> Pieces:
        times = self.generation.times
        return in_pieces(
            {
                "model": self.request.model,
                "embeddings": LongJson(self._vectors()),
                "total_duration": _nanoseconds(times.total_s),
                "load_duration": _nanoseconds(times.queued_s),
                "prompt_eval_count": self.generation.counts.prompt,
            }
        )

    def _vectors(self) -> Iterator[bytes]:
        mark = b"["
        for vector in self.generation.embeddings:
            yield mark + _vector_json(vector)
            mark = b","
        yield b"]"


class EmbeddingFormat(Format):
    """Of /api/embeddings: one vector."""

    def whole(self) -> Pieces:
        [vector] = self.generation.embeddings
        yield b'{"embedding":' + _vector_json(vector) + b"}"


def _vector_json(vector: bytes) -> bytes:
    """vector: float32 numbers."""
    return orjson.dumps(np.frombuffer(vector, np.float32), option=orjson.OPT_SERIALIZE_NUMPY)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * _SECOND_NS)
