"""Finds the threshold of a cascade: the cost of each threshold, and how often the cascade's answers
agree with the large model's, over requests that both models answered.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import orjson

from jitney.engine.common.errors import ConfigError, RequestError
from jitney.engine.common.requests import JsonDict
from jitney.engine.fleet.compositions.answering import Answering, ModelAnswer
from jitney.engine.fleet.compositions.cascade import Cascade, Measure
from jitney.engine.fleet.request import ProxiedRequest, Route
from jitney.engine.server import HttpError

#: How agreement is measured: equal (whether the texts are equal), words (F1 of shared words).
_Agreement = Literal["equal", "words"]
#: Decimals to which costs are rounded before comparison, since sums depend on the order.
_DIGITS = 9
#: Quantile of the normal distribution for a 95 % interval.
_Z = 1.959964


@dataclass(frozen=True, slots=True)
class _Spent:
    """The cost of answers. seconds: from the request to the end of the answer."""

    tokens: int = 0
    seconds: float = 0.0
    #: Price in the currency of the token prices; 0 without prices.
    price: float = 0.0

    def __add__(self, other: _Spent) -> _Spent:
        return _Spent(
            self.tokens + other.tokens, self.seconds + other.seconds, self.price + other.price
        )

    def of(self, by: Cost) -> float:
        return float(getattr(self, by))


type Cost = Literal["price", "seconds", "tokens"]


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """Prices per million tokens, the same for prompt and output; None: unknown."""

    small: float | None = None
    large: float | None = None

    @property
    def known(self) -> bool:
        return self.small is not None and self.large is not None


@dataclass(frozen=True, slots=True)
class Pair:
    """One request with the answers of both models."""

    #: Log-probabilities of the small model's tokens, [choices][tokens].
    logprobs: list[list[float]]
    small: _Spent
    large: _Spent
    #: Agreement of the small answer with the large one, 0 to 1.
    agreement: float

    def confidence(self, measure: Measure) -> float:
        """The small answer's confidence, as a cascade computes it."""
        return measure.confidence(self.logprobs)


@dataclass(frozen=True, slots=True)
class Threshold:
    """A threshold and the figures of a cascade with it."""

    threshold: float
    #: Share of requests for which the small model's answer is sent.
    kept: float
    #: Mean agreement with the large model's answers, and its 95 % interval (Wilson).
    agreement: float
    low: float
    high: float
    spent: _Spent
    #: Its cost divided by the cost of the large model alone.
    cost_share: float

    @classmethod
    def of(cls, order: Sequence[Pair], asked: int, threshold: float, by: Cost) -> Threshold:
        """The threshold at which the large model answers the first `asked` pairs of `order`, which
        is sorted by confidence.
        """
        n = len(order)
        everything = sum((pair.large for pair in order), _Spent())
        spent = sum((pair.small for pair in order), _Spent())
        spent = sum((pair.large for pair in order[:asked]), spent)
        agreement = (asked + sum(pair.agreement for pair in order[asked:])) / n
        low, high = _interval(agreement, n)
        share = spent.of(by) / everything.of(by) if everything.of(by) else math.inf
        return cls(threshold, 1 - asked / n, agreement, low, high, spent, share)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """All thresholds of a measure with different results, ascending; at the first one, every answer
    of the small model is sent.
    """

    measure: Measure
    thresholds: list[Threshold]

    @classmethod
    def of(cls, pairs: Sequence[Pair], measure: Measure, by: Cost) -> Thresholds:
        """All thresholds halfway between measured confidences, so that none depends on the last
        digit of a log-probability.
        """
        order = sorted(pairs, key=lambda pair: pair.confidence(measure))
        confidences = [pair.confidence(measure) for pair in order]
        thresholds = [Threshold.of(order, 0, 0.0, by)]
        for asked, (before, after) in enumerate(pairwise([*confidences, 1.0]), 1):
            if after > before:
                thresholds.append(Threshold.of(order, asked, (before + after) / 2, by))
        return cls(measure, thresholds)

    def cheapest(self, agreement: float) -> Threshold | None:
        """The cheapest threshold with at least this agreement; None if there is none."""
        good = [each for each in self.thresholds if each.agreement >= agreement]
        return min(good, key=lambda each: (each.cost_share, -each.agreement), default=None)

    def cost_share(self, agreement: float) -> float:
        """Cost of the cheapest threshold for this agreement, rounded; infinite without one."""
        cheapest = self.cheapest(agreement)
        return math.inf if cheapest is None else round(cheapest.cost_share, _DIGITS)

    def shown(self, most: int, chosen: Threshold | None) -> list[Threshold]:
        """At most `most` thresholds, evenly spread, including both ends, and the chosen one."""
        last = len(self.thresholds) - 1
        places = {round(last * step / (most - 1)) for step in range(most)}
        if chosen is not None:
            places.add(self.thresholds.index(chosen))
        return [self.thresholds[place] for place in sorted(places)]


