"""Cascades: a small model answers, and a large one if the small model's confidence is too low.

The confidence comes from the log-probabilities of the answer's own tokens. `jitney cascade tune`
finds the threshold.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Literal

from pydantic import Field

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict
from jitney.engine.config import Section
from jitney.engine.fleet.compositions.answering import (
    Answering,
    ModelAnswer,
    ModelStream,
    Part,
    marked,
    total_usage,
)
from jitney.engine.fleet.compositions.body_checks import refuse_fields, refuse_token_ids
from jitney.engine.fleet.request import ProxiedRequest
from jitney.engine.server import HttpError

_MeasureName = Literal["mean", "least"]


@dataclass(frozen=True, slots=True)
class Measure:
    """Computes an answer's confidence, 0 to 1, from the log-probabilities of its tokens: their
    geometric mean probability over all tokens (mean), or over the least likely `window` consecutive
    tokens (least).
    """

    name: _MeasureName
    window: int = 1

    def of(self, logprobs: Sequence[float]) -> float:
        """Confidence of one answer; 0 for an answer without tokens."""
        if not logprobs:
            return 0.0
        if self.name == "mean":
            return math.exp(sum(logprobs) / len(logprobs))
        return math.exp(_least_mean(logprobs, min(self.window, len(logprobs))))

    def confidence(self, choices: Sequence[Sequence[float]]) -> float:
        """Confidence of the least certain choice. choices: each one's token log-probabilities."""
        return min(map(self.of, choices), default=0.0)

    def __str__(self) -> str:
        return self.name if self.name == "mean" else f"least of {self.window}"


def _least_mean(values: Sequence[float], window: int) -> float:
    sums = [0.0, *accumulate(values)]
    return min(sums[end] - sums[end - window] for end in range(window, len(sums))) / window


class CascadeSettings(Section):
    """`kind = "cascade"` in fleet.toml."""

    kind: Literal["cascade"] = Field(
        description="a small model answers, and a large one where the small was not sure"
    )
    small: str = Field(description="name of the model of the fleet that is asked first")
    large: str = Field(description="name of the one that is asked where the first was not sure")
    threshold: float = Field(
        ge=0, le=1, description="least confidence of the small model's answers that are sent"
    )
    measure: _MeasureName = Field(
        default="least",
        description=(
            "what its confidence is: the probability of its tokens, as the geometric mean of the "
            "unlikeliest `window` tokens in a row (least), or of all (mean)"
        ),
    )
    window: int = Field(default=8, ge=1, le=4096, description="tokens of measure = least")

    @property
    def parts(self) -> list[str]:
        """Names of the models that it uses."""
        return [self.small, self.large]

    @property
    def scoring(self) -> list[str]:
        """Names of the models that must score or embed texts: none."""
        return []


@dataclass(slots=True)
class _Try:
    #: The small model's answer; None if it failed.
    answer: ModelAnswer | None
    #: Confidence, 0 to 1; 0 if the small model failed.
    confidence: float
    #: Reason of the failure.
    error: str | None = None


class Cascade:
    """A composed model of a small and a large one. models: answers for both."""

    def __init__(self, settings: CascadeSettings, models: Answering):
        self._settings = settings
        self._models = models
        self._measure = Measure(settings.measure, settings.window)
        self._small = Part("small", settings.small)
        self._large = Part("large", settings.large)

    @staticmethod
    def check(request: ProxiedRequest) -> None:
        """Raise RequestError that names the field, for requests that no cascade supports."""
        refuse_token_ids(request)
        why = "the prompt's log-probabilities would count as its answer's"
        refuse_fields(request, ["echo"], why)

    async def seats(self) -> int | None:
        """The seats of the smaller batch: in the worst case every request needs both models."""
        seat_counts = [await self._models.seats(name) for name in self._settings.parts]
        return min((seats for seats in seat_counts if seats is not None), default=None)

    async def answer(self, request: ProxiedRequest) -> ModelAnswer:
        """Answer by the small or the large model. Raises HttpError, RequestError."""
        tried = await self._try_small(request)
        if self._trusts(tried):
            return self._small_answer(request, tried)
        with self._large.refusing(request.fields):
            answer = await self._models.answer(request.to(self._large.model))
        return self._answer_of(self._large, answer, self._usage(tried, answer.usage), tried)

    @asynccontextmanager
    async def stream(self, request: ProxiedRequest) -> AsyncIterator[ModelStream]:
        """The answer's stream. It begins once the small answer is complete: no part of it is sent
        before its confidence is known. Raises HttpError, RequestError.
        """
        tried = await self._try_small(request)
        if self._trusts(tried):
            answer = self._small_answer(request, tried)
            yield ModelStream(answer.chunks(request), answer.headers)
            return
        to_large = request.to(self._large.model)
        with self._large.refusing(request.fields):
            async with self._models.stream(to_large) as stream:
                headers = self._large.headers(stream.headers)
                report, usage = self._told(self._large, tried), partial(self._usage, tried)
                yield ModelStream(self._large.chunks(stream, report, usage), headers)

    async def _try_small(self, request: ProxiedRequest) -> _Try:
        """Ask the small model. Raises RequestError for requests that no cascade supports."""
        self.check(request)
        to_small = request.whole(self._small.model, **request.asking_logprobs)
        try:
            answer = await self._models.answer(to_small)
        except (HttpError, RequestError) as error:
            return _Try(None, 0.0, str(error))
        return _Try(answer, self._measure.confidence(answer.logprobs))

    def _trusts(self, tried: _Try) -> bool:
        return tried.answer is not None and tried.confidence >= self._settings.threshold

    def _small_answer(self, request: ProxiedRequest, tried: _Try) -> ModelAnswer:
        answer = tried.answer
        assert answer is not None
        answer.hide_logprobs(request)
        return self._answer_of(self._small, answer, self._usage(tried), tried)

    def _answer_of(
        self, part: Part, answer: ModelAnswer, usage: JsonDict, tried: _Try
    ) -> ModelAnswer:
        body = answer.body | {"usage": usage}
        return ModelAnswer(marked(body, self._told(part, tried)), part.headers(answer.headers))

    def _told(self, part: Part, tried: _Try) -> JsonDict:
        """The cascade's report in an answer. part: the model that answers."""
        report: JsonDict = {
            "kind": "cascade",
            "stage": part.stage,
            "confidence": tried.confidence,
            "threshold": self._settings.threshold,
        }
        if tried.error is not None:
            report["left_out"] = [{"stage": self._small.stage, "reason": tried.error}]
        return report

    def _usage(self, tried: _Try, of_large: JsonDict | None = None) -> JsonDict:
        small = [] if tried.answer is None else self._small.usage(tried.answer.usage)
        large = [] if of_large is None else self._large.usage(of_large)
        return total_usage([*small, *large])
