"""Two arms of one model compared while requests come: how much faster, dearer or more faulty the
candidate is, with intervals that hold however often somebody looks.

**The figure.** Times and rates are skewed, so their logarithms are compared: the difference of two
means of logarithms is the logarithm of a ratio (of geometric means), and Welch's variance, each
arm's own over its own number, fits arms of unlike size and spread (B. L. Welch, "The generalization
of 'Student's' problem when several different population variances are involved", Biometrika 34,
1947). A bootstrap would need all requests kept, and says nothing of looking more than once. Errors
are compared as a difference of shares.

**The unit.** Keys stick to an arm, so a key's requests are alike and are no independent evidence:
variances are taken over clusters of keys, not over requests (A. Deng, U. Knoblich, J. Lu, "Applying
the Delta Method in Metric Analytics", KDD 2018). A cluster is one of `Comparison.clusters` parts of
the keys' hash, so that the memory does not grow.

**Looking often.** An interval of 95 % that is looked at every minute leaves out the truth, at some
minute, far more often than once in twenty. These come from a mixture sequential probability ratio
test, which is valid at all times at once: with the estimate's variance V and a normal mixture of
variance t^2 the half width is

    sqrt(2 V (V + t^2) / t^2 * log(sqrt((V + t^2) / V) / alpha))

(R. Johari, P. Koomen, L. Pekelis, D. Walsh, "Always Valid Inference: Continuous Monitoring of A/B
Tests", Operations Research 70, 2022; after H. Robbins, "Statistical Methods Related to the Law of
the Iterated Logarithm", 1970). alpha is shared evenly by the figures, so that all intervals
together hold at all times with 95 %. It is exact for normal means of known variance, and nearly so
from some thirty requests on: no interval is given before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from jitney.engine.types import JsonDict

#: Probability that any interval of a comparison ever leaves out the truth.
_ALPHA = 0.05
#: Parts of the keys' hash that variances are taken over.
_CLUSTERS = 256
#: Requests, and clusters among them, that each arm must have before an interval is given.
_LEAST_REQUESTS, _LEAST_CLUSTERS = 30, 20

type ArmName = Literal["stable", "candidate"]
ARMS: tuple[ArmName, ...] = ("stable", "candidate")
_Verdict = Literal["better", "worse", "no difference seen yet"]


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What became of one request, as the ingress saw it."""

    #: False: it was refused for lack of room, failed, or its stream broke off.
    ok: bool
    #: Output tokens that the client got.
    tokens: int = 0
    #: Arrival to the end of the answer.
    total_s: float = 0.0
    #: Arrival to the first token; None where that cannot be seen (an answer that is no stream).
    first_token_s: float | None = None
    #: Its share of what the arm's engines cost while it ran, in the price's unit.
    cost: float = 0.0


@dataclass(frozen=True, slots=True)
class _Figure:
    """Something that is measured of each request, and compared."""

    unit: str
    more_is_better: bool
    #: The two arms are compared by their ratio, of positive values; else by their difference.
    is_ratio: bool
    #: Standard deviation of the mixture: the size of a difference (of logarithms, or of shares)
    #: that is found soonest.
    scale: float
    #: Its value of a request; None: that one has none.
    read: Callable[[RequestOutcome], float | None]

    @property
    def equal(self) -> float:
        """The ratio or the difference of arms that are alike."""
        return 1.0 if self.is_ratio else 0.0

    def worst(self, margin: float) -> float:
        """The ratio or difference that is `margin` (a share) worse than equal."""
        return self.equal - margin if self.more_is_better else self.equal + margin


def _tokens_per_s(outcome: RequestOutcome) -> float | None:
    if not outcome.ok or outcome.tokens <= 0 or outcome.total_s <= 0:
        return None
    return outcome.tokens / outcome.total_s


def _first_token_s(outcome: RequestOutcome) -> float | None:
    if not outcome.ok or not outcome.first_token_s:
        return None
    return outcome.first_token_s


def _token_cost(outcome: RequestOutcome) -> float | None:
    if not outcome.ok or outcome.tokens <= 0 or outcome.cost <= 0:
        return None
    return outcome.cost / outcome.tokens


def _error(outcome: RequestOutcome) -> float:
    return 0.0 if outcome.ok else 1.0


#: What is compared, by name.
FIGURES: Mapping[str, _Figure] = {
    "tokens_per_s": _Figure("tokens a second of a request", True, True, 0.1, _tokens_per_s),
    "first_token_s": _Figure("seconds to the first token", False, True, 0.1, _first_token_s),
    "token_cost": _Figure("cost of a useful token", False, True, 0.1, _token_cost),
    "errors": _Figure("share of requests that failed", False, False, 0.1, _error),
}


@dataclass(slots=True)
class _Sums:
    """One figure of one arm, by clusters of keys."""

    #: Requests, and the sum of their values (logarithms for a ratio): [_CLUSTERS] f8.
    count: np.ndarray = field(default_factory=lambda: np.zeros(_CLUSTERS))
    total: np.ndarray = field(default_factory=lambda: np.zeros(_CLUSTERS))

    def add(self, cluster: int, value: float) -> None:
        self.count[cluster] += 1
        self.total[cluster] += value

    @property
    def requests(self) -> int:
        return int(self.count.sum())

    @property
    def clusters(self) -> int:
        """Those that have requests."""
        return int(np.count_nonzero(self.count))

    @property
    def enough(self) -> bool:
        return self.requests >= _LEAST_REQUESTS and self.clusters >= _LEAST_CLUSTERS

    @property
    def mean(self) -> float:
        return float(self.total.sum() / self.count.sum())

    @property
    def variance(self) -> float:
        """Of the mean, by the spread of the clusters' sums around it."""
        residuals = self.total - self.count * self.mean
        clusters = self.clusters
        spread = float(residuals @ residuals) * clusters / (clusters - 1)
        return spread / self.requests**2


