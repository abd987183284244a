"""A small model answers; where it was not sure enough of its answer, a large one does.

How sure it was is read from the log-probabilities of its own tokens; `jitney cascade tune` finds
the threshold.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from jitney.engine.api.errors import HttpError
from jitney.engine.config.schema import Section
from jitney.engine.errors import RequestError
from jitney.engine.fleet.answering import (
    MADE_FIELD,
    Answering,
    ModelAnswer,
    ModelStream,
    Question,
    chunks_of,
    made,
    name_error,
    named,
    refuse_field,
    refuse_token_ids,
    stage_header,
    stage_usage,
    total_usage,
)
from jitney.engine.fleet.confidence import (
    Measure,
    MeasureName,
    asking_logprobs,
    confidence_of,
    hide_logprobs,
)
from jitney.engine.types import JsonDict

_SMALL, _LARGE = "small", "large"


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
    measure: MeasureName = Field(
        default="least",
        description=(
            "what its confidence is: the probability of its tokens, as the geometric mean of the "
            "unlikeliest `window` tokens in a row (least), or of all (mean)"
        ),
    )
    window: int = Field(default=8, ge=1, le=4096, description="tokens of measure = least")

    @property
    def parts(self) -> list[str]:
        """Models that it is made of."""
        return [self.small, self.large]

    @property
    def scoring(self) -> list[str]:
        """Those that must score texts."""
        return []


@dataclass(slots=True)
class _Try:
    """What came of the small model."""

    #: None if it failed.
    answer: ModelAnswer | None
    #: 0 if it failed.
    confidence: float
    #: Why it failed.
    error: str | None = None


def refuse_what_no_cascade_can(question: Question) -> None:
    """Raises RequestError that names the field."""
    body = question.checked()
    refuse_token_ids(question, body)
    refuse_field(body, "echo", "the prompt's log-probabilities would count as its answer's")


class Cascade:
    """One model made of two. models: who answers for both."""

    def __init__(self, settings: CascadeSettings, models: Answering):
        self._settings = settings
        self._models = models
        self._measure = Measure(settings.measure, settings.window)

    async def start(self) -> None:
        """Nothing of its own runs."""

    async def close(self) -> None:
        """Nothing of its own runs."""

    async def seats(self) -> int | None:
        """Those of the smaller batch: in the worst case every request needs both."""
        known = [await self._models.seats(name) for name in self._settings.parts]
        return min((seats for seats in known if seats is not None), default=None)

    async def answer(self, question: Question) -> ModelAnswer:
        """Raises HttpError, RequestError."""
        tried = await self._try_small(question)
        if self._trusts(tried):
            return self._small_answer(question, tried)
        try:
            answer = await self._models.answer(question.to(self._settings.large))
        except (HttpError, RequestError) as error:
            raise named(error, _LARGE, question.body) from error
        self._finish(answer, _LARGE, tried)
        return answer

    @asynccontextmanager
    async def stream(self, question: Question) -> AsyncIterator[ModelStream]:
        """Begins once it is known who answers: nothing of a small answer is sent before it is
        trusted. Raises HttpError, RequestError.
        """
        tried = await self._try_small(question)
        if self._trusts(tried):
            answer = self._small_answer(question, tried)
            yield ModelStream(chunks_of(answer, question), answer.headers)
            return
        asked = question.to(self._settings.large)
        try:
            async with self._models.stream(asked) as stream:
                headers = stage_header(_LARGE, stream.headers)
                yield ModelStream(self._large_chunks(stream, tried), headers)
        except (HttpError, RequestError) as error:
            raise named(error, _LARGE, question.body) from error

    async def _try_small(self, question: Question) -> _Try:
        """Ask the small model. Raises RequestError for what no cascade can do."""
        refuse_what_no_cascade_can(question)
        asked = question.whole(self._settings.small, **asking_logprobs(question))
        try:
            answer = await self._models.answer(asked)
        except (HttpError, RequestError) as error:
            return _Try(None, 0.0, str(error))
        return _Try(answer, confidence_of(answer, self._measure))

    def _trusts(self, tried: _Try) -> bool:
        return tried.answer is not None and tried.confidence >= self._settings.threshold

    def _small_answer(self, question: Question, tried: _Try) -> ModelAnswer:
        answer = tried.answer
        assert answer is not None
        hide_logprobs(answer, question)
        answer.body["usage"] = total_usage(self._small_usage(tried))
        self._mark(answer.body, _SMALL, tried)
        answer.headers = stage_header(_SMALL, answer.headers)
        return answer

    def _finish(self, answer: ModelAnswer, stage: str, tried: _Try) -> None:
        """Say of the large model's answer whose it is, and what it took."""
        answer.body["usage"] = self._usage_with_large(answer.usage, tried)
        self._mark(answer.body, stage, tried)
        answer.headers = stage_header(stage, answer.headers)

    async def _large_chunks(self, stream: ModelStream, tried: _Try) -> AsyncIterator[JsonDict]:
        """The large model's chunks; the first says whose they are."""
        is_first = True
        async for chunk in stream.chunks:
            if "error" in chunk:
                chunk = name_error(chunk, _LARGE)
            elif is_first:
                self._mark(chunk, _LARGE, tried)
                is_first = False
            if chunk.get("usage"):
                chunk["usage"] = self._usage_with_large(chunk["usage"], tried)
            yield chunk

    def _mark(self, body: JsonDict, stage: str, tried: _Try) -> None:
        told: JsonDict = {
            "kind": "cascade",
            "stage": stage,
            "confidence": tried.confidence,
            "threshold": self._settings.threshold,
        }
        if tried.error is not None:
            told["left_out"] = [{"stage": _SMALL, "reason": tried.error}]
        body[MADE_FIELD] = made(told, body)

    def _small_usage(self, tried: _Try) -> list[JsonDict]:
        if tried.answer is None:
            return []
        return stage_usage(_SMALL, self._settings.small, tried.answer.usage)

    def _usage_with_large(self, usage: JsonDict, tried: _Try) -> JsonDict:
        large = stage_usage(_LARGE, self._settings.large, usage)
        return total_usage([*self._small_usage(tried), *large])
