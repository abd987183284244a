"""Detects cores that hang, by their silence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

#: Limit of a core's silence: least seconds, a factor of the longest step, and most seconds more.
_LEAST_S, _TIMES, _MOST_MORE_S = 10.0, 8.0, 120.0
#: Seconds allowed for a bucket's first step, in which programs are set up or even compiled.
_FIRST_STEP_S = 60.0
#: Limit of silence at a later start: least seconds, and a factor of the longest start.
_LEAST_START_S, _START_TIMES = 120.0, 3.0
#: Factor of the limit for a core that waits for engines it shares experts with: the supervisor of
#: the hanging engine should end that engine first, so that the others know the reason.
_OTHERS_TIMES = 2.0


@dataclass(eq=False)
class Watchdog:
    """Adds up a core's silence and compares it with a limit. A core reports every step, and ticks
    once a second when idle, so silence means a step that does not end. Time in which this process
    could not receive messages does not count.
    """

    #: The setting; 0: learn from the longest step.
    step_timeout_s: float
    #: Limit of the first start; 0: no limit.
    start_timeout_s: float = 0.0
    #: Seconds since the core's last message.
    silence: float = 0.0
    #: Seconds for which the core has waited for other engines, by its own report.
    awaited: float = 0.0
    #: Seconds of the longest step seen, of this core and those before it.
    longest: float = 0.0
    #: Seconds of the longest start seen; 0 before the first core was ready.
    longest_start: float = 0.0
    #: A core is starting, and for how long.
    _starts: bool = False
    _started_s: float = 0.0
    #: The core's last message said that it waits for other engines.
    _awaits: bool = False
    #: Number of the unfinished step that is the first of its bucket; 0: none.
    _first_step: int = 0

    @property
    def limit(self) -> float:
        """Seconds of silence that are allowed now."""
        if self._starts:
            return self._start_limit
        limit = self.step_timeout_s or self._learnt_limit
        return max(limit, _FIRST_STEP_S) if self._first_step else limit

    @property
    def _start_limit(self) -> float:
        """The limit of a start, which reports each tensor and program; the first has no measure."""
        if self.longest_start:
            return max(_LEAST_START_S, _START_TIMES * self.longest_start)
        return self.start_timeout_s or math.inf

    @property
    def _learnt_limit(self) -> float:
        return max(_LEAST_S, min(_TIMES * self.longest, self.longest + _MOST_MORE_S))

    @property
    def overdue(self) -> bool:
        return self.silence > self.limit or self.others_overdue

    @property
    def others_overdue(self) -> bool:
        """Whether the core has waited too long for another engine, which hangs."""
        return self.awaited > _OTHERS_TIMES * self.limit

    def core_starts(self) -> None:
        self.silence = self.awaited = self._started_s = 0.0
        self._awaits = False
        self._starts = True
        self._first_step = 0

    def core_ready(self) -> None:
        self.silence = 0.0
        self._starts = False
        self.longest_start = max(self.longest_start, self._started_s)

    def heard(self, *, awaits_others: bool = False) -> None:
        """Note a message of the core. awaits_others: it says that it waits for other engines."""
        self.silence = 0.0
        self._awaits = awaits_others
        if not awaits_others:
            self.awaited = 0.0

    def waited(self, seconds: float) -> None:
        """Note that no message came for so many seconds."""
        self.silence += seconds
        if self._awaits:
            self.awaited += seconds
        self._started_s += seconds

    def first_step(self, step: int) -> None:
        """The core is about to run this step, the first of its bucket."""
        self._first_step = step

    def step_done(self, step: int, record: np.void) -> None:
        """A step was committed. step: the core's own number; record: `records.STEP_DTYPE`."""
        if step >= self._first_step:
            self._first_step = 0
        if not record["compiled"]:
            seconds = float(record["device_s"] + record["gap_s"] + record["commit_s"])
            self.longest = max(self.longest, seconds)
