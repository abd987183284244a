"""Two arms compared: what is named worse, and how seldom what is equal is."""

from __future__ import annotations

import math

import numpy as np
import pytest
from shared_engines import requests_of, run_rollout

from jitney.engine.fleet.rollout.comparison import (
    ARMS,
    FIGURES,
    ArmName,
    Comparison,
    Interval,
    RequestOutcome,
    _Matched,
    _Sums,
)
from jitney.engine.fleet.rollout.rollout import PromotionRule, Rollout

#: Requests a minute of each arm: 5 % go to the candidate.
STABLE, CANDIDATE = 190, 10


class Minutes:
    """Requests of both arms, minute by minute, with lognormal speeds and rare errors.

    spread: standard deviation of the logarithm of a request's speed; by_key: of a key's own share
    of it.
    """

    def __init__(self, seed: int, slower: float = 0.0, spread: float = 0.4, by_key: float = 0.0):
        self.random = np.random.default_rng(seed)
        self.comparison = Comparison()
        self.spread = spread
        self.shift = {"stable": 0.0, "candidate": math.log(1 - slower)}
        self.of_keys = {
            arm: by_key * self.random.standard_normal(Comparison.clusters) for arm in ARMS
        }

    def minute(self, error_share: float = 0.01) -> None:
        for arm, requests in zip(ARMS, (STABLE, CANDIDATE), strict=True):
            clusters = self.random.integers(Comparison.clusters, size=requests)
            logs = self.shift[arm] + self.of_keys[arm][clusters]
            logs = logs + self.spread * self.random.standard_normal(requests)
            failed = self.random.random(requests) < error_share
            sums = self.comparison.sums[arm]
            for name, values in (("tokens_per_s", logs), ("errors", failed.astype(float))):
                sums[name].n[0] += requests
                np.add.at(sums[name].count[0], clusters, 1)
                np.add.at(sums[name].total[0], clusters, values)

    def verdicts(self, minutes: int) -> list[str]:
        """Of the speed, looked at every minute, until there is one."""
        seen = []
        for _ in range(minutes):
            self.minute()
            interval = self.comparison.interval("tokens_per_s")
            if interval is not None:
                seen.append(interval.verdict(FIGURES["tokens_per_s"]))
        return seen


def test_a_candidate_ten_per_cent_slower_is_named_worse_within_hours():
    named = []
    for seed in range(6):
        run = Minutes(seed, slower=0.1)
        verdicts = run.verdicts(240)
        assert "better" not in verdicts
        named.append("worse" in verdicts)
        interval = run.comparison.interval("tokens_per_s")
        assert interval is not None and interval.low < 0.9 * 1.05 and interval.high < 1
    assert all(named)


def test_an_equal_one_is_seldom_called_worse_though_looked_at_every_minute():
    """40 runs of 240 looks each: at most 5 % of them may ever say that it differs."""
    differs = 0
    for seed in range(40):
        verdicts = Minutes(1000 + seed).verdicts(240)
        differs += any(verdict != "no difference seen yet" for verdict in verdicts)
    assert differs <= 2


def test_keys_that_differ_are_no_evidence_against_an_arm():
    """Each key has its own speed and stays in its arm: requests of one key say the same again."""
    differs = 0
    for seed in range(25):
        verdicts = Minutes(5000 + seed, spread=0.1, by_key=0.5).verdicts(240)
        differs += any(verdict != "no difference seen yet" for verdict in verdicts)
    assert differs <= 2


def test_rare_errors_of_equal_arms_are_seldom_called_worse():
    differs = 0
    for seed in range(40):
        run = Minutes(9000 + seed)
        for _ in range(120):
            run.minute(error_share=0.005)
            interval = run.comparison.interval("errors")
            if interval and interval.verdict(FIGURES["errors"]) != "no difference seen yet":
                differs += 1
                break
    assert differs <= 2


