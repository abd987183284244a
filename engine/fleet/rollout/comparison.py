"""Compares two arms of one model while requests come: how the candidate's speed, cost and error
rate differ at equal load, with confidence intervals that hold however often they are read.

**The figure.** Times and rates are skewed, so their logarithms are compared: the difference of two
means of logarithms is the logarithm of a ratio (of geometric means), and Welch's variance, each
arm's own over its own number, fits arms of unlike size and spread (B. L. Welch, "The generalization
of 'Student's' problem when several different population variances are involved", Biometrika 34,
1947). A bootstrap would have to store all requests, and is not valid if read more than once. Errors
are compared as a difference of shares.

**Equal load.** An engine with a tenth of the requests answers each of them faster. So speeds are
compared within strata: requests whose engine had equally many requests meanwhile, to an eighth of
a power of two, and whose answers are about as long (the load around a short answer varies more, and
short answers are slower for each token). The estimate is that of a regression with a level for each
stratum: each stratum has the weight s c / (s + c), with s and c the requests of the arms, so a
stratum without requests of one arm has weight zero; residuals are divided by sqrt(1 - 1 / (s + c)),
since each level is estimated too (HC2; J. G. MacKinnon, H. White, "Some
Heteroskedasticity-Consistent Covariance Matrix Estimators", Journal of Econometrics 29, 1985). With
one stratum this is Welch's comparison. The remaining effect of unequal load grows with the
difference of the arms' loads: `_Figure.drift`.

**The unit.** A key stays with one arm and its requests resemble each other, so they are no
independent observations: variances are taken over clusters of keys, not over requests (A. Deng, U.
Knoblich, J. Lu, "Applying the Delta Method in Metric Analytics", KDD 2018). A cluster is one of
`Comparison.clusters` parts of the keys' hash, so that the memory does not grow.

**Repeated reading.** A 95 % interval that is read every minute excludes the true value, at some
minute, far more often than once in twenty. These intervals come from a mixture sequential
probability ratio test, which is valid at all times at once: with the estimate's variance V and a
normal mixture of variance t^2 the half width is

    sqrt(2 V (V + t^2) / t^2 * log(sqrt((V + t^2) / V) / alpha))

(R. Johari, P. Koomen, L. Pekelis, D. Walsh, "Always Valid Inference: Continuous Monitoring of A/B
Tests", Operations Research 70, 2022; after H. Robbins, "Statistical Methods Related to the Law of
the Iterated Logarithm", 1970). alpha is divided evenly among the figures, so that all intervals
together hold at all times with 95 %. This is exact for normal means of known variance, and nearly
exact from about thirty requests on: no interval is given before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import ClassVar, Literal

import numpy as np

from jitney.engine.common.requests import JsonDict

#: Probability that any interval of a comparison ever excludes the true value.
_ALPHA = 0.05
#: Clusters of keys (parts of their hash) that variances are taken over.
_CLUSTERS = 64
#: Strata of load per power of two; strata of load in all, for 1 to 256 requests at an engine;
#: strata of length, one per power of two of tokens, the last one for all longer answers.
_LOADS_PER_OCTAVE, _LOADS, _LENGTHS = 8, 64, 12
#: Least requests, and least clusters with requests, of each arm before an interval is given.
_LEAST_REQUESTS, _LEAST_CLUSTERS = 30, 20
#: Least sum of the strata's weights: as for two arms of _LEAST_REQUESTS in one stratum.
_LEAST_WEIGHT = _LEAST_REQUESTS / 2

type ArmName = Literal["stable", "candidate"]
ARMS: tuple[ArmName, ...] = ("stable", "candidate")
Verdict = Literal[
    "better",
    "worse",
    "no difference seen yet",
    "not known yet",
    "not compared: loads hardly overlap",
]


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """The outcome of one request, as measured at the ingress."""

    #: False if full engines refused it, it failed, or its stream was interrupted.
    ok: bool
    #: Output tokens that the client received.
    tokens: int = 0
    #: Seconds from arrival to the end of the answer.
    total_s: float = 0.0
    #: Seconds from arrival to the first token; None without streaming.
    first_token_s: float | None = None
    #: Its share of its engine's cost while it ran, in the price's unit.
    cost: float = 0.0
    #: Mean requests at its engine, itself included: until the end of the answer, and until the
    #: first token. None: unknown.
    load: float | None = 1.0
    first_load: float | None = 1.0


@dataclass(frozen=True, slots=True)
class _Figure:
    """A quantity that is measured for each request and compared."""

    unit: str
    more_is_better: bool
    #: True: arms are compared by the ratio of positive values. False: by the difference.
    is_ratio: bool
    #: Standard deviation of the mixture: the size of the difference (of logarithms, or of shares)
    #: that is detected soonest.
    scale: float
    #: Returns the value of a request; None if the request has none.
    read: Callable[[RequestOutcome], float | None]
    #: Returns the load that the value depends on; only requests of equal load are compared. None:
    #: the value does not depend on load.
    load: Callable[[RequestOutcome], float | None] | None = None
    #: Whether the value depends on the length of the answer, too.
    by_length: bool = False
    #: Bias that may remain at equal load, as a share of the difference of the arms' mean
    #: logarithms of load; from simulations of equal engines
    #: (docs/decisions/0116-candidates-are-compared-at-equal-load.md).
    drift: float = 0.0

    @property
    def strata(self) -> int:
        """Number of strata: sets of requests of about the same load and length."""
        loads = 1 if self.load is None else _LOADS
        return loads * self.lengths

    @property
    def lengths(self) -> int:
        return _LENGTHS if self.by_length else 1

    def stratum(self, outcome: RequestOutcome) -> int | None:
        """The stratum of a request; None if it cannot be compared with any other."""
        if self.load is None:
            return 0
        load = self.load(outcome)
        if load is None:
            return None
        step = int(_LOADS_PER_OCTAVE * math.log2(max(1.0, load)))
        if step >= _LOADS:
            return None
        length = min(outcome.tokens.bit_length() - 1, _LENGTHS - 1) if self.by_length else 0
        return step * self.lengths + length

    @property
    def equal(self) -> float:
        """The ratio or difference of equal arms."""
        return 1.0 if self.is_ratio else 0.0

    def worst(self, margin: float) -> float:
        """The ratio or difference that is worse than equal by `margin` (a share)."""
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


_LOAD, _FIRST_LOAD = attrgetter("load"), attrgetter("first_load")

#: The compared figures by name.
FIGURES: Mapping[str, _Figure] = {
    "tokens_per_s": _Figure(
        "tokens a second of a request", True, True, 0.1, _tokens_per_s, _LOAD, True, 0.025
    ),
    "first_token_s": _Figure(
        "seconds to the first token", False, True, 0.1, _first_token_s, _FIRST_LOAD, False, 0.05
    ),
    "token_cost": _Figure(
        "cost of a useful token", False, True, 0.1, _token_cost, _LOAD, True, 0.025
    ),
    "errors": _Figure("share of requests that failed", False, False, 0.1, _error),
}


@dataclass(slots=True)
class _Sums:
    """Sums of one figure for one arm, by stratum and cluster of keys."""

    #: Requests, and the sums of their values (logarithms for a ratio): [strata, _CLUSTERS] f8.
    count: np.ndarray
    total: np.ndarray
    #: Requests of each stratum: [strata] f8.
    n: np.ndarray

    @classmethod
    def of(cls, figure: _Figure) -> _Sums:
        shape = (figure.strata, _CLUSTERS)
        return cls(np.zeros(shape), np.zeros(shape), np.zeros(figure.strata))

    def add(self, cluster: int, stratum: int, value: float) -> None:
        self.n[stratum] += 1
        self.count[stratum, cluster] += 1
        self.total[stratum, cluster] += value

    @property
    def requests(self) -> int:
        return int(self.n.sum())

    @property
    def clusters(self) -> int:
        """Number of clusters with requests."""
        return int(np.count_nonzero(self.count.any(axis=0)))

    @property
    def enough(self) -> bool:
        return self.requests >= _LEAST_REQUESTS and self.clusters >= _LEAST_CLUSTERS

    @property
    def mean(self) -> float:
        return float(self.total.sum()) / self.requests

    def within(self, strata: np.ndarray) -> _Sums:
        """The sums of some strata, int64[any]."""
        return _Sums(self.count[strata], self.total[strata], self.n[strata])

    def log_load(self, figure: _Figure) -> float:
        """Mean logarithm of its requests' load."""
        steps = np.arange(figure.strata) // figure.lengths
        mean = float(self.n @ steps) / self.requests
        return mean * math.log(2) / _LOADS_PER_OCTAVE

    def spread(self, level: np.ndarray, weight: np.ndarray) -> float:
        """Variance of the weighted sum of all values, from the clusters' sums. level: the expected
        mean of each stratum's values, [strata]. weight: weight of a value by stratum, [strata].
        """
        residuals = weight @ (self.total - self.count * level[:, None])
        clusters = self.clusters
        return float(residuals @ residuals) * clusters / (clusters - 1)


