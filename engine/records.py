"""Step records as the API process keeps them: a ring, found again by step number or by time."""

from __future__ import annotations

import numpy as np

from jitney.engine.ledger import STEP_DTYPE

#: Records kept: ten minutes of steps of 5 ms.
KEPT_RECORDS = 1 << 17


class RecordRing:
    """The newest records, and when each step's tokens were on the host (`ready`, seconds of time.monotonic()).

    Step numbers rise; so do the times.
    """

    def __init__(self, capacity: int = KEPT_RECORDS):
        self._ring = np.zeros(capacity, STEP_DTYPE)
        self._steps = np.zeros(capacity, np.int64)  # apart from the ring: searching them copies nothing
        self._ready = np.zeros(capacity)
        self._count = 0

    def __len__(self) -> int:
        return min(self._count, len(self._ring))

    @property
    def last_step(self) -> int:
        """Number of the newest step, -1 before the first."""
        return int(self._steps[(self._count - 1) % len(self._ring)]) if self._count else -1

    @property
    def last_ready(self) -> float:
        """When the newest step was done, -inf before the first."""
        return float(self._ready[(self._count - 1) % len(self._ring)]) if self._count else -np.inf

    def add(self, record: bytes, renumber: int = 0) -> np.void:
        """Keep a record whose step number is raised by `renumber`; returns a copy of it.

        A step is ready device_s after its launch, or after the step before it if the device was still busy with that.
        """
        taken = np.frombuffer(record, STEP_DTYPE)[0].copy()
        taken["step"] += renumber
        launched = taken["started"] + float(taken["plan_s"]) + float(taken["batch_s"]) + float(taken["launch_s"])
        ready = max(launched, self.last_ready) + float(taken["device_s"])
        at = self._count % len(self._ring)
        self._ring[at], self._steps[at], self._ready[at] = taken, taken["step"], ready
        self._count += 1
        return taken

    def since(self, step: int) -> np.ndarray:
        """A copy of the records with a greater step number, oldest first, as far back as they are kept."""
        return self._slice(self._ring, self._find(self._steps, step), len(self))

    def steps(self, after: int, until: int) -> tuple[np.ndarray, np.ndarray]:
        """(records, ready) of the steps after < step <= until, oldest first."""
        low, high = self._find(self._steps, after), self._find(self._steps, until)
        return self._slice(self._ring, low, high), self._slice(self._ready, low, high)

    def between(self, start: float, end: float) -> tuple[np.ndarray, np.ndarray]:
        """(records, ready) of the steps that were done at start < ready <= end, oldest first."""
        low, high = self._find(self._ready, start), self._find(self._ready, end)
        return self._slice(self._ring, low, high), self._slice(self._ready, low, high)

    def _find(self, keys: np.ndarray, value: float) -> int:
        """How many of the kept records have a key of at most `value`."""
        old, new = self._halves(keys)
        return int(np.searchsorted(old, value, "right") + np.searchsorted(new, value, "right"))

    def _slice(self, array: np.ndarray, low: int, high: int) -> np.ndarray:
        """A copy of the kept items low .. high - 1, counted from the oldest."""
        old, new = self._halves(array)
        return np.concatenate((old[low:high], new[max(0, low - len(old)):max(0, high - len(old))]))

    def _halves(self, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The kept items in two pieces, each in order of time."""
        if self._count < len(array):
            return array[:self._count], array[:0]
        at = self._count % len(array)
        return array[at:], array[:at]
