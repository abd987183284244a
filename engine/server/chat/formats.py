"""The two shapes an answer can have, whole or in chunks: text completion and chat completion."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jitney.engine.common.requests import JsonDict
from jitney.engine.core import TokenBytes
from jitney.engine.server.chat.choices import Choice, ChoiceDelta, PromptEcho, TokenList
from jitney.engine.server.chat.conversation.events import (
    AssistantEvent,
    AssistantMessage,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from jitney.engine.server.chat.generation import Generation
from jitney.engine.server.http.blocks import AnswerParts
from jitney.engine.server.http.errors import ErrorReply
from jitney.engine.server.http.jsonio import LongJson, in_pieces
from jitney.engine.server.http.slices import Pieces

_DONE = b"data: [DONE]\n\n"
#: JSON has no minus infinity; OpenAI writes this for a token that cannot be chosen.
_LOWEST = -9999.0
_NO_ECHO = PromptEcho("", TokenList.empty(None))


class _Known[T](dict[int, T]):
    """What `make` gives for a token id, made once."""

    def __init__(self, make: Callable[[int], T]):
        super().__init__()
        self._make = make

    def __missing__(self, token: int) -> T:
        value = self[token] = self._make(token)
        return value


class TokenScores:
    """Tokens with their log-probabilities, as OpenAI writes them. as_ids: named by their ids, in
    vLLM's form.
    """

    def __init__(self, tokenizer: TokenBytes, *, as_ids: bool):
        def spelling(token: int) -> tuple[str, list[int]]:
            data = tokenizer.token_bytes(token)
            text = _id_text(token) if as_ids else data.decode(errors="replace")
            return text, list(data)

        #: A token's text and its bytes.
        self._spellings = _Known(spelling)

    def entry(self, tokens: TokenList, place: int) -> JsonDict:
        """One token, and the likeliest of its place."""
        assert tokens.scores is not None
        own = tokens.scores.logprob(place)
        if own is None:
            own = _LOWEST
        entry = self._spelled(tokens.ids[place], own)
        top = tokens.scores.top(place)
        entry["top_logprobs"] = [self._spelled(id, logprob) for id, logprob in top]
        return entry

    def _spelled(self, token: int, logprob: float) -> JsonDict:
        text, data = self._spellings[token]
        return {"token": text, "logprob": _finite(logprob), "bytes": data}


class Format:
    """Answers of one generation. `add` and `whole` for a plain answer; `opening`, `chunks`, and
    `tail` or `failure` for a stream (SSE frames). Answers come in pieces: work for `Slices`.
    """

    whole_object = chunk_object = ""
    #: What a stream says while there is nothing to say: an event without a field, which is none. A
    #: comment would be as right, but `vllm bench serve` (0.32) strips the chunks that it reads: a
    #: comment by itself loses its end, and swallows all that follows.
    keep_alive = b"\n\n"
    #: Of a stream.
    stream_headers = AnswerParts.EVENT_STREAM

    def __init__(self, generation: Generation, tokenizer: TokenBytes):
        self.generation = generation
        self.request = generation.request
        self._token_bytes = tokenizer.token_bytes
        #: Everything that each choice gained, by its index; of a plain answer.
        self._totals = [ChoiceDelta(self._no_tokens()) for _ in generation.choices]
        self._head = {
            "id": self.request.id,
            "object": "",
            "created": self.request.created,
            "model": self.request.model,
        }

    def add(self, choice: Choice, delta: ChoiceDelta) -> None:
        """Something for a plain answer."""
        self._totals[choice.index].extend(delta)

    def _no_tokens(self) -> TokenList:
        return TokenList.empty(self.request.top_logprobs)

    def whole(self) -> Pieces:
        """The body of a plain answer."""
        body = self._head | {"object": self.whole_object, "choices": LongJson(self._choices())}
        return in_pieces(body | self._whole_extra() | {"usage": self.generation.usage()})

    def _choices(self) -> Iterator[bytes]:
        mark = b"["
        for index, choice in enumerate(self._best()):
            yield mark
            yield from in_pieces(self._choice(index, choice, self._totals[choice.index]))
            mark = b","
        yield b"]"

    def chunks(self, choice: Choice, delta: ChoiceDelta) -> Iterator[bytes]:
        """The frames of one delta; the first one of a choice opens it."""
        for entry in self._entries(choice, delta):
            yield from self._frame([entry])
        choice.started = True

    def opening(self) -> bytes:
        """What comes before the first chunk."""
        return b""

    def tail(self) -> Pieces:
        """What follows the last chunk."""
        if self.request.include_usage:
            yield from self._frame([], self.generation.usage())
        yield _DONE

    def failure(self, error: Exception, request_id: str) -> Pieces:
        """What follows the last chunk if something went wrong."""
        yield ErrorReply.of(error, request_id).event()
        yield _DONE

    def _frame(
        self, choices: list[JsonDict], usage: dict[str, object] | None = None
    ) -> Iterator[bytes]:
        body = self._head | {"object": self.chunk_object, "choices": choices}
        if self.request.continuous_usage:
            body["usage"] = self.generation.usage()
        elif self.request.include_usage:
            body["usage"] = usage
        return self._event(body)

    @staticmethod
    def _event(body: JsonDict) -> Iterator[bytes]:
        """One of a stream."""
        yield b"data: "
        yield from in_pieces(body)
        yield b"\n\n"

    def _best(self) -> list[Choice]:
        """The choices to return, prompt by prompt; with best_of > n those of highest mean
        log-probability.
        """
        n, made = self.request.n, self.request.sampling.n
        if made == n:
            return self.generation.choices
        best: list[Choice] = []
        for start in range(0, len(self.generation.choices), made):
            group = self.generation.choices[start : start + made]
            group.sort(key=lambda choice: choice.mean_logprob, reverse=True)
            best += group[:n]
        return best

    def _prompt_logprobs(self, prompt: int) -> JsonDict:
        """In vLLM's form, by token id; nothing if they were not asked for."""
        echo = self.generation.echoes[prompt]
        if echo.scores is None:
            return {}
        entries = LongJson.of(lambda place: self._ranked(echo, place), len(echo.scores.chosen))
        return {"prompt_logprobs": entries}

    def _ranked(self, echo: PromptEcho, place: int) -> JsonDict | None:
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

    def _ranked_token(self, token: int, logprob: float, rank: int | None) -> JsonDict:
        text = self._token_bytes(token).decode(errors="replace")
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}

    def _token_ids(self, tokens: TokenList) -> JsonDict:
        return {"token_ids": tokens.ids} if self.request.return_token_ids else {}

    def _choice(self, index: int, choice: Choice, total: ChoiceDelta) -> JsonDict:
        raise NotImplementedError

    def _whole_extra(self) -> JsonDict:
        return {}

    def _entries(self, choice: Choice, delta: ChoiceDelta) -> list[JsonDict]:
        raise NotImplementedError


