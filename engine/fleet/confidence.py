"""How sure a model was of an answer, by the log-probabilities of its own tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from jitney.engine.fleet.answering import ModelAnswer, Question
from jitney.engine.types import JsonDict

MeasureName = Literal["mean", "least"]


@dataclass(frozen=True, slots=True)
class Measure:
    """Log-probabilities of an answer's tokens -> confidence, 0 to 1: the probability of a token,
    as the geometric mean of all (mean), or of the unlikeliest `window` neighbours (least).
    """

    name: MeasureName
    window: int = 1

    def of(self, logprobs: Sequence[float]) -> float:
        """Nothing was said: nothing is known of it, and it is 0."""
        if not logprobs:
            return 0.0
        if self.name == "mean":
            return math.exp(sum(logprobs) / len(logprobs))
        return math.exp(_least_mean(logprobs, min(self.window, len(logprobs))))

    def __str__(self) -> str:
        return self.name if self.name == "mean" else f"least of {self.window}"


def _least_mean(values: Sequence[float], window: int) -> float:
    """The least mean of `window` neighbours."""
    sums = [0.0, *accumulate(values)]
    return min(sums[end] - sums[end - window] for end in range(window, len(sums))) / window


def asking_logprobs(question: Question) -> JsonDict:
    """The fields that make an answer come with its tokens' log-probabilities."""
    if question.is_chat:
        return {"logprobs": True}
    return {"logprobs": question.body.get("logprobs") or 0}


def logprobs_of(choice: JsonDict) -> list[float]:
    """Of the tokens of one choice of a whole answer."""
    logprobs = choice.get("logprobs") or {}
    if "content" in logprobs:
        return [entry["logprob"] for entry in logprobs["content"] or ()]
    return [value for value in logprobs.get("token_logprobs") or () if value is not None]


def confidence_of(answer: ModelAnswer, measure: Measure) -> float:
    """Of the choice that the model was least sure of."""
    return min((measure.of(logprobs_of(choice)) for choice in answer.choices), default=0.0)


def hide_logprobs(answer: ModelAnswer, question: Question) -> None:
    """Take out the log-probabilities that the client did not ask for."""
    wanted = question.body.get("logprobs")
    if wanted is None or wanted is False:
        for choice in answer.choices:
            choice["logprobs"] = None
