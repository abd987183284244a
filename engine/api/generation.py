"""One HTTP request under way: outputs of its engine sequences in, text of its choices out.

A `Generation` owns the engine requests of one HTTP request. However it ends (done, error, client
gone), leaving it ends every sequence that is still open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field

from jitney.engine.api.errors import from_output
from jitney.engine.api.request import EncodedPrompt, GenerationRequest
from jitney.engine.api.service import Context, Service
from jitney.engine.text.detokenizer import TextStream, TokenBytes
from jitney.engine.types import EngineRequest, SamplingParams, SequenceOutput, TokenLogprobs

#: An output of the n-th engine request, or why there will be no more.
type News = tuple[int, SequenceOutput] | Exception


@dataclass(slots=True)
class Token:
    """One token as log-probability lists show it; offset: character position in the text; None:
    nothing before it.
    """

    id: int
    offset: int
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class ChoiceDelta:
    """What one choice gained: text that is final, tokens (all of them, held-back text or not), and
    its end.
    """

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None


@dataclass(slots=True)
class PromptEcho:
    """A prompt as `echo` repeats it; logprobs arrive with the first token, entry 0 is None."""

    text: str
    ids: list[int]
    offsets: list[int]
    logprobs: list[TokenLogprobs | None] | None = None

    def tokens(self) -> list[Token]:
        logprobs = self.logprobs or [None] * len(self.ids)
        return [Token(*each) for each in zip(self.ids, self.offsets, logprobs, strict=True)]


class Choice:
    """One sequence on its way to the client."""

    __slots__ = (
        "_stream",
        "_unsent",
        "cumulative",
        "finish",
        "index",
        "n_tokens",
        "prompt",
        "request",
        "sequence",
        "started",
        "tokens_at",
    )

    def __init__(
        self, index: int, prompt: int, sequence: int, request: EngineRequest, stream: TextStream
    ):
        self.index, self.prompt, self.sequence, self.request = index, prompt, sequence, request
        self.n_tokens = 0
        self.cumulative = 0.0  # sum of the tokens' log-probabilities, if they are asked for
        self.finish: str | None = None
        self.started = False  # written by whoever formats the stream: the first chunk is out
        self.tokens_at = 0.0
        self._stream = stream
        self._unsent: list[Token] = []

    @property
    def mean_logprob(self) -> float:
        return self.cumulative / max(1, self.n_tokens)

    def accept(self, output: SequenceOutput) -> ChoiceDelta | None:
        """Add an output; None while nothing can be shown (half a character, a possible stop
        string).
        """
        delta = self._stream.push(
            output.tokens, final=output.finish is not None, stop_token=output.stop_token
        )
        self.n_tokens += delta.tokens
        logprobs = output.logprobs or [None] * delta.tokens
        for token, offset, entry in zip(output.tokens, delta.offsets, logprobs, strict=False):
            self._unsent.append(Token(token, offset, entry))
            self.cumulative += entry.logprob if entry is not None else 0.0
        self.finish = "stop" if delta.stopped else output.finish
        if not delta.text and self.finish is None:
            return None
        piece, self._unsent = ChoiceDelta(delta.text, self._unsent, self.finish), []
        return piece


class Generation:
    """Async context manager: submits the job's requests, merges their outputs, aborts what is open
    at the end.

    Raises RequestError on entry if the engine refuses at once, and from `pieces` when a sequence
    ends badly.
    """

    def __init__(self, service: Service, job: GenerationRequest, context: Context):
        _, tokenizer = service.ready()
        self.job = job
        self.cached_tokens = [0] * len(job.requests)
        self.echoes = (
            [_echo(tokenizer, job.sampling, prompt) for prompt in job.prompts] if job.echo else []
        )
        self.choices = [
            Choice(
                prompt * job.sampling.n + sequence,
                prompt,
                sequence,
                request,
                TextStream(tokenizer, job.sampling, request.prompt),
            )
            for prompt, request in enumerate(job.requests)
            for sequence in range(job.sampling.n)
        ]
        self._client, self._metrics, self._context = service.client, service.metrics, context
        self._quotas = service.quotas
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self._failure: Exception | None = (
            None  # to be raised once what came before it has been shown
        )
        self._pumps: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Generation:
        try:
            for number, request in enumerate(self.job.requests):
                outputs = self._client.submit(request)
                self._pumps.append(asyncio.create_task(self._pump(number, outputs)))
        except BaseException:
            await self._end()
            raise
        self._metrics.prompt_tokens.inc(self._context.prompt_tokens)
        for request in self.job.requests:
            self._metrics.prompt_lengths.observe(len(request.prompt))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._end()

    @property
    def done(self) -> bool:
        return self._failure is None and all(choice.finish is not None for choice in self.choices)

    def usage(self) -> dict[str, object]:
        """OpenAI's usage object, as things stand now."""
        prompt = sum(len(request.prompt) for request in self.job.requests)
        completion = 0 if self.job.prompt_only else sum(choice.n_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached_tokens)},
        }

    async def pieces(self, wait_s: float | None) -> list[tuple[Choice, ChoiceDelta]]:
        """What is new since the last call, at least one piece; empty if `wait_s` seconds bring
        none.
        """
        if self._failure is not None:
            raise self._failure
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not (pieces := self._taken(await self._news.get())):
                    pass
                return pieces
        return []

    def _taken(self, item: News) -> list[tuple[Choice, ChoiceDelta]]:
        """The pieces of `item` and of all that waits behind it; what came before a failure is still
        shown.
        """
        pieces = self._take(item)
        while not self._news.empty() and self._failure is None:
            try:
                pieces += self._take(self._news.get_nowait())
            except Exception as error:
                if not pieces:
                    raise
                self._failure = error
        return pieces

    def _take(self, item: News) -> list[tuple[Choice, ChoiceDelta]]:
        if isinstance(item, Exception):
            raise item
        number, output = item
        choice = self.choices[number * self.job.sampling.n + output.index]
        if choice.finish is not None:  # what the core computed before it heard of a stop string
            return []
        if output.finish in ("error", "deadline", "abort"):
            choice.finish = output.finish
            self._metrics.finished.labels(output.finish).inc()
            raise from_output(output.error, output.finish)
        self._note(number, choice, output)
        piece = choice.accept(output)
        if choice.finish is not None:
            self._ended(choice, by_core=output.finish is not None)
        return [] if piece is None else [(choice, piece)]

    def _note(self, number: int, choice: Choice, output: SequenceOutput) -> None:
        """Keep what comes once per request or sequence, and the times."""
        if output.prompt_logprobs is not None and self.echoes:
            self.echoes[number].logprobs = output.prompt_logprobs
        if output.index == 0 and output.cached_tokens:
            self._metrics.cached_tokens.inc(output.cached_tokens - self.cached_tokens[number])
            self.cached_tokens[number] = output.cached_tokens
        if not output.tokens:
            return
        self._quotas.spend(self._context.tenant, len(output.tokens))
        now = time.monotonic()
        if choice.tokens_at:
            self._metrics.itl.observe((now - choice.tokens_at) / len(output.tokens))
        else:
            self._metrics.ttft.observe(now - self._context.started)
        if output.queued_s is not None and not choice.tokens_at:
            self._metrics.queue.observe(output.queued_s)
        choice.tokens_at = now

    def _ended(self, choice: Choice, *, by_core: bool) -> None:
        if not by_core:
            self._client.abort(choice.request.id, choice.sequence, "stop")
        self._metrics.finished.labels(choice.finish).inc()
        self._metrics.output_lengths.observe(choice.n_tokens)
        self._metrics.e2e.observe(time.monotonic() - self._context.started)

    async def _pump(self, number: int, outputs: AsyncIterator[SequenceOutput]) -> None:
        still_open = self.job.sampling.n
        try:
            async for output in outputs:
                still_open -= output.finish is not None
                self._news.put_nowait((number, output))
        except Exception as error:
            self._news.put_nowait(error)
        else:
            if still_open:
                self._news.put_nowait(from_output(None, "error"))

    async def _end(self) -> None:
        """Abort what is open. Said outright: closing an iterator that was never advanced tells its
        owner nothing.
        """
        self._context.completion_tokens = sum(choice.n_tokens for choice in self.choices)
        self._metrics.generated_tokens.inc(self._context.completion_tokens)
        for number, request in enumerate(self.job.requests[: len(self._pumps)]):
            mine = self.choices[number * self.job.sampling.n :][: self.job.sampling.n]
            if still_open := sum(choice.finish is None for choice in mine):
                self._client.abort(request.id)
                self._metrics.finished.labels("abort").inc(still_open)
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)


def _echo(tokenizer: TokenBytes, sampling: SamplingParams, prompt: EncodedPrompt) -> PromptEcho:
    """The prompt's text and where each token begins in it; a character cut off at its end is left
    to the output.
    """
    stream = TextStream(tokenizer, SamplingParams(skip_special_tokens=sampling.skip_special_tokens))
    delta = stream.push(prompt.ids)
    return PromptEcho(delta.text if prompt.text is None else prompt.text, prompt.ids, delta.offsets)
