"""Answers of /v1/completions and /v1/chat/completions, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET

from jitney.engine.common.slices import Pieces
from jitney.engine.core import TokenBytes
from jitney.engine.server.chat.choices import Choice, ChoiceDelta, Ending, PromptEcho, TokenList
from jitney.engine.server.chat.conversation.events import (
    AssistantEvent,
    AssistantMessage,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    WrittenCall,
)
from jitney.engine.server.chat.formats import Format
from jitney.engine.server.chat.generation import Generation
from jitney.engine.server.chat.openai.answers import (
    CalledFunction,
    CalledTool,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatEnding,
    ChatLogprobs,
    ChatMessage,
    CompletionAnswer,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    CustomDelta,
    CustomToolCall,
    FunctionDelta,
    PromptLogprob,
    PromptLogprobs,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from jitney.engine.server.chat.token_scores import LOWEST, PerToken, TokenScores, finite, id_text
from jitney.engine.server.http.answers import Maybe
from jitney.engine.server.http.errors import ErrorReply
from jitney.engine.server.http.jsonio import LongJson, in_pieces

_DONE = b"data: [DONE]\n\n"
_NO_ECHO = PromptEcho("", TokenList.empty(None))


class _OpenAIFormat[C](Format):
    """The base of both routes. C: a choice as their chunks have it."""

    def __init__(self, generation: Generation, tokenizer: TokenBytes):
        super().__init__(generation, tokenizer)
        self._token_bytes = tokenizer.token_bytes
        body = self.request.body
        self._returns_ids = bool(body.return_token_ids)
        options = body.stream_options
        #: A stream ends with a chunk that has the usage; every chunk has it.
        self._ends_with_usage = bool(options and options.include_usage)
        self._repeats_usage = bool(options and options.continuous_usage_stats)

    def whole(self) -> Pieces:
        return in_pieces(self._answer())

    def _answer(self) -> CompletionAnswer | ChatAnswer:
        raise NotImplementedError

    def tail(self) -> Pieces:
        if self._ends_with_usage:
            yield from self._frame([], Usage.of(self.generation))
        yield _DONE

    def failure(self, error: Exception, request_id: str) -> Pieces:
        yield ErrorReply.of(error, request_id).event()
        yield _DONE

    def _chunk(self, choices: list[C], usage: Maybe[Usage | None]) -> CompletionChunk | ChatChunk:
        raise NotImplementedError

    def _frame(self, choices: list[C], usage: Usage | None = None) -> Iterator[bytes]:
        """usage: of the last one."""
        shown: Maybe[Usage | None] = UNSET
        if self._repeats_usage:
            shown = Usage.of(self.generation)
        elif self._ends_with_usage:
            shown = usage
        return self.event(self._chunk(choices, shown))

    def _best(self) -> list[Choice]:
        """The choices to return; with best_of > n those of highest mean log-probability."""
        n, made = self.request.body.n or 1, self.request.sampling.n
        if made == n:
            return self.generation.choices
        best: list[Choice] = []
        for start in range(0, len(self.generation.choices), made):
            group = self.generation.choices[start : start + made]
            group.sort(key=lambda one: one.cumulative / max(1, one.n_tokens), reverse=True)
            best += group[:n]
        return best

    def _prompt_logprobs(self, prompt: int) -> Maybe[PromptLogprobs]:
        """The prompt's log-probabilities in vLLM's form, by token id."""
        echo = self.generation.echoes[prompt]
        if echo.scores is None:
            return UNSET
        return LongJson.of(lambda place: self._ranked(echo, place), len(echo.scores.chosen))

    def _ranked(self, echo: PromptEcho, place: int) -> dict[str, PromptLogprob] | None:
        """A token of the prompt, and the likeliest ones of its place."""
        assert echo.scores is not None
        own = echo.scores.logprob(place)
        if own is None:
            return None
        token = echo.tokens.ids[place]
        entry = {str(token): self._ranked_token(token, own, None)}
        for rank, (id, logprob) in enumerate(echo.scores.top(place), start=1):
            entry[str(id)] = self._ranked_token(id, logprob, rank)
        return entry

    def _ranked_token(self, token: int, logprob: float, rank: int | None) -> PromptLogprob:
        text = self._token_bytes(token).decode(errors="replace")
        return PromptLogprob(finite(logprob), rank, text)

    def _token_ids(self, tokens: TokenList) -> Maybe[list[int]]:
        return tokens.ids if self._returns_ids else UNSET


class CompletionFormat(_OpenAIFormat[CompletionChoice]):
    """Answers of /v1/completions."""

    def __init__(self, generation: Generation, tokenizer: TokenBytes):
        super().__init__(generation, tokenizer)
        token_bytes, as_ids = tokenizer.token_bytes, self.request.body.return_tokens_as_token_ids
        self._texts = PerToken(id_text if as_ids else lambda token: _key_text(token_bytes(token)))

    def _answer(self) -> CompletionAnswer:
        return CompletionAnswer(
            id=self.request.id,
            created=self.request.created,
            model=self.request.model,
            choices=LongJson.of_each(self._choices()),
            usage=Usage.of(self.generation),
        )

    def _choices(self) -> Iterator[CompletionChoice]:
        for index, choice in enumerate(self._best()):
            shown = self._shown(choice, self._totals[choice.index], first=True)
            shown.index = index
            shown.prompt_logprobs = self._prompt_logprobs(choice.prompt)
            yield shown

    def chunks(self, choice: Choice, delta: ChoiceDelta) -> Iterator[bytes]:
        yield from self._frame([self._shown(choice, delta, first=not choice.started)])
        choice.started = True

    def _chunk(
        self, choices: list[CompletionChoice], usage: Maybe[Usage | None]
    ) -> CompletionChunk:
        return CompletionChunk(
            id=self.request.id,
            created=self.request.created,
            model=self.request.model,
            choices=choices,
            usage=usage,
        )

    def _shown(self, choice: Choice, delta: ChoiceDelta, *, first: bool) -> CompletionChoice:
        """A choice's text and log-probabilities. first: the first delta, which has an echoed
        prompt.
        """
        if self.request.prompt_only:
            delta = ChoiceDelta(self._no_tokens(), finish="length")
        echo = _NO_ECHO
        if self.request.echo:
            echo = self.generation.echoes[choice.prompt]
        shown = CompletionChoice(
            index=choice.index,
            text=echo.text + delta.text if first else delta.text,
            finish_reason=delta.finish,
            logprobs=None,
            token_ids=self._token_ids(delta.tokens),
        )
        if self.request.top_logprobs is not None:
            tokens = self._no_tokens()
            if first:
                tokens.extend(echo.tokens)
            tokens.extend(delta.tokens, shift=len(echo.text))
            shown.logprobs = self._logprobs(tokens)
        if self._returns_ids and first:
            shown.prompt_token_ids = choice.engine_request.prompt
        return shown

    def _logprobs(self, tokens: TokenList) -> CompletionLogprobs:
        count = len(tokens)
        return CompletionLogprobs(
            tokens=LongJson.of(lambda place: self._texts[tokens.ids[place]], count),
            token_logprobs=LongJson.of(lambda place: _logprob(tokens, place), count),
            top_logprobs=LongJson.of(lambda place: self._top(tokens, place), count),
            text_offset=LongJson.of(lambda place: tokens.offsets[place], count),
        )

    def _top(self, tokens: TokenList, place: int) -> dict[str, float] | None:
        """Token text -> log-probability of the most likely ones and of the token itself."""
        assert tokens.scores is not None
        own = tokens.scores.logprob(place)
        if own is None:
            return None
        texts = self._texts
        top: dict[str, float] = {}
        for id, logprob in tokens.scores.top(place):
            top[texts[id]] = logprob if logprob > LOWEST else LOWEST
        top[texts[tokens.ids[place]]] = finite(own)
        return top


class ChatFormat(_OpenAIFormat[ChatChunkChoice]):
    """Answers of /v1/chat/completions."""

    def __init__(self, generation: Generation, tokenizer: TokenBytes):
        super().__init__(generation, tokenizer)
        self._scores = TokenScores(tokenizer, as_ids=self.request.body.return_tokens_as_token_ids)

    def _answer(self) -> ChatAnswer:
        answer = ChatAnswer(
            id=self.request.id,
            created=self.request.created,
            model=self.request.model,
            choices=LongJson.of_each(self._choices()),
            usage=Usage.of(self.generation),
            prompt_logprobs=self._prompt_logprobs(0),
        )
        if self._returns_ids:
            answer.prompt_token_ids = self.request.prompts[0].ids
        return answer

    def _choices(self) -> Iterator[ChatChoice]:
        for index, choice in enumerate(self._best()):
            total = self._totals[choice.index]
            assert total.finish is not None  # the answer is complete
            yield ChatChoice(
                index=index,
                message=self._message(AssistantMessage.of(self._shown(total.events))),
                finish_reason=_ending(choice, total.finish),
                logprobs=self._logprobs(total.tokens),
                token_ids=self._token_ids(total.tokens),
            )

    def _message(self, message: AssistantMessage) -> ChatMessage:
        """The message of a whole answer. Its content is null if it only calls tools, or must."""
        shown = ChatMessage(content=message.content)
        if message.reasoning:
            shown.reasoning_content = shown.reasoning = message.reasoning
        if message.tool_calls or self.request.must_call:
            shown.content = message.content or None
        if message.tool_calls:
            shown.tool_calls = [_called(call) for call in message.tool_calls]
        return shown

    def chunks(self, choice: Choice, delta: ChoiceDelta) -> Iterator[bytes]:
        for part in self._parts(choice, delta):
            yield from self._frame([part])
        choice.started = True

    def _chunk(self, choices: list[ChatChunkChoice], usage: Maybe[Usage | None]) -> ChatChunk:
        return ChatChunk(
            id=self.request.id,
            created=self.request.created,
            model=self.request.model,
            choices=choices,
            usage=usage,
        )

    def _parts(self, choice: Choice, delta: ChoiceDelta) -> list[ChatChunkChoice]:
        """A delta's chunks: role, events with the tokens in the first of them, end."""
        index = choice.index
        parts = [] if choice.started else [self._opening(choice)]
        said = [_delta(event) for event in self._shown(delta.events)]
        shows_tokens = self.request.top_logprobs is not None or self._returns_ids
        if delta.tokens and shows_tokens and not said:
            said.append(ChatDelta(content=""))
        more = [ChatChunkChoice(index=index, delta=each) for each in said]
        if more:
            more[0].token_ids = self._token_ids(delta.tokens)
            more[0].logprobs = self._logprobs(delta.tokens)
        parts += more
        if delta.finish is not None:
            ending = _ending(choice, delta.finish)
            parts.append(ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=ending))
        return parts

    def _shown(self, events: list[AssistantEvent]) -> list[AssistantEvent]:
        if self.request.shows_reasoning:
            return events
        return [event for event in events if not isinstance(event, ReasoningDelta)]

    def _opening(self, choice: Choice) -> ChatChunkChoice:
        content = None if self.request.must_call else ""
        part = ChatChunkChoice(
            index=choice.index, delta=ChatDelta(role="assistant", content=content)
        )
        if self._returns_ids:
            part.prompt_token_ids = choice.engine_request.prompt
        return part

    def _logprobs(self, tokens: TokenList) -> ChatLogprobs | None:
        if self.request.top_logprobs is None:
            return None
        return ChatLogprobs(self._scores.entries(tokens))


