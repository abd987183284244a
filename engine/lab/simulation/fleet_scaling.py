"""When a simulated fleet starts replicas and lets them go."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from jitney.engine.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """More replicas when newcomers would wait, or when few seats are left; fewer after a calm
    time. Times in seconds.
    """

    #: Predicted wait, of the tenth of the replicas where it is longest, above which replicas are
    #: started.
    target_wait_s: float = 1.0
    #: Open requests over seats that the fleet is sized for, and above which replicas are started;
    #: 1 and more: only by the predicted wait.
    fill: float = 0.75
    #: Between two looks.
    every_s: float = 10.0
    #: So long fewer replicas must have been enough before one goes.
    calm_s: float = 300.0
    least: int = 1
    most: int = 10_000

    def __post_init__(self) -> None:
        if not 0 < self.fill < math.inf or not 1 <= self.least <= self.most:
            raise ConfigError("scaling needs a fill above 0 and 1 <= least <= most replicas")
        if min(self.target_wait_s, self.every_s, self.calm_s) <= 0:
            raise ConfigError("the times of scaling must be more than 0")

    def wanted(self, ready: int, waits: Sequence[float], fill: float) -> int:
        """Replicas that the present load asks for. waits: predicted, one for each replica that is
        ready; fill: open requests over their seats, more than 1 where some wait."""
        if not ready:
            return self.least
        sized = math.ceil(ready * fill / min(self.fill, 1.0))
        if _ninth_tenth(waits) > self.target_wait_s:
            sized = max(sized, ready + 1)
        elif self.fill >= 1.0:
            sized = min(sized, ready)
        return max(self.least, min(self.most, sized))

    def scaler(self) -> _Scaler:
        """What follows the rule from now on."""
        return _Scaler(self)


def _ninth_tenth(waits: Sequence[float]) -> float:
    """The wait that a tenth of the replicas exceed."""
    ordered = sorted(waits)
    return ordered[math.ceil(0.9 * len(ordered)) - 1] if ordered else 0.0


@dataclass(slots=True)
class _Scaler:
    """Follows a rule; remembers what was wanted lately, so that a lull does not cost a start."""

    rule: ScalingRule
    #: (time, replicas wanted), of the last `calm_s`.
    _lately: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])

    def change(
        self, now: float, ready: int, starting: int, waits: Sequence[float], fill: float
    ) -> int:
        """Replicas to start (positive) or to let go (negative)."""
        wanted = self.rule.wanted(ready, waits, fill)
        self._lately.append((now, wanted))
        while self._lately[0][0] < now - self.rule.calm_s:
            self._lately.popleft()
        there = ready + starting
        if wanted > there:
            return wanted - there
        if starting or self._lately[0][0] > now - self.rule.calm_s + self.rule.every_s:
            return 0
        return min(0, max(count for _, count in self._lately) - there)
