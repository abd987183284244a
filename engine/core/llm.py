"""The offline Python API: the engine core in this process, run by the caller's thread."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jitney.engine.common import messages
from jitney.engine.common.display import make_display
from jitney.engine.common.errors import ConfigError, ErrorInfo, RequestError
from jitney.engine.common.outputs import SequenceOutput, TokenLogprobs
from jitney.engine.common.platforms import check_platform
from jitney.engine.common.requests import EngineRequest, Grammar, JsonDict, SamplingParams
from jitney.engine.config import Config, ResolvedConfig
from jitney.engine.core.executor.fits import check_fits
from jitney.engine.core.text.detokenizer import TextDelta, TextStream
from jitney.engine.core.text.tokenizer import Tokenizer
from jitney.engine.core.weights.checkpoints.sources import ModelSource

if TYPE_CHECKING:
    from jitney.engine.core.executor.program_memory import ProgramsMemory

_Prompt = str | Sequence[int]


@dataclass(slots=True)
class Completion:
    """One of a request's n sequences."""

    #: From 0.
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    #: One per token; None if not requested.
    logprobs: list[TokenLogprobs] | None = None
    #: stop | length | error
    finish_reason: str | None = None
    #: The stop string that ended it, if any.
    stop: str | None = None


@dataclass(slots=True)
class _RequestOutput:
    """The answer to one prompt."""

    prompt_ids: list[int]
    outputs: list[Completion]
    #: One per token, None for the first; None if not requested.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    #: Prompt tokens whose KV came from the prefix cache.
    cached_tokens: int = 0
    #: Why it failed while running, if it did; the completions are then incomplete.
    error: ErrorInfo | None = None


@dataclass(slots=True)
class _Running:
    """A request in the core, and the texts of its sequences."""

    answer: _RequestOutput
    streams: list[TextStream]

    @property
    def done(self) -> bool:
        return all(completion.finish_reason for completion in self.answer.outputs)