@dataclass(frozen=True, slots=True)
class _Matched:
    """Both arms' sums in the strata in which both have requests."""

    stable: _Sums
    candidate: _Sums

    @classmethod
    def of(cls, stable: _Sums, candidate: _Sums) -> _Matched:
        both = np.flatnonzero((stable.n > 0) & (candidate.n > 0))
        return cls(stable.within(both), candidate.within(both))

    def difference(self) -> tuple[float, float] | None:
        """(candidate's mean minus the stable arm's, its variance); None with too few requests."""
        stable, candidate = self.stable, self.candidate
        if not (stable.enough and candidate.enough):
            return None
        n_stable, n_candidate = stable.n, candidate.n
        total_stable, total_candidate = stable.total.sum(axis=1), candidate.total.sum(axis=1)
        n = n_stable + n_candidate
        weights = n_stable * n_candidate / n
        weight = float(weights.sum())
        if weight < _LEAST_WEIGHT:
            return None
        apart = total_candidate / n_candidate - total_stable / n_stable
        difference = float(weights @ apart) / weight
        level = (total_stable + total_candidate - n_candidate * difference) / n
        leverage = np.sqrt(1 - 1 / n)
        spread = stable.spread(level, n_candidate / n / leverage)
        spread += candidate.spread(level + difference, n_stable / n / leverage)
        return difference, spread / weight**2


