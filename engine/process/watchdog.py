"""When a core that says nothing is taken to hang."""

from __future__ import annotations

from typing import Any

#: By default a core may be silent for so many seconds, or so many times as long as its longest
#: step, but not for more than so many seconds longer than that step.
_LEAST_S, _TIMES, _MOST_MORE_S = 10.0, 8.0, 120.0
#: Seconds that a bucket's first step may take: programs are set up, or even compiled, in it.
_FIRST_STEP_S = 120.0


class Watchdog:
    """Adds up a core's silence, and knows how much is too much.

    A core that works reports every step, and one that has nothing to do ticks once a second, so
    silence means a step that does not end. Only time in which this process could have heard
    something counts: the caller says how much that was.
    """

    def __init__(self, step_timeout_s: float):
        """step_timeout_s: the setting; 0: learn from the longest step."""
        #: Seconds since the core last said anything.
        self.silence = 0.0
        #: Seconds of the longest step seen, of this core and those before it.
        self.longest = 0.0
        self._step_timeout_s = step_timeout_s
        # Number of the step that is the first of its bucket and not done, 0 if there is none.
        self._first_step = 0

    @property
    def limit(self) -> float:
        """Seconds of silence that are borne now."""
        learnt = max(_LEAST_S, min(_TIMES * self.longest, self.longest + _MOST_MORE_S))
        limit = self._step_timeout_s or learnt
        return max(limit, _FIRST_STEP_S) if self._first_step else limit

    @property
    def overdue(self) -> bool:
        return self.silence > self.limit

    def core_ready(self) -> None:
        """A new core is ready."""
        self.silence = 0.0
        self._first_step = 0

    def heard(self) -> None:
        """The core said something."""
        self.silence = 0.0

    def waited(self, seconds: float) -> None:
        """So many seconds went by in which nothing came."""
        self.silence += seconds

    def first_step(self, step: int) -> None:
        """The core is about to run this step, the first of its bucket."""
        self._first_step = step

    def step_done(self, step: int, record: Any) -> None:
        """A step was committed. step: its number in the core's own count. record: its
        `records.STEP_DTYPE`.
        """
        if step >= self._first_step:
            self._first_step = 0
        if not record["compiled"]:
            seconds = float(record["device_s"] + record["gap_s"] + record["commit_s"])
            self.longest = max(self.longest, seconds)