class LLM:
    """A model and an engine in this process.

    model: as for `jitney serve --model`, or a Config. settings: any setting by its flag's name, as
    in `LLM("smollm2-135m", max_seats=8, dtype="float32")`. Raises ConfigError or ModelError.
    """

    def __init__(
        self,
        model: str | Config = "smollm2-135m",
        *,
        progress: Callable[[messages.Progress], None] | None = None,
        **settings: Any,
    ):
        if isinstance(model, Config):
            config = model
        else:
            config = ResolvedConfig.load(flags={"model": model, **settings}).config
        if config.engine.n_hosts > 1 or config.engine.data_parallel > 1:
            raise ConfigError("n_hosts: only jitney serve runs an engine over several hosts")
        os.environ.update(config.engine.jax_environment)
        check_platform(config.engine.platform)
        # Imports jax, which reads the environment set above.
        from jitney.engine.core.build import build_engine
        from jitney.engine.core.jax_start import start_jax

        on_progress = progress or _ignore
        start_jax(config)  # before fetching the model, in case the platform does not start

        def report(stage: str, done: int, total: int, detail: str) -> None:
            on_progress(messages.Progress(stage, done, total, detail))

        source = ModelSource.of(config, report)
        check_fits(config, source.config)
        self.tokenizer = Tokenizer.load(source, config.model.chat_template)
        self.core, self.info = build_engine(config, source, on_progress)
        # A call hands over all its prompts before the first step.
        self.core.scheduler.boarding.more_to_come = False
        self._numbers = itertools.count()
        self._running: dict[str, _Running] = {}

    def generate(
        self,
        prompts: _Prompt | Sequence[_Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str] = "",
    ) -> list[_RequestOutput]:
        """Complete prompts (text, or token ids) together; one output per prompt, in order.

        params: one for all, or one per prompt; None: the model's defaults (`default_params`).
        adapter: a name for all, or one per prompt; "": none. Raises RequestError, before anything
        runs, for the first invalid prompt or field. A request that fails while running has
        finish_reason "error" and its output's `error`; the others are answered. An interrupt ends
        all requests.
        """
        requests = self._requests(_as_prompts(prompts), params, adapter)
        answers: list[_RequestOutput] = []
        waiting = deque(requests)
        try:
            while waiting or self.core.has_work:
                while waiting and self._may_submit(waiting[0]):
                    answers.append(self._submit(waiting.popleft()))
                self._step()
        except BaseException:
            self._abort([request.id for request in requests])
            raise
        return answers

    def _requests(
        self,
        prompts: list[_Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str | Sequence[str],
    ) -> list[EngineRequest]:
        count = len(prompts)
        each = params or self.default_params()
        each = [each] * count if isinstance(each, SamplingParams) else each
        adapters = [adapter] * count if isinstance(adapter, str) else adapter
        if len(each) != count:
            raise RequestError(f"{count} prompts but {len(each)} sampling params", param="params")
        if len(adapters) != count:
            raise RequestError(f"{count} prompts but {len(adapters)} adapters", param="adapter")
        return list(map(self._request, prompts, each, adapters))

    def _may_submit(self, request: EngineRequest) -> bool:
        """Whether the core has room for the request; it always has room for a single one."""
        return not self._running or self.core.scheduler.has_room(request)

    def default_params(self) -> SamplingParams:
        """The model's defaults, by `generation_config` and the settings of [sampling]. They do not
        apply to parameters of the caller, whose defaults are those of SamplingParams.
        """
        return SamplingParams(**SamplingParams.fields_with(self.info.model.sampling_defaults, {}))

    def chat(
        self,
        messages: list[JsonDict] | list[list[JsonDict]],
        params: SamplingParams | None = None,
        *,
        adapter: str = "",
    ) -> list[_RequestOutput]:
        """Answer one or several conversations, with messages as in the chat completions API.
        adapter: see `generate`.
        """
        conversations: Any = messages
        if messages and isinstance(messages[0], dict):
            conversations = [messages]
        prompts = [self.chat_ids(conversation) for conversation in conversations]
        return self.generate(prompts, params, adapter=adapter)

    def chat_ids(self, messages: list[JsonDict]) -> list[int]:
        """The prompt ids of a conversation, by the model's template."""
        return self.tokenizer.encode(
            self.tokenizer.apply_chat_template(messages), add_special_tokens=False
        )

    def stream(
        self, prompt: _Prompt, params: SamplingParams | None = None, *, adapter: str = ""
    ) -> Iterator[str]:
        """Yield the text of one completion (n = 1) as it is generated; closing the iterator ends
        the request. adapter: see `generate`.
        """
        params = params or self.default_params()
        if params.n != 1:
            raise RequestError("stream yields one sequence: n must be 1", param="n")
        request = self._request(prompt, params, adapter)
        answer = self._submit(request)
        sent = 0
        try:
            while request.id in self._running:
                self._step()
                if answer.error is not None:
                    raise RequestError.from_info(answer.error)
                text = answer.outputs[0].text
                if len(text) > sent:
                    yield text[sent:]
                    sent = len(text)
        finally:
            self._abort([request.id])

    def program_memory(self) -> ProgramsMemory:
        """Memory of the compiled steps on each device."""
        from jitney.engine.core.executor.runner import Runner

        assert isinstance(self.core.runner, Runner)  # as `build_engine` makes it
        return self.core.runner.programs.memory()

    def close(self) -> None:
        """Free weights, pages and compiled programs."""
        del self.core

    def _request(self, prompt: _Prompt, params: SamplingParams, adapter: str = "") -> EngineRequest:
        """A checked request. Raises RequestError."""
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt)
        request = EngineRequest(
            id=f"llm-{next(self._numbers)}",
            prompt=list(prompt),
            sampling=params,
            arrival=time.monotonic(),
            adapter=self.info.model.number_of(adapter) if adapter else 0,
        )
        self.core.scheduler.factory.check(request)
        if params.grammar is not None or params.constrained:
            self._learn()
        if params.grammar is not None:
            self._check_grammar(params.grammar)
        return request

    def _learn(self) -> None:
        """Give the core the tokenizer for grammars. Raises RequestError if it supports none."""
        if self.core.intake.grammars is None:
            self.core.learn(self.tokenizer.json)
        if self.core.intake.grammars is None:
            raise RequestError("this model's tokenizer supports no grammars", param="grammar")

    def _check_grammar(self, grammar: Grammar) -> None:
        """Compile a grammar. Raises RequestError if it cannot be used."""
        assert self.core.intake.grammars is not None  # `_learn` has seen to it
        try:
            self.core.intake.grammars.check(grammar)
        except RequestError as error:
            raise error.blaming("grammar") from None

    def _submit(self, request: EngineRequest) -> _RequestOutput:
        params = request.sampling
        running = _Running(_RequestOutput(request.prompt, []), [])
        for index in range(params.n):
            completion = Completion(index)
            if params.logprobs is not None:
                completion.logprobs = []
            running.answer.outputs.append(completion)
            running.streams.append(TextStream(self.tokenizer, params, request.prompt))
        self._running[request.id] = running
        self.core.add(request)
        return running.answer

    def _abort(self, ids: Sequence[str]) -> None:
        """End these requests. If no others run, step until the device is idle, since a row past
        the end may be in flight.
        """
        for request_id in ids:
            if self._running.pop(request_id, None) is not None:
                self.core.abort(request_id, None, "abort")
        while self.core.has_work and not self._running:
            self._step()

    def _step(self) -> None:
        """Run one step and add its outputs to the answers."""
        for output in self.core.step().outputs:
            running = self._running.get(output.request_id)
            if running is None:
                continue
            if output.error is not None:
                running.answer.error = output.error
                running.answer.outputs[output.index].finish_reason = "error"
            else:
                self._take(running, output)
            if running.done:
                del self._running[output.request_id]

    def _take(self, running: _Running, output: SequenceOutput) -> None:
        """Add an output to its answer; a stop string ends the sequence in the core."""
        answer = running.answer
        completion = answer.outputs[output.index]
        if completion.finish_reason is not None:
            return  # a stop string was found while these tokens were in flight
        answer.cached_tokens = max(answer.cached_tokens, output.cached_tokens)
        if output.prompt_logprobs is not None:
            answer.prompt_logprobs = list(output.prompt_logprobs)
        delta = running.streams[output.index].push(
            output.tokens, final=output.finish is not None, stop_token=output.stop_token
        )
        _extend(completion, output, delta)
        if delta.stopped and output.finish is None:
            self.core.abort(output.request_id, output.index, "stop")


def _extend(completion: Completion, output: SequenceOutput, delta: TextDelta) -> None:
    completion.text += delta.text
    completion.token_ids += output.tokens[: delta.tokens]
    if completion.logprobs is not None and output.logprobs:
        completion.logprobs += output.logprobs[: delta.tokens]
    completion.finish_reason = output.finish
    if delta.stopped:
        completion.finish_reason = "stop"
        completion.stop = delta.stop


def _ignore(progress: messages.Progress) -> None:
    pass


def _as_prompts(prompts: _Prompt | Sequence[_Prompt]) -> list[_Prompt]:
    """One prompt (text or ids) or many -> many."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def load_llm(config: Config) -> LLM:
    """An engine in this process; shows the progress of loading."""
    display = make_display()
    try:
        return LLM(config, progress=display.progress)
    finally:
        display.close()
