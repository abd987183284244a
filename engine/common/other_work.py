"""Measures the work of other programs on the processors, beside which timings are wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

_STAT = Path("/proc/stat")
#: Columns of its lines that count no work (idle, and waiting for a disk), and the number of columns
#: to read: later ones repeat work that earlier columns include.
_IDLE, _COLUMNS = (3, 4), 8


class OtherWork:
    """Measures the load of processors from its creation on. Linux only: elsewhere it reports 0.

    processors: their numbers. stat: file with the system's counts for each processor.
    """

    #: Share of the processors' time that other programs may use while something is timed.
    most: ClassVar[float] = 0.1

    def __init__(self, processors: Iterable[int], stat: Path = _STAT):
        self._names = {f"cpu{number}" for number in processors}
        self._stat = stat
        self._since = self._now()

    def share(self) -> float:
        """Share of these processors' time since creation that other processes used, from 0 to 1."""
        whole, busy, own = (
            now - before for now, before in zip(self._now(), self._since, strict=True)
        )
        if not whole:
            return 0.0
        return min(1.0, max(0.0, busy - own) / whole)

    def _now(self) -> tuple[float, float, float]:
        """(total seconds of these processors, busy seconds, seconds of this process)."""
        ticks = [0, 0]
        for counts in self._counts():
            idle = sum(counts[column] for column in _IDLE)
            ticks[0] += sum(counts)
            ticks[1] += sum(counts) - idle
        a_second = os.sysconf("SC_CLK_TCK")
        return ticks[0] / a_second, ticks[1] / a_second, time.process_time()

    def _counts(self) -> Iterable[list[int]]:
        """The counts of each measured processor."""
        try:
            lines = self._stat.read_text().splitlines()
        except OSError:
            return
        for name, *counts in map(str.split, lines):
            if name in self._names:
                yield [int(count) for count in counts[:_COLUMNS]]
