"""Turns the tokens of a request's sequences into text, thoughts and tool calls."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from jitney.engine.common.outputs import (
    FinishReason,
    PromptLogprobs,
    SequenceOutput,
    TokenLogprobs,
)
from jitney.engine.common.requests import EngineRequest, SamplingParams
from jitney.engine.common.slices import Work
from jitney.engine.core import TextDelta, TextStream, TokenBytes
from jitney.engine.server.chat.conversation.custom_inputs import CustomInputs
from jitney.engine.server.chat.conversation.events import AssistantEvent, ToolCallStart, joined
from jitney.engine.server.chat.conversation.thoughts import AssistantParser
from jitney.engine.server.chat.generation_request import EncodedPrompt, GenerationRequest

#: Reason for the end of a choice, in OpenAI's words.
type Ending = Literal["stop", "length"]

#: Tokens of a prompt that are turned into text between two stops of `TimeSlices`.
_ECHO_TOKENS = 64


class _Scores:
    """Log-probabilities in columns: 250 bytes per token with 20 alternatives (objects: 1,000)."""

    def __init__(self, width: int):
        #: Most alternatives stored per token.
        self.width = width
        #: float64[n]: the token's own; NaN if unknown.
        self.chosen = array("d")
        #: int32[n * width], float64[n * width]: the most likely tokens, id -1 where there are
        #: fewer.
        self._top_ids = array("i")
        self._top = array("d")

    def append(self, entry: TokenLogprobs | None) -> None:
        chosen = math.nan
        ids: list[int] = []
        logprobs: list[float] = []
        if entry is not None:
            chosen = entry.logprob
            ids, logprobs = entry.top_ids[: self.width], entry.top_logprobs[: self.width]
        missing = self.width - len(ids)
        self.chosen.append(chosen)
        self._top_ids.extend(ids)
        self._top_ids.extend([-1] * missing)
        self._top.extend(logprobs)
        self._top.extend([0.0] * missing)

    def extend(self, others: _Scores) -> None:
        """others: of the same width."""
        self.chosen.extend(others.chosen)
        self._top_ids.extend(others._top_ids)
        self._top.extend(others._top)

    def logprob(self, place: int) -> float | None:
        logprob = self.chosen[place]
        return None if math.isnan(logprob) else logprob

    def top(self, place: int) -> Iterator[tuple[int, float]]:
        """The most likely tokens with their log-probabilities."""
        start, end = place * self.width, (place + 1) * self.width
        for id, logprob in zip(self._top_ids[start:end], self._top[start:end], strict=True):
            if id >= 0:
                yield id, logprob


def _scores(width: int | None) -> _Scores | None:
    return None if width is None else _Scores(width)


# Structs: three are made per token, and a dataclass takes three times as long.
class TokenList(msgspec.Struct):
    """Tokens with text offsets and log-probabilities: three columns of equal length."""

    ids: list[int]
    #: Offset of each token in the text, in characters.
    offsets: list[int]
    #: None if log-probabilities were not requested.
    scores: _Scores | None

    @classmethod
    def empty(cls, width: int | None) -> TokenList:
        """width: of the scores, None for none."""
        return cls([], [], _scores(width))

    def cleared(self) -> TokenList:
        """An empty list with the same columns."""
        return TokenList([], [], None if self.scores is None else _Scores(self.scores.width))

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, others: TokenList, shift: int = 0) -> None:
        """Add tokens; shift: characters of the text before theirs."""
        self.ids += others.ids
        self.offsets += [offset + shift for offset in others.offsets]
        if self.scores is not None and others.scores is not None:
            self.scores.extend(others.scores)


class ChoiceDelta(msgspec.Struct):
    """New tokens, text and events of one choice."""

    #: All new tokens, also those whose text is still held back.
    tokens: TokenList
    #: Text that is final, markers included.
    text: str = ""
    #: Events in that text, if the request has a parser (chats do).
    events: list[AssistantEvent] = []
    #: Reason for its end; None: it goes on.
    finish: Ending | None = None

    def extend(self, more: ChoiceDelta) -> None:
        self.text += more.text
        self.events += more.events
        self.tokens.extend(more.tokens)
        self.finish = more.finish


@dataclass(slots=True)
class PromptEcho:
    """A prompt, as repeated in the answer with `echo`."""

    text: str
    tokens: TokenList
    #: As wide as `prompt_logprobs` asks for; None where it does not.
    scores: _Scores | None = None
    #: Comes with a sequence's first output token, and becomes `tokens.scores` and `scores`.
    logprobs: PromptLogprobs | None = None

    @classmethod
    def blank(cls, request: GenerationRequest, prompt: EncodedPrompt) -> PromptEcho:
        """An empty echo with the requested scores; `logprobs` applies to a prompt only with
        `echo`.
        """
        shown = _scores(request.top_logprobs if request.echo else None)
        return cls("", TokenList(prompt.ids, [], shown), _scores(request.body.prompt_logprobs))

    def fill(
        self, tokenizer: TokenBytes, request: GenerationRequest, prompt: EncodedPrompt
    ) -> Work[None]:
        """The prompt's text and its tokens' offsets; half a character at its end is left out."""
        skips = request.sampling.skip_special_tokens
        stream = TextStream(tokenizer, SamplingParams(skip_special_tokens=skips))
        texts: list[str] = []
        for start in range(0, len(prompt.ids), _ECHO_TOKENS):
            decoded = stream.push(prompt.ids[start : start + _ECHO_TOKENS])
            texts.append(decoded.text)
            self.tokens.offsets += decoded.offsets
            yield
        self.text = "".join(texts) if prompt.text is None else prompt.text

    def take_scores(self) -> Work[None]:
        """Fill the scores, unless they are filled: each sequence of the prompt brings them."""
        entries, self.logprobs = self.logprobs or (), None
        both = self.tokens.scores, self.scores
        receivers = [scores for scores in both if scores is not None and not scores.chosen]
        for place, entry in enumerate(entries):
            for scores in receivers:
                scores.append(entry)
            if place % _ECHO_TOKENS == 0:
                yield


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence of an answer."""

    #: Position among all choices of the answer.
    index: int
    #: Number of its prompt, and of the sequence among those of that prompt.
    prompt: int
    sequence: int
    engine_request: EngineRequest
    stream: TextStream
    #: Tokens whose text is held back.
    unsent: TokenList
    #: Parser of the text; None: the answer is plain text.
    parser: AssistantParser | None = None
    #: Reads the inputs of custom tools; None: there are no such tools.
    inputs: CustomInputs | None = None
    #: Number of tool calls after which it ends; None: unlimited.
    most_calls: int | None = None
    #: Calls of tools so far.
    n_calls: int = 0
    #: Output tokens received.
    n_tokens: int = 0
    #: Sum of their log-probabilities, if requested.
    cumulative: float = 0.0
    #: Why it ended; None while it goes on.
    finish: FinishReason | None = None
    #: The stop string that ended it, if one did.
    stop_string: str | None = None
    #: It has made a delta.
    is_shown: bool = False
    #: The first chunk has been sent; written by the format.
    started: bool = False
    #: time.monotonic() of its newest token; 0 before the first.
    tokens_at: float = 0.0
    #: The same for its first token.
    first_at: float = 0.0
    #: Seconds it waited for a seat, and from boarding to its first token; None before that.
    queued_s: float | None = None
    prefill_s: float | None = None

    @classmethod
    def all_of(cls, request: GenerationRequest, tokenizer: TokenBytes) -> list[Choice]:
        """The choices of all sequences, prompt by prompt."""
        choices: list[Choice] = []
        for prompt, engine_request in enumerate(request.engine_requests):
            for sequence in range(request.sampling.n):
                stream = TextStream(
                    tokenizer, request.sampling, engine_request.prompt, request.seen_ids
                )
                unsent = TokenList.empty(request.top_logprobs)
                parser = None if request.make_parser is None else request.make_parser()
                custom = request.custom_names
                choices.append(
                    cls(
                        index=len(choices),
                        prompt=prompt,
                        sequence=sequence,
                        engine_request=engine_request,
                        stream=stream,
                        unsent=unsent,
                        parser=parser,
                        inputs=CustomInputs(custom) if custom else None,
                        most_calls=request.most_calls,
                    )
                )
        return choices

    @property
    def ending(self) -> Ending | None:
        """The reason of its end, unless it failed."""
        return self.finish if self.finish in ("stop", "length") else None

    def accept(self, output: SequenceOutput) -> ChoiceDelta | None:
        """Add an output. None if no text is final yet (part of a character or of a stop string)."""
        if self.parser is None:
            text = self._push(output).text
            return self._delta(text, []) if text or self.finish is not None else None
        events: list[AssistantEvent] = []
        text = ""
        for part in _one_by_one(output):
            more = self._push(part)
            text += more.text
            events += self._parsed(self.parser, more.text, part.tokens[: more.tokens])
            if self.finish is not None:
                break
        return self._delta(text, events) if events or self.finish is not None else None

    def _push(self, output: SequenceOutput) -> TextDelta:
        """The text of new tokens, which are counted, and whether they end the choice."""
        more = self.stream.push(output.tokens, output.finish is not None, output.stop_token)
        self._count(output, more)
        self.stop_string = more.stop
        self.finish = output.finish if more.stop is None else "stop"
        return more

    def _delta(self, text: str, events: list[AssistantEvent]) -> ChoiceDelta:
        """A delta of text and events, with the tokens whose text was held back."""
        delta = ChoiceDelta(self.unsent, text, events, self.ending)
        self.unsent = self.unsent.cleared()
        self.is_shown = True
        return delta

    def _parsed(
        self, parser: AssistantParser, text: str, tokens: list[int]
    ) -> list[AssistantEvent]:
        """The events of new text. A call beyond the limit is left out and ends the choice."""
        events = parser.push(text, tokens)
        if self.finish is not None:
            is_cut = self.finish != "stop" or self.stop_string is not None
            events += parser.finish(is_cut=is_cut)
        if self.inputs is not None:
            events = self.inputs.texts(events, is_end=self.finish is not None)
        for place, event in enumerate(events):
            if isinstance(event, ToolCallStart):
                if self.n_calls == self.most_calls:
                    self.finish = "stop"
                    return events[:place]
                self.n_calls += 1
        return events

    def _count(self, output: SequenceOutput, text: TextDelta) -> None:
        """Add an output's tokens, except those after a stop string."""
        self.n_tokens += text.tokens
        self.unsent.ids += output.tokens[: text.tokens]
        self.unsent.offsets += text.offsets
        if output.logprobs is None:
            return
        for entry in output.logprobs[: text.tokens]:
            self.cumulative += entry.logprob
            if self.unsent.scores is not None:
                self.unsent.scores.append(entry)


#: Deltas of all choices, in the order of their arrival.
type Deltas = list[tuple[Choice, ChoiceDelta]]


def merged(deltas: Deltas) -> Deltas:
    """Merge deltas to one per choice, so that a slow stream catches up in one event."""
    by_choice: dict[int, tuple[Choice, ChoiceDelta]] = {}
    for choice, delta in deltas:
        if choice.index in by_choice:
            by_choice[choice.index][1].extend(delta)
        else:
            by_choice[choice.index] = choice, delta
    for _, delta in by_choice.values():
        delta.events = joined(delta.events)
    return list(by_choice.values())


def _one_by_one(output: SequenceOutput) -> Iterator[SequenceOutput]:
    """Split an output into outputs of one token, so that each token's text is known exactly."""
    if len(output.tokens) < 2:
        yield output
        return
    last = len(output.tokens) - 1
    for place, token in enumerate(output.tokens):
        scores = None if output.logprobs is None else output.logprobs[place : place + 1]
        part = SequenceOutput(
            request_id=output.request_id, index=output.index, tokens=[token], logprobs=scores
        )
        if place == last:
            part.finish, part.stop_token = output.finish, output.stop_token
        yield part