def test_a_candidate_that_fails_is_seen_within_few_requests():
    comparison = Comparison()
    for number in range(600):
        comparison.add("stable", number % Comparison.clusters, RequestOutcome(True, 10, 1.0))
    for number in range(60):
        assert (comparison.interval("errors") is None) == (number < 30)
        comparison.add("candidate", number, RequestOutcome(ok=number % 3 != 0))
    interval = comparison.interval("errors")
    assert interval is not None and interval.verdict(FIGURES["errors"]) == "worse"
    assert interval.estimate == pytest.approx(1 / 3) and interval.low > 0.05


def test_figures_are_those_of_the_requests():
    comparison = Comparison()
    for number in range(40):
        comparison.add("stable", number, RequestOutcome(True, 20, 2.0, 0.5, 0.2))
        comparison.add("candidate", number, RequestOutcome(True, 20, 4.0, 0.25, 0.4))
    comparison.add("candidate", 1, RequestOutcome(ok=False, tokens=5, total_s=1.0))
    assert comparison.level("stable", "tokens_per_s") == pytest.approx(10)
    assert comparison.level("candidate", "token_cost") == pytest.approx(0.02)
    assert comparison.level("candidate", "errors") == pytest.approx(1 / 41)
    assert (comparison.requests("stable"), comparison.requests("candidate")) == (40, 41)
    assert comparison.tokens == {"stable": 800, "candidate": 805}
    verdicts = {
        name: interval.verdict(figure)
        for name, figure in FIGURES.items()
        if (interval := comparison.interval(name)) is not None
    }
    assert verdicts == {
        "tokens_per_s": "worse",
        "first_token_s": "better",
        "token_cost": "worse",
        "errors": "no difference seen yet",
    }
    speed = comparison.interval("tokens_per_s")
    assert speed is not None and speed.estimate == pytest.approx(0.5)


def sums_of(values: np.ndarray) -> _Sums:
    """values: [requests, strata], each request of a cluster of its own."""
    count, total = np.zeros((2, values.shape[1], 64))
    count[:, : len(values)] = ~np.isnan(values).T
    total[:, : len(values)] = np.nan_to_num(values).T
    return _Sums(count, total, count.sum(axis=1))


def test_the_difference_of_two_arms_is_welchs():
    """Each request a cluster of its own, all at one load."""
    draw = np.random.default_rng(1)
    stable, candidate = draw.standard_normal((60, 1)), 2 + 3 * draw.standard_normal((40, 1))
    found = _Matched.of(sums_of(stable), sums_of(candidate)).difference()
    assert found is not None
    assert found[0] == pytest.approx(candidate.mean() - stable.mean())
    variance = stable.var(ddof=1) / 60 + candidate.var(ddof=1) / 40
    assert found[1] == pytest.approx(variance, rel=0.02)


def test_strata_are_compared_as_least_squares_with_a_level_for_each():
    """Against numpy's solution of the regression, and its variance by simulation."""
    estimates, variances = [], []
    for seed in range(100):
        draw = np.random.default_rng(seed)
        levels = np.array([0.0, 3.0, -5.0])
        strata = {arm: draw.choice(3, size=60, p=p) for arm, p in SHARES.items()}
        values = {arm: levels[strata[arm]] + draw.standard_normal(60) for arm in ARMS}
        sums = {arm: sums_of(_in_columns(values[arm], strata[arm])) for arm in ARMS}
        found = _Matched.of(sums["stable"], sums["candidate"]).difference()
        assert found is not None
        arm = np.repeat([0.0, 1.0], 60)
        stratum = np.concatenate([strata["stable"], strata["candidate"]])
        design = np.column_stack([arm, *(stratum == number for number in range(3))])
        solved, *_ = np.linalg.lstsq(design, np.concatenate([values[one] for one in ARMS]))
        assert found[0] == pytest.approx(solved[0])
        estimates.append(found[0])
        variances.append(found[1])
    assert np.mean(variances) == pytest.approx(np.var(estimates), rel=0.3)


#: How often each arm is at each of three loads.
SHARES = {"stable": (0.3, 0.2, 0.5), "candidate": (0.5, 0.4, 0.1)}