def _interval(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval for a share that was measured in n requests."""
    middle = share + _Z * _Z / (2 * n)
    spread = _Z * math.sqrt(share * (1 - share) / n + _Z * _Z / (4 * n * n))
    scale = 1 + _Z * _Z / n
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def read_requests(file: Path, defaults: JsonDict) -> list[ProxiedRequest]:
    """Read requests, one per line: the body of a chat or text completion, or a line of a batch with
    such a body as its `body`. defaults: values of missing fields. Raises ConfigError.
    """
    requests: list[ProxiedRequest] = []
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            requests.append(_read_request(f"{file}:{number}", line, defaults))
    if not requests:
        raise ConfigError(f"{file}: no requests in it; write one a line")
    return requests


def _read_request(where: str, line: bytes, defaults: JsonDict) -> ProxiedRequest:
    try:
        body = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if isinstance(body, dict) and isinstance(body.get("body"), dict):
        body = body["body"]
    if not isinstance(body, dict) or ("messages" in body) == ("prompt" in body):
        raise ConfigError(f"{where}: must be an object with either messages or prompt")
    route = Route.CHAT if "messages" in body else Route.COMPLETIONS
    try:
        request = ProxiedRequest.post("", route, defaults | body).whole("")
        Cascade.check(request)
    except RequestError as error:
        raise ConfigError(f"{where}: {error}") from None
    return request


@dataclass(slots=True)
class ModelComparison:
    """Sends requests to both models. prices: of their tokens."""

    models: Answering
    small: str
    large: str
    agreement: _Agreement
    prices: TokenPrices
    #: Timeout of an answer, seconds.
    timeout_s: float = math.inf

    async def run(
        self, requests: Sequence[ProxiedRequest], at_once: int, report: Callable[[int], None]
    ) -> tuple[list[Pair], list[str]]:
        """(pairs, error messages of refused requests). report: called with the number of finished
        requests.
        """
        places = asyncio.Semaphore(at_once)
        pairs: list[Pair] = []
        refusals: list[str] = []

        async def one(request: ProxiedRequest) -> None:
            async with places:
                try:
                    pairs.append(await self._pair(request))
                except (HttpError, RequestError) as error:
                    refusals.append(str(error))
            report(len(pairs) + len(refusals))

        await asyncio.gather(*(one(request) for request in requests))
        return pairs, refusals

    async def _pair(self, request: ProxiedRequest) -> Pair:
        """Ask both models, one after the other, so that each is timed alone."""
        to_small = request.whole(self.small, **request.asking_logprobs)
        small, small_spent = await self._timed(to_small, self.prices.small)
        large, large_spent = await self._timed(request.whole(self.large), self.prices.large)
        return Pair(
            small.logprobs,
            small_spent,
            large_spent,
            self._agreement(small, large),
        )

    async def _timed(
        self, request: ProxiedRequest, price: float | None
    ) -> tuple[ModelAnswer, _Spent]:
        began = time.monotonic()
        answer = await self._answer(request)
        seconds = time.monotonic() - began
        tokens = answer.usage.get("total_tokens") or 0
        return answer, _Spent(tokens, seconds, (price or 0.0) * tokens / 1e6)

    async def _answer(self, request: ProxiedRequest) -> ModelAnswer:
        """The answer of a model, with the timeout. Raises HttpError, RequestError."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self.models.answer(request)
        except TimeoutError:
            raise RequestError(
                f"no answer of {request.model} within {self.timeout_s:g} s",
                code="deadline_exceeded",
            ) from None

    def _agreement(self, small: ModelAnswer, large: ModelAnswer) -> float:
        alike = _likeness if self.agreement == "words" else _are_equal
        likenesses = list(map(alike, small.normalised, large.normalised))
        return sum(likenesses) / len(likenesses) if likenesses else 0.0


def _are_equal(first: str, second: str) -> float:
    return float(first == second)


def _likeness(first: str, second: str) -> float:
    """Likeness of two normalised texts, 0 to 1: F1 of the words that they share."""
    if first == second:
        return 1.0
    words, others = Counter(first.split()), Counter(second.split())
    shared = (words & others).total()
    return 2 * shared / (words.total() + others.total()) if shared else 0.0