class CompletionFormat(Format):
    whole_object = chunk_object = "text_completion"

    def __init__(self, generation: Generation, tokenizer: TokenBytes):
        super().__init__(generation, tokenizer)
        token_bytes, as_ids = tokenizer.token_bytes, self.request.tokens_as_ids
        self._texts = _Known(_id_text if as_ids else lambda token: _key_text(token_bytes(token)))

    def _choice(self, index: int, choice: Choice, total: ChoiceDelta) -> JsonDict:
        entry = self._entry(index, choice, total, first=True)
        return entry | self._prompt_logprobs(choice.prompt)

    def _entries(self, choice: Choice, delta: ChoiceDelta) -> list[JsonDict]:
        return [self._entry(choice.index, choice, delta, first=not choice.started)]

    def _entry(self, index: int, choice: Choice, delta: ChoiceDelta, *, first: bool) -> JsonDict:
        """first: the first one of its choice, where the prompt is repeated if it is to be."""
        if self.request.prompt_only:
            delta = ChoiceDelta(self._no_tokens(), finish="length")
        echo = _NO_ECHO
        if self.request.echo:
            echo = self.generation.echoes[choice.prompt]
        entry = {
            "index": index,
            "text": echo.text + delta.text if first else delta.text,
            "finish_reason": delta.finish,
            "logprobs": None,
        }
        if self.request.top_logprobs is not None:
            shown = self._no_tokens()
            if first:
                shown.extend(echo.tokens)
            shown.extend(delta.tokens, shift=len(echo.text))
            entry["logprobs"] = self._logprobs(shown)
        if self.request.return_token_ids and first:
            entry["prompt_token_ids"] = choice.engine_request.prompt
        return entry | self._token_ids(delta.tokens)

    def _logprobs(self, tokens: TokenList) -> JsonDict:
        count = len(tokens)
        return {
            "tokens": LongJson.of(lambda place: self._texts[tokens.ids[place]], count),
            "token_logprobs": LongJson.of(lambda place: _logprob(tokens, place), count),
            "top_logprobs": LongJson.of(lambda place: self._top(tokens, place), count),
            "text_offset": LongJson.of(lambda place: tokens.offsets[place], count),
        }

    def _top(self, tokens: TokenList, place: int) -> dict[str, float] | None:
        """Token text -> log-probability of the most likely ones and of the token itself."""
        assert tokens.scores is not None
        own = tokens.scores.logprob(place)
        if own is None:
            return None
        texts = self._texts
        top: dict[str, float] = {}
        for id, logprob in tokens.scores.top(place):
            top[texts[id]] = logprob if logprob > _LOWEST else _LOWEST
        top[texts[tokens.ids[place]]] = _finite(own)
        return top