def _in_columns(values: np.ndarray, strata: np.ndarray) -> np.ndarray:
    """[requests, strata], with the value in its own one and nan in the others."""
    return np.where(strata[:, None] == np.arange(3), values[:, None], np.nan)


#: Requests a second of both arms, at which an engine with nine tenths of them is more than half as
#: fast as one with a tenth.
PER_S, SHARE = 2.5, 0.1


def rollout(seed: int, requests: int, slower: float) -> tuple[Rollout, set[str]]:
    """One engine an arm, the candidate with a tenth of the keys. Returns every verdict too."""
    found = Rollout("m", "v2", PromotionRule(share=SHARE))
    arms: dict[ArmName, float] = {"stable": 1.0, "candidate": slower}
    return found, run_rollout(found, requests_of(seed, requests, PER_S, SHARE, arms))


def test_an_equal_candidate_with_a_tenth_of_the_load_is_no_other():
    """100 rollouts of engines that are alike, 20 looks each: at most 5 may say anything (none does;
    all of them without strata of load).
    """
    decided = 0
    for seed in range(100):
        found, verdicts = rollout(seed, 2000, slower=1.0)
        decided += found.decision is not None or verdicts > {"no difference seen yet"}
        stable, candidate = (found.comparison.level(arm, "tokens_per_s") for arm in ARMS)
        assert stable is not None and candidate is not None and candidate > 1.5 * stable
    assert decided <= 5


def test_a_slower_candidate_with_a_tenth_of_the_load_is_rolled_back():
    """1.3 times slower at equal load, and yet the faster one as it is: found by most rollouts among
    5,000 requests, 500 of them its own.
    """
    states = []
    for seed in range(5):
        found, verdicts = rollout(seed, 5000, slower=1.3)
        assert "better" not in verdicts
        stable, candidate = (found.comparison.level(arm, "tokens_per_s") for arm in ARMS)
        assert stable is not None and candidate is not None and candidate > stable
        states.append(found.state)
    assert states.count("rolled_back") >= 4


def test_arms_that_never_had_equally_much_to_do_are_not_compared():
    comparison = Comparison()
    for number in range(600):
        busy = RequestOutcome(True, 10, 2.0, 0.5, 0.1, load=8.0, first_load=8.0)
        comparison.add("stable", number % Comparison.clusters, busy)
        alone = RequestOutcome(True, 10, 1.0, 0.1, 0.1)
        comparison.add("candidate", number % Comparison.clusters, alone)
    for name in ("tokens_per_s", "first_token_s", "token_cost"):
        assert comparison.interval(name) is None
        assert comparison.matched("candidate", name) == 0
    assert comparison.interval("errors") is not None
    for number in range(60):
        comparison.add("stable", number, RequestOutcome(True, 10, 1.0, 0.1, 0.1))
    speed = comparison.interval("tokens_per_s")
    assert speed is not None and speed.estimate == pytest.approx(1.0)
    assert comparison.matched("stable", "tokens_per_s") == 60
    # What is left of a load that is mostly eight times as high cannot be told from a difference.
    assert speed.low < 0.97 and speed.high > 1.03


@pytest.mark.parametrize(
    ("name", "interval", "breaks", "keeps"),
    [
        ("tokens_per_s", Interval(0.9, 0.86, 0.94), True, False),
        ("tokens_per_s", Interval(0.93, 0.9, 0.96), False, False),
        ("tokens_per_s", Interval(1.0, 0.96, 1.04), False, True),
        ("first_token_s", Interval(1.2, 1.1, 1.3), True, False),
        ("first_token_s", Interval(1.0, 0.96, 1.04), False, True),
        ("errors", Interval(0.1, 0.06, 0.14), True, False),
        ("errors", Interval(0.0, -0.02, 0.02), False, True),
    ],
)
def test_margins(name: str, interval: Interval, breaks: bool, keeps: bool):
    figure = FIGURES[name]
    assert interval.breaks(figure, 0.05) is breaks
    assert interval.keeps(figure, 0.05) is keeps
