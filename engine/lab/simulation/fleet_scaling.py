"""When a simulated fleet starts replicas and lets them go."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from jitney.engine.common.errors import ConfigError

#: What counts of requests keep of themselves from one decision to the next.
_FADE = 0.5


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """More replicas when requests would wait or seats are few; fewer after a calm time."""

    #: Replicas are started when the 90th percentile of their predicted waits is above this.
    target_wait_s: float = 1.0
    #: Seats in use over seats that the fleet is sized for; 1 and more: only the wait counts.
    fill: float = 0.75
    #: Between two decisions.
    every_s: float = 10.0
    #: A replica goes when fewer have been enough for so long.
    calm_s: float = 300.0
    least: int = 1
    most: int = 10_000

    def __post_init__(self) -> None:
        if not 0 < self.fill < math.inf or not 1 <= self.least <= self.most:
            raise ConfigError("scaling needs a fill above 0 and 1 <= least <= most replicas")
        if min(self.target_wait_s, self.every_s, self.calm_s) <= 0:
            raise ConfigError("the times of scaling must be more than 0")

    def wanted(self, ready: int, waits: Sequence[float], fill: float) -> int:
        """Replicas that the present load asks for. waits: predicted, one for each ready replica;
        fill: seats that the traffic needs over their seats.
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
    """Seats that the traffic takes where none has to wait, by Little's law: those in use, times
    the requests that came for each that ended. What waits is not counted: it is served once
    replicas that start now are ready, and would be counted again at each decision until then.
    """

    #: Fading counts of requests that came and that ended.
    _came: float = 0.0
    _ended: float = 0.0

    def observe(self, came: int, ended: int) -> None:
        """So many requests came and ended since the last decision."""
        self._came = _FADE * self._came + came
        self._ended = _FADE * self._ended + ended

    def of(self, in_use: float) -> float:
        """in_use: seats in use, or their share of all; the demand in the same unit."""
        return in_use * self._came / self._ended if self._ended else in_use


@dataclass(slots=True)
class Scaler:
    """Follows a rule; a short lull stops no replica, because a start would follow."""

    rule: ScalingRule
    #: (time, replicas wanted), of the last `calm_s`.
    _recent: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])

    def change(
        self, now: float, ready: int, starting: int, waits: Sequence[float], fill: float
    ) -> int:
        """Replicas to start (positive) or to let go (negative)."""
        rule, recent = self.rule, self._recent
        wanted = rule.wanted(ready, waits, fill)
        recent.append((now, wanted))
        while recent[0][0] < now - rule.calm_s:
            recent.popleft()
        present = ready + starting
        if wanted > present:
            return wanted - present
        if starting or recent[0][0] > now - rule.calm_s + rule.every_s:
            return 0
        return min(0, max(count for _, count in recent) - present)