class ChatFormat(Format):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, generation: Generation, tokenizer: TokenBytes):
        super().__init__(generation, tokenizer)
        self._scores = TokenScores(tokenizer, as_ids=self.request.tokens_as_ids)

    def _choice(self, index: int, choice: Choice, total: ChoiceDelta) -> JsonDict:
        entry = {
            "index": index,
            "message": self._message(AssistantMessage.of(self._shown(total.events))),
            "finish_reason": _finish(choice, total),
            "logprobs": self._logprobs(total.tokens),
        }
        return entry | self._token_ids(total.tokens)

    def _message(self, message: AssistantMessage) -> JsonDict:
        """Of a whole answer. The content of one that only calls tools, or must, is null."""
        calls: list[JsonDict] = []
        for call in message.tool_calls:
            calls.append({"id": call.id} | _called(call.name, call.arguments, call.is_custom))
        shown: JsonDict = {"role": "assistant", "content": message.content, "refusal": None}
        if message.reasoning:
            shown["reasoning_content"] = shown["reasoning"] = message.reasoning
        if calls or self.request.must_call:
            shown["content"] = message.content or None
        if calls:
            shown["tool_calls"] = calls
        return shown

    def _whole_extra(self) -> JsonDict:
        extra = self._prompt_logprobs(0)
        if self.request.return_token_ids:
            extra["prompt_token_ids"] = self.request.prompts[0].ids
        return extra

    def _entries(self, choice: Choice, delta: ChoiceDelta) -> list[JsonDict]:
        """The role first, then what came, then the reason of the end, each in a chunk of its own.
        The tokens stand in the first chunk after the role.
        """
        entries: list[JsonDict] = []
        if not choice.started:
            entries.append(self._opening(choice))
        said = [self._delta(choice, _said(event)) for event in self._shown(delta.events)]
        shows_tokens = self.request.top_logprobs is not None or self.request.return_token_ids
        if delta.tokens and shows_tokens and not said:
            said.append(self._delta(choice, {"content": ""}))
        if said:
            said[0] |= self._token_ids(delta.tokens)
            said[0]["logprobs"] = self._logprobs(delta.tokens)
        entries += said
        if delta.finish is not None:
            entries.append(self._delta(choice, {}, _finish(choice, delta)))
        return entries

    def _shown(self, events: list[AssistantEvent]) -> list[AssistantEvent]:
        if self.request.shows_reasoning:
            return events
        return [event for event in events if not isinstance(event, ReasoningDelta)]

    def _opening(self, choice: Choice) -> JsonDict:
        content = None if self.request.must_call else ""
        entry = self._delta(choice, {"role": "assistant", "content": content})
        if self.request.return_token_ids:
            entry["prompt_token_ids"] = choice.engine_request.prompt
        return entry

    def _delta(self, choice: Choice, delta: JsonDict, finish: str | None = None) -> JsonDict:
        return {"index": choice.index, "delta": delta, "finish_reason": finish, "logprobs": None}

    def _logprobs(self, tokens: TokenList) -> JsonDict | None:
        if self.request.top_logprobs is None:
            return None
        content = LongJson.of(lambda place: self._scores.entry(tokens, place), len(tokens))
        return {"content": content, "refusal": None}


def _key_text(data: bytes) -> str:
    """A token as a JSON key; `bytes:\\x..` (OpenAI's form) where it is no whole character: no two
    may collide.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _id_text(token: int) -> str:
    """A token's id in the place of its text."""
    return f"token_id:{token}"


def _finish(choice: Choice, delta: ChoiceDelta) -> str | None:
    """Why it ended, as OpenAI says it."""
    if delta.finish == "stop" and choice.n_calls:
        return "tool_calls"
    return delta.finish


def _said(event: AssistantEvent) -> JsonDict:
    """An event as the delta of a chunk."""
    match event:
        case ContentDelta():
            return {"content": event.text}
        case ReasoningDelta():
            return {"reasoning_content": event.text, "reasoning": event.text}
        case ToolCallStart():
            call = {"index": event.index, "id": event.id}
            return {"tool_calls": [call | _called(event.name, "", event.is_custom)]}
        case ToolCallArguments():
            more = {"arguments": event.text}
            field = "function"
            if event.is_custom:
                more, field = {"input": event.text}, "custom"
            return {"tool_calls": [{"index": event.index, field: more}]}


def _called(name: str, arguments: str, is_custom: bool) -> JsonDict:
    """What is called, and with what. arguments: of a custom tool its text."""
    if is_custom:
        return {"type": "custom", "custom": {"name": name, "input": arguments}}
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _logprob(tokens: TokenList, place: int) -> float | None:
    assert tokens.scores is not None
    logprob = tokens.scores.logprob(place)
    return None if logprob is None else _finite(logprob)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
