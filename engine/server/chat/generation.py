"""Runs one generation request: collects outputs of its engine requests as deltas of its choices."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np

from jitney.engine.common.errors import ErrorInfo, RequestError
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.server.chat.choices import Choice, ChoiceDelta, Deltas, PromptEcho
from jitney.engine.server.chat.generation_request import GenerationRequest
from jitney.engine.server.chat.mailbox import Mailbox
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.service import Service

_NO_REASON = ("internal_error", "the engine gave no reason")
#: Finish reason -> code and message of the error.
_BAD_ENDS = {
    "deadline": ("deadline_exceeded", "the request's time ran out"),
    "abort": ("draining", "the server ended this request: it stops, or goes to sleep"),
}


@dataclass(frozen=True, slots=True)
class _TokenCounts:
    """Tokens of a request."""

    prompt: int
    #: Prompt tokens that came from the prefix cache.
    cached: int
    completion: int
    #: Output tokens that were thoughts.
    reasoning: int


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of a request."""

    #: Since it arrived.
    total_s: float
    #: Waiting for a seat; from boarding to the first token; from the first token to the newest.
    queued_s: float
    prompt_s: float
    answer_s: float


class Generation:
    """Async context manager: charges the key, submits the engine requests, merges their outputs,
    and aborts what is open at the end. Raises RequestError if the key's limits or the engine
    refuse, and from `deltas` when a sequence ends badly.
    """

    def __init__(self, service: Service, request: GenerationRequest, context: Context):
        _, tokenizer = service.ready()
        self.request = request
        self.choices = Choice.all_of(request, tokenizer)
        #: The echoed prompts, if requested.
        self.echoes = [PromptEcho.blank(request, prompt) for prompt in request.prompts]
        #: Tokens of each prompt that came from the prefix cache.
        self.cached_tokens = [0] * len(request.prompts)
        #: The vectors of the prompts, if requested: float32 as bytes.
        self.embeddings: list[bytes] = [b""] * len(request.prompts)
        self._tokenizer = tokenizer
        self._slices = service.slices
        self._client = service.client
        self._metrics = service.metrics
        self._quotas = service.quotas
        self._tracing = service.tracing
        self._context = context
        #: Context in which the sequences count against the key.
        self._charged = ExitStack()
        #: Deltas that have not been taken.
        self._news: Mailbox[tuple[Choice, ChoiceDelta]] = Mailbox(service.slices)
        #: Engine requests that were submitted.
        self._n_submitted = 0

    async def __aenter__(self) -> Generation:
        try:
            self._charge()
            self._context.end = self._end_with
            for _ in range(self.request.first_group):
                self._submit_next()
            if self.request.echo:  # made while the engine reads the prompts
                for echo, prompt in zip(self.echoes, self.request.prompts, strict=True):
                    await self._slices.result(echo.fill(self._tokenizer, self.request, prompt))
        except BaseException:
            self._end()
            raise
        self._metrics.prompt_tokens.inc(self._context.prompt_tokens)
        for request in self.request.engine_requests:
            self._metrics.prompt_lengths.observe(len(request.prompt))
        return self

    def _charge(self) -> None:
        """Count the sequences and tokens against the key. Raises RequestError."""
        tenant, request = self._context.tenant, self.request
        charged, quotas = self._charged, self._quotas
        charged.enter_context(quotas.open_rest(tenant, request.sequences))
        spending = quotas.spending(tenant, request.engine_requests)
        self._context.spending = charged.enter_context(spending)

    def _submit_next(self) -> None:
        """Give the engine the next of the engine requests, if there is one. Raises RequestError."""
        number = self._n_submitted
        if number == len(self.request.engine_requests):
            return
        request = self.request.engine_requests[number]
        self._client.submit(request, partial(self._hear, number))
        self._n_submitted += 1
        if self._tracing is not None:
            self._tracing.submitted(request, self._context)

    async def __aexit__(self, *exc: object) -> None:
        self._end()

    @property
    def done(self) -> bool:
        return self._news.is_empty and all(choice.finish is not None for choice in self.choices)

    @property
    def counts(self) -> _TokenCounts:
        return _TokenCounts(
            prompt=sum(len(prompt.ids) for prompt in self.request.prompts),
            cached=sum(self.cached_tokens),
            completion=self.completion_tokens,
            reasoning=sum(each.parser.reasoning_tokens for each in self.choices if each.parser),
        )

    @property
    def times(self) -> _Times:
        """Times of the first choice so far."""
        choice = self.choices[0]
        return _Times(
            total_s=time.monotonic() - self._context.started,
            queued_s=choice.queued_s or 0.0,
            prompt_s=choice.prefill_s or 0.0,
            answer_s=choice.tokens_at - choice.first_at,
        )

    @property
    def completion_tokens(self) -> int:
        return sum(choice.n_tokens for choice in self.choices)

    async def deltas(
        self, wait_s: float | None, reader: Callable[[Deltas], bool] | None = None
    ) -> Deltas:
        """The deltas since the last call, at least one; empty after `wait_s` seconds. Those before
        a failure are still returned. reader: see `Mailbox.take`; it never gets a choice's first or
        last.
        """
        deltas = await self._news.take(wait_s, reader)
        for echo in self.echoes:
            if echo.logprobs is not None:
                await self._slices.result(echo.take_scores())
        return deltas

    def _hear(self, number: int, output: SequenceOutput) -> None:
        """Listener of the n-th engine request. Errors are raised by the next `deltas`."""
        if self._news.has_failed:
            return
        try:
            self._take(number, output)
        except Exception as error:
            self._news.fail(error)

    def _take(self, number: int, output: SequenceOutput) -> None:
        """Take an output of the n-th engine request. Raises RequestError for a bad end."""
        choice = self.choices[number * self.request.sampling.n + output.index]
        if choice.finish is not None:  # computed by the core before it was told of a stop string
            return
        if output.finish in ("error", "deadline", "abort"):
            choice.finish = output.finish
            self._metrics.finished.labels(output.finish).inc()
            raise _bad_end(output.error, output.finish)
        self._take_prompt_facts(number, output)
        is_first = not choice.is_shown
        delta = self._accept(choice, output)
        if delta is not None:
            # The first may be long, as it contains an echoed prompt.
            ends_wait = is_first or choice.finish is not None or output.prompt_logprobs is not None
            self._news.put((choice, delta), ends_wait=ends_wait)
        if choice.finish is not None:
            self._submit_next()

    def _accept(self, choice: Choice, output: SequenceOutput) -> ChoiceDelta | None:
        if output.tokens:
            self._observe_tokens(choice, output)
        delta = choice.accept(output)
        if choice.finish is not None:
            self._end_choice(choice, by_core=output.finish is not None)
        return delta

    def _take_prompt_facts(self, number: int, output: SequenceOutput) -> None:
        """Keep what comes once per prompt."""
        if output.prompt_logprobs is not None:
            self.echoes[number].logprobs = output.prompt_logprobs
        if output.embedding is not None:
            self.embeddings[number] = _cut(output.embedding, self.request.dimensions)
        if output.index == 0 and output.cached_tokens:
            self._metrics.cached_tokens.inc(output.cached_tokens - self.cached_tokens[number])
            self.cached_tokens[number] = output.cached_tokens

    def _observe_tokens(self, choice: Choice, output: SequenceOutput) -> None:
        """Charge new tokens to the key, and measure latencies."""
        if self._context.spending is not None:
            self._context.spending.spend(len(output.tokens))
        now = time.monotonic()
        if not choice.tokens_at:
            choice.first_at = now
            choice.queued_s, choice.prefill_s = output.queued_s, output.prefill_s
        if not self._context.background:
            self._observe_times(choice, output, now)
        choice.tokens_at = now

    def _observe_times(self, choice: Choice, output: SequenceOutput, now: float) -> None:
        """Measure time to first token and time between tokens."""
        if choice.tokens_at:
            self._metrics.itl.observe((now - choice.tokens_at) / len(output.tokens))
        else:
            self._metrics.ttft.observe(now - self._context.started)
            if output.queued_s is not None:
                self._metrics.queue.observe(output.queued_s)

    def _end_choice(self, choice: Choice, *, by_core: bool) -> None:
        """Charge and count a complete choice. by_core: else it ended by a stop string, and the core
        is told to abort it.
        """
        if not by_core:
            self._client.abort(choice.engine_request.id, choice.sequence, "stop")
        self._quotas.observe(
            choice.engine_request,
            self._context.tenant,
            choice.n_tokens,
            by_itself=choice.finish == "stop",
        )
        self._metrics.finished.labels(choice.finish).inc()
        self._metrics.output_lengths.observe(choice.n_tokens)
        if not self._context.background:
            self._observe_whole_time(choice)

    def _observe_whole_time(self, choice: Choice) -> None:
        """Measure the time from arrival to end, and its part after boarding."""
        whole_s = time.monotonic() - self._context.started
        self._metrics.e2e.observe(whole_s)
        if choice.queued_s is not None:
            self._metrics.work.observe(max(0.0, whole_s - choice.queued_s))

    def _end_with(self, error: Exception) -> None:
        """Abort the engine's work; the next `deltas` raises the error."""
        self._news.fail(error)
        for request in self.request.engine_requests[: self._n_submitted]:
            self._client.abort(request.id)

    def _end(self) -> None:
        """Abort open engine requests, and ignore further outputs."""
        self._context.end = None
        self._context.completion_tokens = self.completion_tokens
        self._metrics.generated_tokens.inc(self._context.completion_tokens)
        for number, request in enumerate(self.request.engine_requests[: self._n_submitted]):
            still_open = sum(each.prompt == number and each.finish is None for each in self.choices)
            if still_open:
                self._client.abort(request.id)
                self._metrics.finished.labels("abort").inc(still_open)
            self._client.forget(request.id)
        self._news.close()
        self._charged.close()


def _cut(vector: bytes, dimensions: int | None) -> bytes:
    """A float32 vector cut to its first numbers and normalised; unchanged if not cut."""
    whole = np.frombuffer(vector, np.float32)
    if dimensions is None or dimensions >= whole.size:
        return vector
    numbers = whole[:dimensions]
    length = float(np.linalg.norm(numbers))
    return (numbers / length if length else numbers).astype(np.float32).tobytes()


def _bad_end(error: ErrorInfo | None, finish: str) -> RequestError:
    """The error of a request whose sequence ended badly."""
    if error is not None:
        return RequestError.from_info(error)
    code, message = _BAD_ENDS.get(finish, _NO_REASON)
    return RequestError(message, code=code)