def _key_text(data: bytes) -> str:
    """A token as a unique JSON key; for part of a character `bytes:..`, OpenAI's form."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _ending(choice: Choice, ending: Ending) -> ChatEnding:
    """The finish reason in OpenAI's words."""
    return "tool_calls" if ending == "stop" and choice.n_calls else ending


def _delta(event: AssistantEvent) -> ChatDelta:
    """An event of the model's turn as an addition to the message."""
    match event:
        case ContentDelta():
            return ChatDelta(content=event.text)
        case ReasoningDelta():
            return ChatDelta(reasoning_content=event.text, reasoning=event.text)
        case ToolCallStart(is_custom=True):
            call = ToolCallDelta(index=event.index, id=event.id, type="custom")
            call.custom = CustomDelta("", event.name)
        case ToolCallStart():
            call = ToolCallDelta(index=event.index, id=event.id, type="function")
            call.function = FunctionDelta("", event.name)
        case ToolCallArguments(is_custom=True):
            call = ToolCallDelta(index=event.index, custom=CustomDelta(event.text))
        case ToolCallArguments():
            call = ToolCallDelta(index=event.index, function=FunctionDelta(event.text))
    return ChatDelta(tool_calls=[call])


def _called(call: WrittenCall) -> ToolCall | CustomToolCall:
    """A call as the message has it."""
    if call.is_custom:
        return CustomToolCall(call.id, CalledTool(call.name, call.arguments))
    return ToolCall(call.id, CalledFunction(call.name, call.arguments))


def _logprob(tokens: TokenList, place: int) -> float | None:
    assert tokens.scores is not None
    logprob = tokens.scores.logprob(place)
    return None if logprob is None else finite(logprob)
