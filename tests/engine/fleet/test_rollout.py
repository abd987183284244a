"""A candidate beside a model: its keys, when the rule decides, and what a restart keeps."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

import numpy as np
import pytest

from jitney.engine.fleet.rollout.comparison import ARMS, Comparison, RequestOutcome
from jitney.engine.fleet.rollout.rollout import KeyPlace, PromotionRule, Rollout

HOUR_S = 3600.0


class Clock:
    """Seconds that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def rollout_of(
    rule: PromotionRule | None = None, clock: Callable[[], float] | None = None
) -> Rollout:
    return Rollout("m", "v2", rule or PromotionRule(), clock or Clock())


def fill(rollout: Rollout, requests: int, *, slower: float = 0.0, failing: float = 0.0) -> None:
    """The same number of requests in both arms; slower, failing: of the candidate's."""
    random = np.random.default_rng(7)
    for number in range(requests):
        for arm in ARMS:
            is_candidate = arm == "candidate"
            seconds = 2.0 * float(np.exp(0.2 * random.standard_normal()))
            if is_candidate:
                seconds /= 1 - slower
            ok = not (is_candidate and random.random() < failing)
            place = KeyPlace(arm, number % Comparison.clusters)
            rollout.observe(place, RequestOutcome(ok, 20 if ok else 0, seconds, seconds / 10, 0.01))


def test_a_key_always_belongs_to_the_same_arm_in_every_process():
    """The numbers are those of another process: no hash of Python's own."""
    places = [rollout_of().place(f"user-{number}".encode()) for number in range(4000)]
    again = rollout_of()
    assert [again.place(f"user-{number}".encode()) for number in range(4000)] == places
    shares = sum(place.arm == "candidate" for place in places) / 4000
    assert 0.035 < shares < 0.065
    assert len({place.cluster for place in places}) == Comparison.clusters
    firsts = [number for number, place in enumerate(places) if place.arm == "candidate"][:5]
    assert firsts == FIRST_CANDIDATES


def test_a_larger_share_keeps_the_keys_that_were_there():
    small, large = rollout_of(PromotionRule(share=0.05)), rollout_of(PromotionRule(share=0.3))
    keys = [f"user-{number}".encode() for number in range(2000)]
    kept = [large.place(key).arm for key in keys if small.place(key).arm == "candidate"]
    assert kept and set(kept) == {"candidate"}


def test_another_candidate_gets_other_keys():
    keys = [f"user-{number}".encode() for number in range(2000)]
    one, two = (
        Rollout("m", "v2", PromotionRule(share=0.3)),
        Rollout("m", "v3", PromotionRule(share=0.3)),
    )
    both = sum(one.place(key).arm == two.place(key).arm == "candidate" for key in keys)
    assert 0.05 < both / 2000 < 0.13  # 0.3 squared


