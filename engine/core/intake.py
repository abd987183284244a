"""The intake holds requests until their adapters and grammars are ready, then passes them to the
scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jitney.engine.common.errors import ErrorInfo, RequestError
from jitney.engine.common.messages import AdaptersSet, SetAdapters
from jitney.engine.common.outputs import FinishReason, SequenceOutput
from jitney.engine.common.requests import REQUEST_MOST, EngineRequest
from jitney.engine.core.held_request import HeldRequest
from jitney.engine.core.scheduler.sequence import Matcher

if TYPE_CHECKING:
    from jitney.engine.core.adapter_manager import AdapterManager
    from jitney.engine.core.grammar.manager import GrammarManager
    from jitney.engine.core.scheduler.scheduler import Scheduler

_log = logging.getLogger("jitney.core")

_NO_GRAMMARS = ErrorInfo(
    "unsupported_parameter", "this engine cannot hold an answer to a grammar", "structured_outputs"
)
_NO_ADAPTERS = ErrorInfo(
    "invalid_value",
    "adapters: this engine was started without any, and without room for some; give adapter_room "
    "at the start",
)


@dataclass(eq=False)
class Intake:
    """Requests that wait for an adapter or a grammar, and refusals."""

    scheduler: Scheduler
    #: Grammar manager; None until the tokenizer is known, see `learn`.
    grammars: GrammarManager | None = None
    #: Adapter manager; None if the engine has no adapters and no room for any.
    adapters: AdapterManager | None = None
    #: Terminal outputs of refused requests, for the next report.
    rejected: list[SequenceOutput] = field(default_factory=list[SequenceOutput])

    @property
    def is_busy(self) -> bool:
        """Whether grammars are being compiled, or adapters are being loaded."""
        if self.grammars is not None and self.grammars.waiting:
            return True
        return self.adapters is not None and self.adapters.is_busy

    @property
    def open_adapters(self) -> set[int]:
        """Numbers of the adapters that open requests ask for."""
        waiting = set[int]() if self.grammars is None else self.grammars.waiting_adapters
        return self.scheduler.open_adapters | waiting

    def learn(self, tokenizer: str) -> None:
        """Enable grammars. tokenizer: the model's tokenizer, as JSON of the `tokenizers` library.
        Takes half a second for 50,000 tokens.
        """
        from jitney.engine.core.grammar.manager import GrammarManager

        factory = self.scheduler.factory
        try:
            self.grammars = GrammarManager.open(
                tokenizer, factory.request_limits.vocab_size, factory.eos_ids
            )
        except ValueError as error:
            _log.warning("no answer can be held to a grammar: %s", error)

    def set_adapters(self, message: SetAdapters, *, asleep: bool) -> AdaptersSet | None:
        """Change the served adapters. -> the answer if it is known at once; else a later report
        contains it.
        """
        if self.adapters is None:
            return AdaptersSet(message.ticket, _NO_ADAPTERS)
        if asleep:
            error = ErrorInfo("sleeping", "adapters: the engine is asleep; POST /wake_up wakes it")
            return AdaptersSet(message.ticket, error)
        self.adapters.ask(message)
        return None

    def add(self, request: EngineRequest) -> None:
        """Accept a request; a refusal becomes one terminal output per sequence."""
        if self.adapters is not None and request.adapter:
            request = self.adapters.current(request)
            refusal = self.adapters.refusal(request)
            if refusal is not None:
                self._reject(request, refusal)
                return
            if self.adapters.hold(request):
                return
        self._add_loaded(request)

    def _add_loaded(self, request: EngineRequest) -> None:
        """Continue with a request whose adapter is loaded."""
        sampling = request.sampling
        if self.grammars is None and (sampling.grammar is not None or sampling.constrained):
            self._reject(request, _NO_GRAMMARS)
        elif self.grammars is None or sampling.grammar is None:
            self._schedule(request)
        else:
            self.grammars.enter(request)
            self.add_compiled()

    def add_compiled(self) -> None:
        """Continue with requests whose grammars are compiled."""
        if self.grammars is None:
            return
        for entry, new_matcher, error in self.grammars.leave():
            if error is not None:
                self._reject(entry.request, error)
            elif new_matcher is None:
                self._end_before(entry)
            else:
                self._schedule(entry.request, new_matcher)
                for index, reason in entry.ended.items():
                    self.scheduler.abort(entry.request.id, index, reason)

    def tend_adapters(self, open_adapters: Callable[[], set[int]]) -> set[int]:
        """Continue a change of adapters, and the requests whose adapters are loaded now.
        open_adapters: returns the adapter numbers that open requests use. -> numbers of the served
        adapters; empty if no change is under way.
        """
        if self.adapters is None or not self.adapters.is_busy:
            return set()
        for entry in self.adapters.tend(open_adapters):
            if entry.is_over:
                self._end_before(entry)
                continue
            self._add_loaded(entry.request)
            for index, reason in entry.ended.items():
                self.abort(entry.request.id, index, reason)
        return self.adapters.numbers

    def _schedule(
        self, request: EngineRequest, new_matcher: Callable[[], Matcher] | None = None
    ) -> None:
        if self.grammars is not None and request.sampling.constrained:
            new_matcher = self.grammars.constrained(request.sampling, new_matcher)
        try:
            self.scheduler.add(request, new_matcher)
        except RequestError as error:
            self._reject(request, error.info)

    def _end_before(self, entry: HeldRequest) -> None:
        """End a request whose sequences were all ended before it reached the scheduler."""
        self.rejected += [
            SequenceOutput(entry.request.id, index, finish=reason)
            for index, reason in sorted(entry.ended.items())
        ]

    def take_rejected(self) -> list[SequenceOutput]:
        """The outputs of refused requests since the last call."""
        rejected, self.rejected = self.rejected, []
        return rejected

    def _reject(self, request: EngineRequest, error: ErrorInfo) -> None:
        # The request may have been refused because of n itself.
        for index in range(min(max(1, request.sampling.n), REQUEST_MOST.n)):
            self.rejected.append(SequenceOutput(request.id, index, finish="error", error=error))

    def abort(self, request_id: str, index: int | None, reason: FinishReason) -> None:
        """End a request (index None) or one of its sequences, wherever it is."""
        held = [] if self.adapters is None else [*self.adapters.waiting]
        if self.grammars is not None:
            held += self.grammars.waiting
        for entry in held:
            if entry.request.id == request_id:
                indices = range(entry.request.sampling.n) if index is None else (index,)
                for number in indices:
                    entry.ended.setdefault(number, reason)
        self.scheduler.abort(request_id, index, reason)
