"""How many rows a step may have on a device whose memory was too small for one."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

_log = logging.getLogger("jitney.core")

#: Seconds without a shortage after which the next larger step is tried again: at first, and at
#: most. Each shortage that follows a trial doubles them, because it costs all sequences a step
#: and their pages.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 120.0, 3600.0


class RowLimit:
    """All rows that a bucket has, or fewer for a while."""

    def __init__(self, sizes: Sequence[int]):
        """sizes: rows of the buckets that prompts use, ascending."""
        #: Rows that a step has at most now.
        self.rows = sizes[-1]
        self._sizes = sizes
        self._wait_s = _FIRST_WAIT_S
        #: Clock seconds at which the next larger step is tried; infinite where there is none.
        self._grows_at = math.inf
        #: A larger step has been tried since the last shortage.
        self._tried = False

    def shrink(self, now: float) -> bool:
        """A step was too much: no more rows than the next smaller bucket has. False if there is
        none.
        """
        smaller = [size for size in self._sizes if size < self.rows]
        if not smaller:
            return False
        if self._tried:
            self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
        self._tried = False
        self.rows = smaller[-1]
        self._grows_at = now + self._wait_s
        _log.warning(
            "a step was too much for the device's memory: steps with prompt rows have at most %d "
            "rows; more are tried in %.0f s",
            self.rows,
            self._wait_s,
        )
        return True

    def pass_time(self, now: float) -> None:
        """Let the next larger steps be tried, if there was no shortage for long enough."""
        if now < self._grows_at:
            return
        self.rows = min(size for size in self._sizes if size > self.rows)
        self._tried = True
        self._grows_at = math.inf
        if self.rows < self._sizes[-1]:
            self._grows_at = now + self._wait_s
        _log.info("steps with prompt rows may have %d rows again", self.rows)