@dataclass(frozen=True, slots=True)
class Interval:
    """Ratio of candidate to stable arm, or difference of their shares, with its interval."""

    estimate: float
    low: float
    high: float

    def verdict(self, figure: _Figure) -> Verdict:
        if self.low <= figure.equal <= self.high:
            return "no difference seen yet"
        is_more = self.low > figure.equal
        return "better" if is_more == figure.more_is_better else "worse"

    def breaks(self, figure: _Figure, margin: float) -> bool:
        """Whether the whole interval is worse than the margin allows."""
        if figure.more_is_better:
            return self.high < figure.worst(margin)
        return self.low > figure.worst(margin)

    def keeps(self, figure: _Figure, margin: float) -> bool:
        """Whether no part of the interval is worse than the margin allows."""
        if figure.more_is_better:
            return self.low >= figure.worst(margin)
        return self.high <= figure.worst(margin)


@dataclass(slots=True)
class Comparison:
    """All measurements of two arms, in constant memory."""

    #: Probability that all intervals hold at all times.
    confidence: ClassVar[float] = 1 - _ALPHA
    #: Number of clusters of keys (parts of their hash).
    clusters: ClassVar[int] = _CLUSTERS
    #: Least requests of each arm before an interval is given.
    least_requests: ClassVar[int] = _LEAST_REQUESTS

    #: Arm -> figure's name -> its sums.
    sums: dict[ArmName, dict[str, _Sums]] = field(
        default_factory=lambda: {
            arm: {name: _Sums.of(figure) for name, figure in FIGURES.items()} for arm in ARMS
        }
    )
    #: Arm -> output tokens that clients received.
    tokens: dict[ArmName, int] = field(default_factory=lambda: dict.fromkeys(ARMS, 0))

    def add(self, arm: ArmName, cluster: int, outcome: RequestOutcome) -> None:
        """Add a request. cluster: the cluster of its key, 0 to `clusters` - 1."""
        self.tokens[arm] += outcome.tokens
        for name, figure in FIGURES.items():
            value = figure.read(outcome)
            stratum = None if value is None else figure.stratum(outcome)
            if value is not None and stratum is not None:
                counted = math.log(value) if figure.is_ratio else value
                self.sums[arm][name].add(cluster, stratum, counted)

    def requests(self, arm: ArmName) -> int:
        return self.sums[arm]["errors"].requests

    def level(self, arm: ArmName, name: str) -> float | None:
        """One arm's own value of a figure: a geometric mean, or a share; None without requests."""
        sums = self.sums[arm][name]
        if not sums.requests:
            return None
        return math.exp(sums.mean) if FIGURES[name].is_ratio else sums.mean

    def matched(self, arm: ArmName, name: str) -> int:
        """Requests of an arm that a figure compares: those in strata with both arms' requests."""
        sums = self.sums
        both = _Matched.of(sums["stable"][name], sums["candidate"][name])
        return (both.stable if arm == "stable" else both.candidate).requests

    def interval(self, name: str) -> Interval | None:
        """Candidate against stable; None while an arm has few requests or keys at equal load."""
        stable, candidate = self.sums["stable"][name], self.sums["candidate"][name]
        estimated = _Matched.of(stable, candidate).difference()
        if estimated is None:
            return None
        figure = FIGURES[name]
        difference, variance = estimated
        if not figure.is_ratio:
            variance = max(variance, _binomial_variance(stable, candidate))
        half = _half_width(variance, figure.scale, _ALPHA / len(FIGURES))
        half += figure.drift * abs(candidate.log_load(figure) - stable.log_load(figure))
        low, high = difference - half, difference + half
        if figure.is_ratio:
            return Interval(math.exp(difference), math.exp(low), math.exp(high))
        return Interval(difference, max(-1.0, low), min(1.0, high))

    def verdict(self, name: str, interval: Interval | None) -> Verdict:
        if interval is not None:
            return interval.verdict(FIGURES[name])
        enough = all(self.sums[arm][name].enough for arm in ARMS)
        return "not compared: loads hardly overlap" if enough else "not known yet"

    def saved(self) -> JsonDict:
        sums = {
            arm: {name: _sparse(each) for name, each in figures.items()}
            for arm, figures in self.sums.items()
        }
        return {"sums": sums, "tokens": dict(self.tokens)}

    @classmethod
    def restored(cls, saved: JsonDict) -> Comparison:
        """Load the result of `saved`. Raises KeyError, TypeError, ValueError for anything else."""
        restored = cls()
        for arm in ARMS:
            restored.tokens[arm] = int(saved["tokens"][arm])
            for name, figure in FIGURES.items():
                restored.sums[arm][name] = _from_sparse(saved["sums"][arm][name], figure)
        return restored