def test_a_slower_candidate_is_rolled_back_in_one_line(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    rollout = rollout_of()
    fill(rollout, 600, slower=0.1)
    decision = rollout.look()
    assert decision is not None and (decision.state, decision.by) == ("rolled_back", "rule")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "\n" not in line and "candidate v2 is rolled back by rule" in line
    assert "worse than allowed: tokens_per_s" in line and "600 requests of candidate" in line
    interval = rollout.intervals()["tokens_per_s"]
    assert f"{interval.estimate:.3f} ({interval.low:.3f} to {interval.high:.3f})" in line
    assert interval.low < 0.9 < interval.high < 0.95
    assert rollout.share == 0 and rollout.place(b"any").arm == "stable"
    assert rollout.look() is None


def test_an_equal_candidate_is_promoted_once_enough_requests_came():
    rollout = rollout_of(PromotionRule(min_requests=1000))
    fill(rollout, 999)
    assert rollout.look() is None and rollout.state == "running"
    fill(rollout, 201)
    decision = rollout.look()
    assert decision is not None and decision.state == "promoted"
    assert rollout.share == 1 and rollout.place(b"any").arm == "candidate"


def test_a_little_slower_one_is_neither_while_nobody_knows():
    """4 % slower, where 5 % are allowed: no interval of a few requests tells."""
    rollout = rollout_of(PromotionRule(min_requests=100))
    fill(rollout, 300, slower=0.04)
    assert rollout.look() is None and rollout.state == "running"


def test_by_hand_alone():
    rollout = rollout_of(PromotionRule(promotes=False, rolls_back=False, min_requests=100))
    fill(rollout, 600, slower=0.3)
    assert rollout.look() is None
    assert rollout.decide("promote").by == "hand"
    assert rollout.share == 1
    assert rollout.decide("roll_back").state == "rolled_back"
    decision = rollout.decide("restart")
    assert decision.state == "running" and "600 requests of candidate" in decision.reason
    assert rollout.share == 0.05 and rollout.comparison.requests("stable") == 0


def test_a_failing_candidate_goes_long_before_it_could_be_promoted():
    rollout = rollout_of()
    fill(rollout, 60, failing=0.5)
    decision = rollout.look()
    assert decision is not None and "worse than allowed: errors" in decision.reason


def test_who_stays_undecided_is_rolled_back_in_the_end():
    clock = Clock()
    rollout = rollout_of(PromotionRule(undecided_after_h=24.0), clock)
    fill(rollout, 100)
    clock.now += 23 * HOUR_S
    assert rollout.look() is None
    clock.now += 2 * HOUR_S
    decision = rollout.look()
    assert decision is not None and "undecided after 25.0 h" in decision.reason


def test_speeds_that_cannot_be_compared_are_told_and_decide_nothing():
    """Each arm has as much to do as the other never has."""
    clock = Clock()
    rollout = rollout_of(PromotionRule(min_requests=500, undecided_after_h=24.0), clock)

    def verdicts() -> dict[str, str]:
        return {figure["name"]: figure["verdict"] for figure in rollout.report()["figures"]}

    def observe(numbers: range) -> None:
        for number in numbers:
            place = number % Comparison.clusters
            busy = RequestOutcome(True, 20, 3.0, 0.5, load=8.0, first_load=8.0)
            rollout.observe(KeyPlace("stable", place), busy)
            rollout.observe(KeyPlace("candidate", place), RequestOutcome(True, 20, 1.0, 0.1))

    observe(range(10))
    assert verdicts()["tokens_per_s"] == verdicts()["errors"] == "not known yet"
    observe(range(10, 1200))
    apart = "not compared: loads hardly overlap"
    assert verdicts()["tokens_per_s"] == verdicts()["first_token_s"] == apart
    assert verdicts()["errors"] == "no difference seen yet"
    assert rollout.look() is None and rollout.state == "running"
    clock.now += 25 * HOUR_S
    decision = rollout.look()
    assert decision is not None and decision.state == "rolled_back"
    assert f"undecided after 25.0 h; tokens_per_s {apart}, first_token_s {apart}" in decision.reason


def test_figures_that_no_request_has_do_not_hold_up_a_promotion():
    """Nobody streams: no first token is ever seen."""
    rollout = rollout_of(PromotionRule(min_requests=500))
    for number in range(1200):
        for arm in ARMS:
            rollout.observe(
                KeyPlace(arm, number % Comparison.clusters), RequestOutcome(True, 20, 1.0)
            )
    decision = rollout.look()
    assert decision is not None and decision.state == "promoted"
    assert "first_token_s not known yet" in decision.reason


def test_another_configuration_is_compared_anew(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    rollout = rollout_of()
    rollout.learn("candidate", ["a" * 64])
    fill(rollout, 50)
    rollout.learn("candidate", [])  # nobody answered
    rollout.learn("candidate", ["a" * 64, "a" * 64])
    assert rollout.comparison.requests("candidate") == 50
    rollout.learn("candidate", ["b" * 64])
    assert rollout.comparison.requests("candidate") == 0
    assert "of the candidate arm is bbbbbbbbbbbb now, it was aaaaaaaaaaaa" in caplog.text


def test_what_is_kept_goes_on_and_only_for_the_same_candidate():
    rollout = rollout_of()
    rollout.learn("stable", ["a" * 64])
    fill(rollout, 200, slower=0.05)
    saved = json.loads(json.dumps(rollout.saved()))
    later = rollout_of(clock=lambda: 5000.0)
    assert later.restore(saved)
    assert later.intervals() == rollout.intervals() and later.since == rollout.since
    assert later.configs == rollout.configs
    assert not Rollout("m", "v3", PromotionRule()).restore(saved)
    rollout.decide("promote")
    again = rollout_of()
    again.restore(json.loads(json.dumps(rollout.saved())))
    assert (again.state, again.decision) == ("promoted", rollout.decision)
    for wrong in ({}, {"version": 99}, saved | {"state": "odd"}, saved | {"comparison": 3}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            rollout_of().restore(wrong)


#: Of keys "user-0", "user-1" and so on.
FIRST_CANDIDATES = [0, 20, 24, 26, 27]