@dataclass(frozen=True, slots=True)
class Interval:
    """How the candidate stands to the stable arm: a ratio, or a difference of shares."""

    estimate: float
    low: float
    high: float

    def verdict(self, figure: _Figure) -> _Verdict:
        if self.low <= figure.equal <= self.high:
            return "no difference seen yet"
        is_more = self.low > figure.equal
        return "better" if is_more == figure.more_is_better else "worse"

    def breaks(self, figure: _Figure, margin: float) -> bool:
        """All of it is worse than the margin allows."""
        if figure.more_is_better:
            return self.high < figure.worst(margin)
        return self.low > figure.worst(margin)

    def keeps(self, figure: _Figure, margin: float) -> bool:
        """None of it is worse than the margin allows."""
        if figure.more_is_better:
            return self.low >= figure.worst(margin)
        return self.high <= figure.worst(margin)


@dataclass(slots=True)
class Comparison:
    """Everything that is known of two arms. Constant memory."""

    #: Probability that all intervals hold at all times.
    confidence: ClassVar[float] = 1 - _ALPHA
    #: Parts of the keys' hash that a request may be of.
    clusters: ClassVar[int] = _CLUSTERS
    #: Of each arm, before an interval is given.
    least_requests: ClassVar[int] = _LEAST_REQUESTS

    #: By arm and figure.
    sums: dict[ArmName, dict[str, _Sums]] = field(
        default_factory=lambda: {arm: {name: _Sums() for name in FIGURES} for arm in ARMS}
    )
    #: Output tokens that clients got, by arm.
    tokens: dict[ArmName, int] = field(default_factory=lambda: dict.fromkeys(ARMS, 0))

    def add(self, arm: ArmName, cluster: int, outcome: RequestOutcome) -> None:
        """cluster: of the request's key, 0 to `clusters` - 1."""
        self.tokens[arm] += outcome.tokens
        for name, figure in FIGURES.items():
            value = figure.read(outcome)
            if value is not None:
                counted = math.log(value) if figure.is_ratio else value
                self.sums[arm][name].add(cluster, counted)

    def requests(self, arm: ArmName) -> int:
        return self.sums[arm]["errors"].requests

    def level(self, arm: ArmName, name: str) -> float | None:
        """The figure of an arm alone: a geometric mean, or a share. None: it has none yet."""
        sums = self.sums[arm][name]
        if not sums.requests:
            return None
        return math.exp(sums.mean) if FIGURES[name].is_ratio else sums.mean

    def interval(self, name: str) -> Interval | None:
        """Of candidate to stable; None while either has too few requests or keys."""
        stable, candidate = self.sums["stable"][name], self.sums["candidate"][name]
        if not (stable.enough and candidate.enough):
            return None
        figure = FIGURES[name]
        variance = _variance(figure, stable, candidate)
        difference = candidate.mean - stable.mean
        half = _half_width(variance, figure.scale, _ALPHA / len(FIGURES))
        low, high = difference - half, difference + half
        if figure.is_ratio:
            return Interval(math.exp(difference), math.exp(low), math.exp(high))
        return Interval(difference, max(-1.0, low), min(1.0, high))

    def saved(self) -> JsonDict:
        """All of it, as JSON."""
        sums = {
            arm: {
                name: {"count": each.count.tolist(), "total": each.total.tolist()}
                for name, each in figures.items()
            }
            for arm, figures in self.sums.items()
        }
        return {"sums": sums, "tokens": dict(self.tokens)}

    @classmethod
    def restored(cls, saved: JsonDict) -> Comparison:
        """What `saved` gave. Raises KeyError, TypeError or ValueError for anything else."""
        restored = cls()
        for arm in ARMS:
            restored.tokens[arm] = int(saved["tokens"][arm])
            for name in FIGURES:
                kept = saved["sums"][arm][name]
                restored.sums[arm][name] = _Sums(
                    _clustered(kept["count"]), _clustered(kept["total"])
                )
        return restored


def _half_width(variance: float, scale: float, alpha: float) -> float:
    """Of an interval around an estimate with this variance that holds at all times at once with
    probability 1 - alpha. scale: standard deviation of the mixture.
    """
    if variance <= 0:
        return 0.0
    mixed = variance + scale * scale
    bound = math.log(math.sqrt(mixed / variance) / alpha)
    return math.sqrt(2 * variance * mixed / (scale * scale) * bound)


def _variance(figure: _Figure, stable: _Sums, candidate: _Sums) -> float:
    """Of the difference of two means."""
    variance = stable.variance + candidate.variance
    if figure.is_ratio:
        return variance
    return max(variance, _binomial_variance(stable, candidate))


def _binomial_variance(stable: _Sums, candidate: _Sums) -> float:
    """The least that a difference of shares can vary. Errors are rare, so that what was seen of
    them may be none: each arm gets one request more that failed and one that did not (A. Agresti,
    B. Caffo, "Simple and Effective Confidence Intervals for Proportions", The American
    Statistician 54, 2000).
    """
    variance = 0.0
    for sums in (stable, candidate):
        requests = sums.requests + 2
        share = (sums.total.sum() + 1) / requests
        variance += share * (1 - share) / requests
    return float(variance)


def _clustered(values: list[float]) -> np.ndarray:
    array = np.array(values, dtype=np.float64)
    if array.shape != (_CLUSTERS,) or not np.isfinite(array).all():
        raise ValueError("not the sums of clusters")
    return array