def _half_width(variance: float, scale: float, alpha: float) -> float:
    """Half width of an interval around an estimate with this variance, valid at all times at once
    with probability 1 - alpha. scale: standard deviation of the mixture.
    """
    if variance <= 0:
        return 0.0
    mixed = variance + scale * scale
    bound = math.log(math.sqrt(mixed / variance) / alpha)
    return math.sqrt(2 * variance * mixed / (scale * scale) * bound)


def _binomial_variance(stable: _Sums, candidate: _Sums) -> float:
    """The least variance of a difference of shares. Errors are rare, and an arm may have had none:
    so one failed and one successful request are added to each arm (A. Agresti, B. Caffo, "Simple
    and Effective Confidence Intervals for Proportions", The American Statistician 54, 2000).
    """
    variance = 0.0
    for sums in (stable, candidate):
        requests = sums.requests + 2
        share = (sums.total.sum() + 1) / requests
        variance += share * (1 - share) / requests
    return float(variance)


def _sparse(sums: _Sums) -> JsonDict:
    """The sums as JSON without empty cells. at: flat indices of the cells with requests."""
    at = np.flatnonzero(sums.count)
    count, total = sums.count.flat[at], sums.total.flat[at]
    return {"at": at.tolist(), "count": count.tolist(), "total": total.tolist()}


def _from_sparse(saved: JsonDict, figure: _Figure) -> _Sums:
    """Load the result of `_sparse`. Raises KeyError, TypeError, ValueError for anything else."""
    sums = _Sums.of(figure)
    at = np.array(saved["at"], dtype=np.int64)
    if at.size and not 0 <= at.min() <= at.max() < sums.count.size:
        raise ValueError("not the places of a comparison")
    for name, array in (("count", sums.count), ("total", sums.total)):
        values = np.array(saved[name], dtype=np.float64)
        if values.shape != at.shape or not np.isfinite(values).all():
            raise ValueError("not the sums of a comparison")
        array.flat[at] = values
    sums.n[:] = sums.count.sum(axis=1)
    return sums
