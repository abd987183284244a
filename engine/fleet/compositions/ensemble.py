"""Ensembles: several models answer, or one model several times, and the best answer is sent."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

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
from jitney.engine.fleet.compositions.body_checks import (
    refuse_fields,
    refuse_many,
    refuse_token_ids,
)
from jitney.engine.fleet.compositions.scoring import TextScorer
from jitney.engine.fleet.request import ProxiedRequest
from jitney.engine.server import HttpError

_MOST_MEMBERS = 64
_SEEDS = 1 << 63


class EnsembleSettings(Section):
    """`kind = "ensemble"` in fleet.toml."""

    kind: Literal["ensemble"] = Field(
        description="several models answer at once, or one several times, and the best is sent"
    )
    models: list[str] = Field(
        min_length=1, max_length=_MOST_MEMBERS, description="names of models of the fleet"
    )
    repeats: int = Field(
        default=1,
        ge=1,
        le=_MOST_MEMBERS,
        description="how often each is asked, the later times with other seeds",
    )
    choose: Literal["majority", "score"] = Field(
        default="majority",
        description=(
            "which answer is sent: the one that most give (majority), or the one of the highest "
            "mean log-probability (score)"
        ),
    )
    scorer: str | None = Field(
        default=None,
        description=(
            "name of the model, served by engines, whose log-probabilities decide by choose = "
            "score; empty: each its own"
        ),
    )
    wait_s: float | None = Field(
        default=None,
        gt=0,
        description="seconds after which who has not answered is left out; empty: all are waited "
        "for",
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if len(set(self.models)) < len(self.models):
            raise ValueError("a model stands twice in models; repeats asks each several times")
        if not 2 <= len(self.models) * self.repeats <= _MOST_MEMBERS:
            raise ValueError(f"an ensemble needs 2 to {_MOST_MEMBERS} answers: models x repeats")
        if self.scorer is not None and self.choose != "score":
            raise ValueError('scorer is only of use with choose = "score"')
        return self

    @property
    def parts(self) -> list[str]:
        """Names of the models that it uses."""
        return [*self.models, *self.scoring]

    @property
    def scoring(self) -> list[str]:
        """Names of the models that must score texts."""
        return [self.scorer] if self.scorer else []


@dataclass(frozen=True, slots=True)
class _Member:
    """One answer of the ensemble: a model and its repetition."""

    #: `stage` is the model's name; with the repetition if asked several times: "m", "m.2", "m.3".
    part: Part
    #: Number of the repetition, from 0.
    turn: int


@dataclass(slots=True)
class _Vote:
    member: _Member
    answer: ModelAnswer


@dataclass(slots=True)
class _Choice:
    vote: _Vote
    #: The report that `marked` adds to the answer.
    report: JsonDict
    #: Token usage of the scorer, as `Part.usage` returns it.
    usage: list[JsonDict]


class Ensemble:
    """A composed model of several models. models: answers for them."""

    def __init__(self, settings: EnsembleSettings, models: Answering):
        self._settings = settings
        self._models = models
        self._members = [
            _Member(Part(model if turn == 0 else f"{model}.{turn + 1}", model), turn)
            for model in settings.models
            for turn in range(settings.repeats)
        ]

    async def seats(self) -> int | None:
        """Requests at the same time: each takes a seat of every model for each repetition."""
        seat_counts: list[int] = []
        for model, times in Counter(member.part.model for member in self._members).items():
            seats = await self._models.seats(model)
            if seats is not None:
                seat_counts.append(max(1, seats // times))
        return min(seat_counts, default=None)

    async def answer(self, request: ProxiedRequest) -> ModelAnswer:
        """The best answer, once the slowest member has answered. Raises HttpError, RequestError."""
        self._check(request)
        votes, left_out = await self._ask_all(request)
        chosen = await self._choose(request, votes)
        return self._answer_of(request, chosen, votes, left_out)

    @asynccontextmanager
    async def stream(self, request: ProxiedRequest) -> AsyncIterator[ModelStream]:
        """The best answer's stream, begun once it is chosen. Raises HttpError, RequestError."""
        answer = await self.answer(request)
        yield ModelStream(answer.chunks(request), answer.headers)

    def _check(self, request: ProxiedRequest) -> None:
        """Raise RequestError for requests that no ensemble supports."""
        refuse_many(request, "an ensemble sends the best of several answers")
        refuse_fields(request, ["echo"], "answers are compared without their prompts")
        if len(set(self._settings.parts)) > 1:
            refuse_token_ids(request)

    async def _ask_all(self, request: ProxiedRequest) -> tuple[list[_Vote], list[JsonDict]]:
        """(answers, failed members with the reason). Raises HttpError if there is no answer."""
        replies = await asyncio.gather(*(self._ask(member, request) for member in self._members))
        votes: list[_Vote] = []
        left_out: list[JsonDict] = []
        errors: list[HttpError] = []
        for member, answer in zip(self._members, replies, strict=True):
            if isinstance(answer, ModelAnswer):
                votes.append(_Vote(member, answer))
            else:
                errors.append(answer)
                left_out.append({"stage": member.part.stage, "reason": str(answer)})
        if not votes:
            raise errors[0]
        return votes, left_out

    async def _ask(self, member: _Member, request: ProxiedRequest) -> ModelAnswer | HttpError:
        try:
            async with asyncio.timeout(None if request.background else self._settings.wait_s):
                return await self._models.answer(self._request_to(member, request))
        except (HttpError, RequestError) as error:
            return member.part.refusal(error, request.fields)
        except TimeoutError:
            reason = f"no answer within {self._settings.wait_s:g} s"
            return HttpError(504, f"stage {member.part.stage}: {reason}", code="deadline_exceeded")

    def _request_to(self, member: _Member, request: ProxiedRequest) -> ProxiedRequest:
        fields = request.asking_logprobs if self._scores_itself else {}
        seed = request.fields.get("seed")
        if seed is not None and member.turn:
            fields["seed"] = (seed + member.turn) % _SEEDS
        return request.whole(member.part.model, **fields)

    @property
    def _scores_itself(self) -> bool:
        return self._settings.choose == "score" and self._settings.scorer is None

    async def _choose(self, request: ProxiedRequest, votes: Sequence[_Vote]) -> _Choice:
        if self._settings.choose == "majority":
            return _by_majority(votes)
        if self._settings.scorer is None:
            return _best(votes, [_own_score(vote) for vote in votes], [])
        return await self._by_scorer(request, votes, self._settings.scorer)

    async def _by_scorer(
        self, request: ProxiedRequest, votes: Sequence[_Vote], name: str
    ) -> _Choice:
        scorer, part = TextScorer(self._models, request, name), Part("scorer", name)
        with part.refusing():
            scores = await scorer.score_answers([vote.answer.texts[0] for vote in votes])
        usage = [entry for used in scorer.usages for entry in part.usage(used)]
        return _best(votes, scores, usage)

    def _answer_of(
        self,
        request: ProxiedRequest,
        chosen: _Choice,
        votes: Sequence[_Vote],
        left_out: list[JsonDict],
    ) -> ModelAnswer:
        answer, part = chosen.vote.answer, chosen.vote.member.part
        if self._scores_itself:
            answer.hide_logprobs(request)
        usages = [entry for vote in votes for entry in vote.member.part.usage(vote.answer.usage)]
        report: JsonDict = {"kind": "ensemble", "stage": part.stage, **chosen.report}
        if left_out:
            report["left_out"] = left_out
        body = answer.body | {"usage": total_usage([*usages, *chosen.usage])}
        return ModelAnswer(marked(body, report), part.headers(answer.headers))


def _by_majority(votes: Sequence[_Vote]) -> _Choice:
    """The most frequent answer; the first one of equally frequent answers."""
    texts = [vote.answer.normalised[0] for vote in votes]
    winner, count = Counter(texts).most_common(1)[0]
    return _Choice(votes[texts.index(winner)], {"votes": count, "of": len(votes)}, [])


def _best(votes: Sequence[_Vote], scores: Sequence[float], usage: list[JsonDict]) -> _Choice:
    place = max(range(len(votes)), key=lambda place: scores[place])
    # JSON has no infinity.
    score = scores[place] if scores[place] > float("-inf") else None
    return _Choice(votes[place], {"score": score, "of": len(votes)}, usage)


def _own_score(vote: _Vote) -> float:
    logprobs = vote.answer.logprobs[0]
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")
