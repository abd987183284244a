"""The row limit: reduces the rows of steps for a while after a step did not fit the memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

_log = logging.getLogger("jitney.core")

#: Seconds without a shortage after which the next larger step is tried again: the first and the
#: longest wait. Each shortage after a trial doubles the wait, because it costs all sequences a step
#: and their pages.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 120.0, 3600.0


class RowLimit:
    """The most rows of a step: those of the largest bucket, or fewer for a while."""

    def __init__(self, sizes: Sequence[int]):
        """sizes: rows of the buckets that prompts use, ascending."""
        #: The most rows of a step now.
        self.rows = sizes[-1]
        self._sizes = sizes
        self._wait_s = _FIRST_WAIT_S
        #: Clock seconds at which the next larger step is tried; inf if there is none.
        self._grows_at = math.inf
        #: Whether a larger step has been tried since the last shortage.
        self._tried = False

    def shrink(self, now: float) -> bool:
        """Limit steps to the next smaller bucket's rows, after a step did not fit the memory. False
        if there is no smaller bucket.
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
        """Allow the next larger step if there was no shortage for long enough."""
        if now < self._grows_at:
            return
        self.rows = min(size for size in self._sizes if size > self.rows)
        self._tried = True
        self._grows_at = math.inf
        if self.rows < self._sizes[-1]:
            self._grows_at = now + self._wait_s
        _log.info("steps with prompt rows may have %d rows again", self.rows)
