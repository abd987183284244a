"""The rollout of a candidate: which keys it gets, how it compares, and the decision about it.

A rollout runs until it is decided, by its rule or by hand. A promoted candidate gets every request,
a candidate that is rolled back none. A restart resets the rollout. This module has no clock, tasks
or files: `engine.fleet.rollout.candidate` passes it requests and the time,
`engine.fleet.rollout.rollout_keeper` stores the result of `saved`.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Literal, NamedTuple

from jitney.engine.common.engine_info import short_digest
from jitney.engine.common.requests import JsonDict
from jitney.engine.fleet.rollout.comparison import (
    ARMS,
    FIGURES,
    ArmName,
    Comparison,
    Interval,
    RequestOutcome,
)

_log = logging.getLogger("jitney.fleet")

type RolloutState = Literal["running", "promoted", "rolled_back"]
type Action = Literal["promote", "roll_back", "restart"]
#: Action -> the state after it.
_STATES: Mapping[Action, RolloutState] = {
    "promote": "promoted",
    "roll_back": "rolled_back",
    "restart": "running",
}
_IN_WORDS: Mapping[RolloutState, str] = {
    "running": "begins anew",
    "promoted": "is promoted",
    "rolled_back": "is rolled back",
}
#: Most comparisons that are kept for charts; once there are as many, every second one is dropped.
_MOST_LOOKS = 240
_HOUR_S = 3600.0
#: Version of the format of `saved`.
_VERSION = 2


class KeyPlace(NamedTuple):
    """The arm and the cluster of a key; fixed while the rollout runs."""

    arm: ArmName
    #: Index of the cluster, 0 to `Comparison.clusters` - 1.
    cluster: int


@dataclass(frozen=True, slots=True)
class PromotionRule:
    """The conditions under which a candidate is promoted or rolled back."""

    #: Share of the keys that the candidate gets while the rollout runs.
    share: float = 0.05
    #: Least requests of the candidate before it may be promoted.
    min_requests: int = 500
    #: Figure -> the share by which it may be worse; for errors, the difference of shares.
    may_lose: Mapping[str, float] = field(
        default_factory=lambda: {"tokens_per_s": 0.05, "first_token_s": 0.1, "errors": 0.01}
    )
    #: Whether the rule promotes by itself; whether it rolls back by itself.
    promotes: bool = True
    rolls_back: bool = True
    #: Hours after which an undecided candidate is rolled back; 0: never.
    undecided_after_h: float = 0.0


@dataclass(frozen=True, slots=True)
class _Decision:
    state: RolloutState
    by: Literal["rule", "hand"]
    reason: str
    #: time.time().
    at: float


class _Look(NamedTuple):
    """The comparison at one time. intervals: by figure; figures without one are absent."""

    at: float
    intervals: dict[str, Interval]


class Rollout:
    """The rollout of one model's candidate. name: the candidate's name."""

    def __init__(
        self, model: str, name: str, rule: PromotionRule, clock: Callable[[], float] = time.time
    ) -> None:
        self.model = model
        self.name = name
        self.rule = rule
        self.state: RolloutState = "running"
        self.decision: _Decision | None = None
        self.comparison = Comparison()
        #: Arm -> digests of its engines' configurations; only those that engines report.
        self.configs: dict[ArmName, tuple[str, ...]] = dict.fromkeys(ARMS, ())
        self._clock = clock
        self.since = clock()
        self._looks: list[_Look] = []

    def place(self, key: bytes) -> KeyPlace:
        """The arm and cluster of a key. A larger share only moves keys to the candidate."""
        salt = f"{self.model}\0{self.name}\0".encode()
        digest = hashlib.blake2b(salt + key, digest_size=9).digest()
        part = int.from_bytes(digest[:8]) / 2**64
        arm: ArmName = "candidate" if part < self.share else "stable"
        return KeyPlace(arm, digest[8] % Comparison.clusters)

    @property
    def share(self) -> float:
        """Share of the keys that the candidate gets now."""
        return {"running": self.rule.share, "promoted": 1.0, "rolled_back": 0.0}[self.state]

    def observe(self, place: KeyPlace, outcome: RequestOutcome) -> None:
        """Record a finished request. Requests after the decision are ignored."""
        if self.state == "running":
            self.comparison.add(place.arm, place.cluster, outcome)

    def learn(self, arm: ArmName, configs: Sequence[str]) -> None:
        """Set the configuration digests of an arm's engines. If they have changed, the measurements
        are of another configuration, and the comparison starts over.
        """
        previous, digests = self.configs[arm], tuple(sorted(set(configs)))
        if not digests or digests == previous:
            return
        self.configs[arm] = digests
        if previous and self.state == "running":
            self._begin_anew()
            _log.info(
                "rollout %s: the configuration of the %s arm is %s now, it was %s; candidate %s is "
                "compared anew",
                self.model,
                arm,
                ", ".join(map(short_digest, digests)),
                ", ".join(map(short_digest, previous)),
                self.name,
            )

    def look(self) -> _Decision | None:
        """Compare the arms, and decide if the rule's conditions hold. It may be called often."""
        if self.state != "running":
            return None
        intervals = self.intervals()
        self._keep(_Look(self._clock(), intervals))
        action = self._by_rule(intervals)
        return self._decide(action[0], "rule", action[1]) if action else None

    def intervals(self) -> dict[str, Interval]:
        """Interval of each figure; figures without one are absent."""
        by_figure = {name: self.comparison.interval(name) for name in FIGURES}
        return {name: interval for name, interval in by_figure.items() if interval is not None}

    def decide(self, action: Action) -> _Decision:
        return self._decide(action, "hand", "")

    def _by_rule(self, intervals: Mapping[str, Interval]) -> tuple[Action, str] | None:
        rule = self.rule
        broken = [name for name in rule.may_lose if self._breaks(name, intervals)]
        if broken and rule.rolls_back:
            return "roll_back", f"worse than allowed: {', '.join(broken)}"
        if rule.promotes and self._is_proven(intervals):
            return "promote", "no figure is worse than allowed"
        if rule.undecided_after_h and rule.rolls_back and not broken:
            hours = (self._clock() - self.since) / _HOUR_S
            if hours >= rule.undecided_after_h:
                return "roll_back", f"undecided after {hours:.1f} h"
        return None

    def _breaks(self, name: str, intervals: Mapping[str, Interval]) -> bool:
        interval = intervals.get(name)
        return interval is not None and interval.breaks(FIGURES[name], self.rule.may_lose[name])

    def _is_proven(self, intervals: Mapping[str, Interval]) -> bool:
        """Whether every figure with requests is known to be within its margin."""
        if self.comparison.requests("candidate") < self.rule.min_requests:
            return False
        return all(
            name in intervals and intervals[name].keeps(FIGURES[name], margin)
            for name, margin in self.rule.may_lose.items()
            if self._has_requests(name)
        )

    def _has_requests(self, name: str) -> bool:
        return any(self.comparison.sums[arm][name].requests for arm in ARMS)

    def _decide(self, action: Action, by: Literal["rule", "hand"], why: str) -> _Decision:
        intervals = self.intervals()
        full_reason = "; ".join(filter(None, (why, self._in_words(intervals))))
        self.state = _STATES[action]
        decision = self.decision = _Decision(self.state, by, full_reason, self._clock())
        _log.info(
            "rollout %s: candidate %s %s by %s: %s",
            self.model,
            self.name,
            _IN_WORDS[self.state],
            by,
            full_reason,
        )
        if action == "restart":
            self._begin_anew()
        return decision

    def _begin_anew(self) -> None:
        self.comparison = Comparison()
        self.since = self._clock()
        self._looks.clear()

    def _in_words(self, intervals: Mapping[str, Interval]) -> str:
        """Every figure with its interval, and the requests of each arm."""
        parts = [self._figure_in_words(name, intervals.get(name)) for name in FIGURES]
        counts = [f"{self.comparison.requests(arm)} requests of {arm}" for arm in ARMS]
        return f"{', '.join(parts)}; {', '.join(counts)}"

    def _figure_in_words(self, name: str, interval: Interval | None) -> str:
        verdict = self.comparison.verdict(name, interval)
        if interval is None:
            return f"{name} {verdict}"
        values = f"{interval.estimate:.3f} ({interval.low:.3f} to {interval.high:.3f})"
        how = "times" if FIGURES[name].is_ratio else "apart"
        return f"{name} {values} {how}, {verdict}"

    def _keep(self, look: _Look) -> None:
        self._looks.append(look)
        if len(self._looks) >= _MOST_LOOKS:
            del self._looks[1::2]

    def report(self) -> JsonDict:
        """The report for the page and the API (docs/rollout.md)."""
        intervals = self.intervals()
        rule, decision = self.rule, self.decision
        return {
            "model": self.model,
            "candidate": self.name,
            "state": self.state,
            "share": self.share,
            "since": self.since,
            "confidence": Comparison.confidence,
            "decision": None if decision is None else asdict(decision),
            "rule": {
                "share": rule.share,
                "min_requests": rule.min_requests,
                "may_lose": dict(rule.may_lose),
                "promote": "rule" if rule.promotes else "hand",
                "roll_back": "rule" if rule.rolls_back else "hand",
                "undecided_after_h": rule.undecided_after_h,
            },
            "arms": {arm: self._arm_report(arm) for arm in ARMS},
            "figures": [self._figure_report(name, intervals.get(name)) for name in FIGURES],
            "looks": [_look_report(look) for look in self._looks],
        }

    def _arm_report(self, arm: ArmName) -> JsonDict:
        return {
            "configs": list(self.configs[arm]),
            "requests": self.comparison.requests(arm),
            "tokens": self.comparison.tokens[arm],
        }

    def _figure_report(self, name: str, interval: Interval | None) -> JsonDict:
        figure, margin = FIGURES[name], self.rule.may_lose.get(name)
        return {
            "name": name,
            "unit": figure.unit,
            "kind": "ratio" if figure.is_ratio else "difference",
            "better": "more" if figure.more_is_better else "less",
            "stable": self.comparison.level("stable", name),
            "candidate": self.comparison.level("candidate", name),
            "requests": {arm: self.comparison.sums[arm][name].requests for arm in ARMS},
            "matched": {arm: self.comparison.matched(arm, name) for arm in ARMS},
            "estimate": None if interval is None else interval.estimate,
            "low": None if interval is None else interval.low,
            "high": None if interval is None else interval.high,
            "equal": figure.equal,
            "worst_allowed": None if margin is None else figure.worst(margin),
            "verdict": self.comparison.verdict(name, interval),
        }

    def saved(self) -> JsonDict:
        """The state that survives a restart of the fleet, as JSON."""
        decision = self.decision
        return {
            "version": _VERSION,
            "model": self.model,
            "candidate": self.name,
            "state": self.state,
            "since": self.since,
            "decision": None if decision is None else asdict(decision),
            "configs": {arm: list(self.configs[arm]) for arm in ARMS},
            "comparison": self.comparison.saved(),
        }

    def restore(self, saved: JsonDict) -> bool:
        """Continue from the result of `saved`; False if it is of another candidate. Raises
        KeyError, TypeError or ValueError for anything else.
        """
        if saved["version"] != _VERSION:
            raise ValueError(f"written by another version ({saved['version']})")
        if (saved["model"], saved["candidate"]) != (self.model, self.name):
            return False
        if saved["state"] not in _STATES.values():
            raise ValueError("no state of a rollout")
        comparison = Comparison.restored(saved["comparison"])
        decision = saved["decision"]
        self.decision = None if decision is None else _Decision(**decision)
        self.configs = {arm: tuple(map(str, saved["configs"][arm])) for arm in ARMS}
        self.since = float(saved["since"])
        self.state, self.comparison = saved["state"], comparison
        return True


def _look_report(look: _Look) -> JsonDict:
    """Estimate, low and high of each interval."""
    values = {name: list(astuple(interval)) for name, interval in look.intervals.items()}
    return {"at": look.at, "intervals": values}
