"""Answers of Ollama's routes that generate: one object, or a stream of lines; the last one has
reason, counts and durations.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from msgspec import UNSET

from jitney.engine.common.slices import Pieces
from jitney.engine.core import TokenBytes
from jitney.engine.server.chat.choices import Choice, ChoiceDelta, TokenList
from jitney.engine.server.chat.conversation.events import (
    AssistantEvent,
    AssistantMessage,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    arguments_object,
)
from jitney.engine.server.chat.formats import Format
from jitney.engine.server.chat.generation import Generation
from jitney.engine.server.chat.ollama.answers import (
    Generated,
    OllamaCalledFunction,
    OllamaChatAnswer,
    OllamaEmbedAnswer,
    OllamaEmbeddingAnswer,
    OllamaGenerateAnswer,
    OllamaMessage,
    OllamaToolCall,
)
from jitney.engine.server.chat.openai.embeddings import float_list
from jitney.engine.server.chat.token_scores import TokenLogprob, TokenScores
from jitney.engine.server.http.answers import Maybe
from jitney.engine.server.http.errors import ErrorForm, ErrorReply
from jitney.engine.server.http.jsonio import LongJson, in_pieces, to_json
from jitney.engine.server.http.streaming import StreamingWriter

_SECOND_NS = 1e9


def rfc3339(time: datetime) -> str:
    """A time in UTC as Ollama writes it."""
    return time.isoformat().replace("+00:00", "Z")


def now() -> str:
    """The time, as every line has it."""
    return rfc3339(datetime.now(UTC))


class _LineFormat[A: Generated](Format):
    """A turn of the model. It has one choice. A: the answer, or one line of it."""

    stream_headers = StreamingWriter.JSON_LINES

    def __init__(self, generation: Generation, tokenizer: TokenBytes):
        super().__init__(generation, tokenizer)
        self._scores = TokenScores(tokenizer, as_ids=False)
        #: The incomplete call and its arguments so far: clients expect complete calls.
        self._call: ToolCallStart | None = None
        self._arguments: list[str] = []
        # No keep-alive: clients parse every line, and an empty one is an error.
        self.keep_alive = self._line(OllamaMessage())

    @staticmethod
    def answer(model: str, turn: OllamaMessage) -> A:
        """A part of the turn in the route's form; without a turn, the fields of an empty one."""
        raise NotImplementedError

    def whole(self) -> Pieces:
        [total] = self._totals
        said = AssistantMessage.of(self._events(total))
        calls = [
            _tool_call(index, call.id, call.name, call.arguments)
            for index, call in enumerate(said.tool_calls)
        ]
        turn = OllamaMessage(
            content=said.content, thinking=said.reasoning or UNSET, tool_calls=calls or UNSET
        )
        answer = self._ended(turn)
        answer.logprobs = self._logprobs(total.tokens)
        return in_pieces(answer)

    def chunks(self, choice: Choice, delta: ChoiceDelta) -> Iterator[bytes]:
        """The lines of a delta. The first one has the tokens, even if there is no text."""
        parts = list(self._parts(delta))
        logprobs = self._logprobs(delta.tokens)
        if logprobs is not UNSET and not parts:
            parts.append(OllamaMessage())
        for part in parts:
            yield self._line(part, logprobs)
            logprobs = UNSET

    def tail(self) -> Pieces:
        yield to_json(self._ended(OllamaMessage())) + b"\n"

    def failure(self, error: Exception, request_id: str) -> Pieces:
        yield ErrorReply.of(error, request_id).json(ErrorForm.OLLAMA) + b"\n"

    def _line(self, turn: OllamaMessage, logprobs: Maybe[list[TokenLogprob]] = UNSET) -> bytes:
        answer = self.answer(self.request.model, turn)
        answer.logprobs = logprobs
        return b"".join(in_pieces(answer)) + b"\n"

    def _parts(self, delta: ChoiceDelta) -> Iterator[OllamaMessage]:
        """The new parts of the turn, in the order in which they came."""
        for event in self._events(delta):
            if isinstance(event, ToolCallArguments):
                self._arguments.append(event.text)
                continue
            yield from self._ended_call()
            match event:
                case ContentDelta():
                    yield OllamaMessage(content=event.text)
                case ReasoningDelta():
                    yield OllamaMessage(thinking=event.text)
                case ToolCallStart():
                    self._call = event
        if delta.finish is not None:
            yield from self._ended_call()

    def _events(self, delta: ChoiceDelta) -> list[AssistantEvent]:
        if self.request.make_parser is None and delta.text:
            return [ContentDelta(delta.text)]
        return delta.events

    def _ended_call(self) -> Iterator[OllamaMessage]:
        """The complete open call, if there is one."""
        call, self._call = self._call, None
        if call is not None:
            whole = _tool_call(call.index, call.id, call.name, "".join(self._arguments))
            self._arguments.clear()
            yield OllamaMessage(tool_calls=[whole])

    def _logprobs(self, tokens: TokenList) -> Maybe[list[TokenLogprob]]:
        if self.request.top_logprobs is None or not tokens:
            return UNSET
        return self._scores.entries(tokens)

    def _ended(self, turn: OllamaMessage) -> A:
        """The whole answer, or the last line."""
        [choice] = self.generation.choices
        counts, times = self.generation.counts, self.generation.times
        answer = self.answer(self.request.model, turn)
        answer.done = True
        answer.done_reason = choice.ending
        answer.total_duration = _nanoseconds(times.total_s)
        answer.load_duration = _nanoseconds(times.queued_s)
        answer.prompt_eval_count = counts.prompt
        answer.prompt_eval_duration = _nanoseconds(times.prompt_s)
        answer.eval_count = counts.completion
        answer.eval_duration = _nanoseconds(times.answer_s)
        return answer


def _tool_call(index: int, id: str, name: str, arguments: str) -> OllamaToolCall:
    """arguments: JSON text."""
    called = OllamaCalledFunction(index, name, arguments_object(arguments))
    return OllamaToolCall(id, called)


class ChatFormat(_LineFormat[OllamaChatAnswer]):
    """Answers of /api/chat."""

    @staticmethod
    def answer(model: str, turn: OllamaMessage) -> OllamaChatAnswer:
        return OllamaChatAnswer(model=model, created_at=now(), message=turn)


class GenerateFormat(_LineFormat[OllamaGenerateAnswer]):
    """Answers of /api/generate."""

    @staticmethod
    def answer(model: str, turn: OllamaMessage) -> OllamaGenerateAnswer:
        return OllamaGenerateAnswer(
            model=model, created_at=now(), response=turn.content, thinking=turn.thinking
        )


class EmbedFormat(Format):
    """Answers of /api/embed: a vector for each text."""

    def whole(self) -> Pieces:
        times = self.generation.times
        answer = OllamaEmbedAnswer(
            model=self.request.model,
            embeddings=LongJson.of_each(map(float_list, self.generation.embeddings)),
            total_duration=_nanoseconds(times.total_s),
            load_duration=_nanoseconds(times.queued_s),
            prompt_eval_count=self.generation.counts.prompt,
        )
        return in_pieces(answer)


class EmbeddingFormat(Format):
    """Answers of /api/embeddings: one vector."""

    def whole(self) -> Pieces:
        [vector] = self.generation.embeddings
        return in_pieces(OllamaEmbeddingAnswer(float_list(vector)))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * _SECOND_NS)
