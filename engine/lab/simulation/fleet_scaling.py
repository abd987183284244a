"""Decides when a simulated fleet starts and stops replicas."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from jitney.engine.common.errors import ConfigError

#: Decay factor of the request counts between two decisions.
_FADE = 0.5


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """Rule that starts replicas if requests would wait or few seats are free, and stops some after
    a calm time.
    """

    #: Replicas start if the 90th percentile of the predicted waits is above this, seconds.
    target_wait_s: float = 1.0
    #: Target for seats in use divided by seats; 1 and more: only the wait counts.
    fill: float = 0.75
    #: Seconds between two decisions.
    every_s: float = 10.0
    #: Replicas stop if fewer have been enough for this time, seconds.
    calm_s: float = 300.0
    least: int = 1
    most: int = 10_000

    def __post_init__(self) -> None:
        if not 0 < self.fill < math.inf or not 1 <= self.least <= self.most:
            raise ConfigError("scaling needs a fill above 0 and 1 <= least <= most replicas")
        if min(self.target_wait_s, self.every_s, self.calm_s) <= 0:
            raise ConfigError("the times of scaling must be more than 0")

    def wanted(self, ready: int, waits: Sequence[float], fill: float) -> int:
        """Number of replicas for the present load. waits: predicted wait of each ready replica;
        fill: seats that the traffic needs, divided by the ready replicas' seats.
        """
        if not ready:
            return self.least
        sized = math.ceil(ready * fill / min(self.fill, 1.0))
        if sorted(waits)[math.ceil(0.9 * len(waits)) - 1] > self.target_wait_s:
            sized = max(sized, ready + 1)
        elif self.fill >= 1.0:
            sized = min(sized, ready)
        return max(self.least, min(self.most, sized))


@dataclass(slots=True)
class SeatDemand:
    """Seats that the traffic needs without waiting, by Little's law: seats in use, times arrived
    requests divided by ended ones. Waiting requests are not counted: starting replicas will serve
    them, and until then each decision would count them again.
    """

    #: Decaying counts of requests that arrived and that ended.
    _came: float = 0.0
    _ended: float = 0.0

    def observe(self, came: int, ended: int) -> None:
        """Add the requests that arrived and that ended since the last decision."""
        self._came = _FADE * self._came + came
        self._ended = _FADE * self._ended + ended

    def of(self, in_use: float) -> float:
        """The demand in the unit of `in_use`: seats in use, or their share of all seats."""
        return in_use * self._came / self._ended if self._ended else in_use


@dataclass(slots=True)
class Scaler:
    """Applies a rule. A short lull stops no replica, since it would soon have to start again."""

    rule: ScalingRule
    #: (time, replicas by the rule) of the last `calm_s`.
    _recent: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])

    def change(
        self, now: float, ready: int, starting: int, waits: Sequence[float], fill: float
    ) -> int:
        """Number of replicas to start (positive) or to stop (negative)."""
        rule, recent = self.rule, self._recent
        target = rule.wanted(ready, waits, fill)
        recent.append((now, target))
        while recent[0][0] < now - rule.calm_s:
            recent.popleft()
        present = ready + starting
        if target > present:
            return target - present
        if starting or recent[0][0] > now - rule.calm_s + rule.every_s:
            return 0
        return min(0, max(count for _, count in recent) - present)
