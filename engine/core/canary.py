"""The canary: computes some requests again, alone, with the reference kernels, while serving.

The proof at the start checks kernels on random inputs; the canary checks answers. It compares each
generated token's log-probability with the reference's for the same token after the same text, which
works for greedy and for sampled answers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from jitney.engine.common.errors import RequestError
from jitney.engine.common.messages import CanaryFinding, StepReport
from jitney.engine.common.outputs import FinishReason, SequenceOutput, TokenLogprobs
from jitney.engine.common.requests import EngineRequest, SamplingParams
from jitney.engine.core.engine_core import EngineCore

_log = logging.getLogger("jitney.core")

#: Most sequences watched or waiting to be computed again; others are skipped.
_MOST_WAITING = 4


@dataclass(slots=True)
class _Watched:
    """A sequence that is served now and will be computed again."""

    request: EngineRequest  # as the client sent it
    wants_logprobs: bool  # the client asked for log-probabilities
    tokens: list[int] = field(default_factory=list)  # generated so far
    logprobs: list[float] = field(default_factory=list)  # of each token, natural log
    too_long: bool = False  # too long to be computed again; its tokens are dropped


@dataclass(eq=False, kw_only=True)
class CanaryCore(EngineCore):
    """An engine core whose answers a second core checks."""

    #: A core of one seat with the reference kernels and the same weights, without a prefix cache.
    #: It runs a step after each step of this one.
    alone: EngineCore
    #: One in this many requests is watched.
    every: int
    #: Largest difference of log-probabilities that rounding explains.
    limit: float
    _added: int = 0
    #: The next suitable request will be watched.
    _is_due: bool = False
    #: Request id -> sequence: being served, and being computed again.
    _watched: dict[str, _Watched] = field(default_factory=dict)
    _waiting: dict[str, _Watched] = field(default_factory=dict)

    @property
    def has_work(self) -> bool:
        return super().has_work or self.alone.has_work

    @property
    def pause_s(self) -> float:
        if self.alone.has_work:
            return 0.0
        return super().pause_s

    @property
    def late_plan_slack_s(self) -> float:
        if self.alone.has_work:
            return 0.0
        return super().late_plan_slack_s

    def add(self, request: EngineRequest) -> None:
        if self.intake.adapters is not None:
            request = self.intake.adapters.current(request)
        super().add(self._chosen(request))

    @property
    def open_adapters(self) -> set[int]:
        watched = {watched.request.adapter for watched in self._watched.values()}
        return super().open_adapters | self.alone.open_adapters | watched

    def serve_adapters(self, numbers: set[int]) -> None:
        super().serve_adapters(numbers)
        self.alone.serve_adapters(numbers)

    def sleep(self, alive: Callable[[], None]) -> int:
        """Refused: the canary's state and the shared weights would stay in memory."""
        raise RequestError(
            "an engine that checks itself (canary_every) does not sleep",
            code="unsupported_parameter",
        )

    def _chosen(self, request: EngineRequest) -> EngineRequest:
        """The request, with log-probabilities if it will be watched."""
        if request.pooling is not None:
            return request  # it generates no token
        self._added += 1
        self._is_due |= self._added % self.every == 0
        if not self._is_due or not self._can_watch(request):
            return request
        self._is_due = False
        sampling = request.sampling
        wants_logprobs = sampling.logprobs is not None
        self._watched[request.id] = _Watched(request, wants_logprobs)
        if wants_logprobs:
            return request
        with_logprobs = msgspec.structs.replace(sampling, logprobs=0)
        return msgspec.structs.replace(request, sampling=with_logprobs)

    def _can_watch(self, request: EngineRequest) -> bool:
        """Whether the request can be computed again. Without max_tokens it is watched until it is
        too long.
        """
        if len(self._waiting) + len(self._watched) >= _MOST_WAITING:
            return False
        sampling = request.sampling
        longest = len(request.prompt) + (sampling.max_tokens or 0)
        return request.resumed is None and sampling.n == 1 and self._has_room(longest)

    def _has_room(self, n_tokens: int) -> bool:
        """Whether `n_tokens` can be scored, which needs room for one more."""
        return n_tokens < self.alone.scheduler.limits.context_length

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = "abort"
    ) -> None:
        if reason != "stop":  # with a stop string the answer is complete
            self._watched.pop(request_id, None)
        super().abort(request_id, index, reason)

    def step(self) -> StepReport:
        report = self._noted_in(super().step())
        if self.alone.has_work:
            for output in self.alone.step().outputs:
                report.canary.extend(self._compared(output))
        return report

    def report_ended(self) -> StepReport | None:
        report = super().report_ended()
        return None if report is None else self._noted_in(report)

    def _noted_in(self, report: StepReport) -> StepReport:
        """Record the outputs of watched sequences in a report."""
        if self._watched:
            report.outputs[:] = [self._noted(output) for output in report.outputs]
        return report

    def _noted(self, output: SequenceOutput) -> SequenceOutput:
        """Record the output of a watched sequence; returns it as the client requested it."""
        watched = self._watched.get(output.request_id)
        if watched is None:
            return output
        self._keep(watched, output)
        if output.finish is not None:
            del self._watched[output.request_id]
            if output.error is None and watched.tokens:
                self._compute_again(watched)
        if watched.wants_logprobs:
            return output
        return msgspec.structs.replace(output, logprobs=None)

    def _keep(self, watched: _Watched, output: SequenceOutput) -> None:
        """Add the output to the watched sequence, unless it is too long."""
        length = len(watched.request.prompt) + len(watched.tokens) + len(output.tokens)
        watched.too_long |= not self._has_room(length)
        if watched.too_long:
            watched.tokens, watched.logprobs = [], []
        else:
            watched.tokens += output.tokens
            watched.logprobs += [entry.logprob for entry in output.logprobs or ()]

    def _compute_again(self, watched: _Watched) -> None:
        request = EngineRequest(
            id=watched.request.id,
            prompt=watched.request.prompt + watched.tokens,
            sampling=SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0),
            arrival=self.clock(),
            adapter=watched.request.adapter,
        )
        self._waiting[request.id] = watched
        self.alone.add(request)

    def _compared(self, output: SequenceOutput) -> list[CanaryFinding]:
        """Compare a sequence once the second core has scored it."""
        watched = self._waiting.get(output.request_id)
        if watched is None or (output.finish is None and output.prompt_logprobs is None):
            return []
        del self._waiting[output.request_id]
        if output.prompt_logprobs is None:
            _log.error(
                "canary: %s could not be computed again: %s", output.request_id, output.error
            )
            return [CanaryFinding(math.inf, False)]
        scored = list(output.prompt_logprobs)[len(watched.request.prompt) :]
        apart = _largest_difference(watched.logprobs, scored)
        if apart > self.limit:
            _log.error(
                "CANARY: request %s was answered with log-probabilities %.3g away from the "
                "reference's; rounding explains %g",
                output.request_id,
                apart,
                self.limit,
            )
        return [CanaryFinding(apart, apart <= self.limit)]

    def check(self) -> None:
        super().check()
        self.alone.check()


def _largest_difference(served: list[float], scored: list[TokenLogprobs | None]) -> float:
    apart = 0.0
    for own, entry in zip(served, scored, strict=True):
        assert entry is not None  # only a prompt's first token has none
        difference = abs(own - entry.logprob)
        if math.isnan(difference) and own != entry.logprob:
            return math.inf
        apart = max(apart, difference)
    return apart
