"""Step records: format, the core's ledger of rows, and the API process's ring of the newest."""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np

#: One step. Names that end in _s are seconds.
STEP_DTYPE = np.dtype(
    [
        ("step", "i8"),
        ("started", "f8"),  # seconds of time.monotonic()
        ("mixed", "u1"),  # 1: with prompt rows
        # Rows and seats of the compiled program.
        ("bucket_tokens", "i4"),
        ("bucket_seats", "i4"),
        # Rows by kind, which add up to bucket_tokens.
        ("prefill", "i4"),
        ("decode", "i4"),
        ("accepted", "i4"),
        ("padding", "i4"),
        ("recomputed", "i4"),
        ("past_end", "i4"),
        ("cancelled", "i4"),
        ("rejected", "i4"),
        # State at planning.
        ("seats_busy", "i4"),
        ("seats", "i4"),
        ("pages_used", "i4"),
        ("pages_cached", "i4"),
        ("pages", "i4"),
        ("waiting", "i4"),
        ("waiting_tokens", "i8"),
        # Sequences: boarded by the plan, ended since the last record, preempted by the plan.
        ("boarded", "i4"),
        ("finished", "i4"),
        ("preempted", "i4"),
        ("cached_tokens", "i4"),  # prompt tokens that the plan found in the prefix cache
        # Time on the host.
        ("plan_s", "f4"),
        ("batch_s", "f4"),
        ("launch_s", "f4"),
        # From the launch, or the step before's end if later, until the tokens were on the host.
        ("device_s", "f4"),
        ("earlier_s", "f4"),  # of these, those before other steps ran between its segments
        ("fetch_s", "f4"),
        ("commit_s", "f4"),
        ("gap_s", "f4"),  # idle time of the device before the step
        ("compiled", "u1"),  # 1: its program was compiled for it
        # Attention, see `engine.core.scheduler.plan.StepWork`.
        ("keys", "i8"),
        ("longest", "i4"),
        ("pairs", "i8"),
    ]
)

_FIELDS = STEP_DTYPE.names or ()
_CODES = {"i8": "q", "i4": "i", "f8": "d", "f4": "f", "u1": "B"}
#: The same for `struct`, which packs a record ten times faster than numpy sets its fields.
_STEP_STRUCT = struct.Struct("=" + "".join(_CODES[STEP_DTYPE[name].str[1:]] for name in _FIELDS))
#: Values of a dict in the order of _FIELDS.
_in_order = itemgetter(*_FIELDS)


def step_of(record: bytes) -> int:
    """The step number in a packed record."""
    return int.from_bytes(record[:8], sys.byteorder, signed=True)


#: Kinds of computed rows.
ROW_KINDS = (
    "prefill",
    "decode",
    "accepted",
    "padding",
    "recomputed",
    "past_end",
    "cancelled",
    "rejected",
)
#: Fields that add up over steps.
_SUMMED = (
    "bucket_tokens",
    *ROW_KINDS,
    "boarded",
    "finished",
    "preempted",
    "cached_tokens",
    "compiled",
)
#: Records that numpy adds to the totals at once.
_SUM_EVERY = 256


@dataclass(eq=False)
class Ledger:
    """A ring of the newest step records, and totals over all, added up in groups."""

    #: Most records in the ring.
    capacity: int = 16384
    #: Records ever made, and how many of them are in `_totals`.
    _count: int = 0
    _summed: int = 0
    _totals: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._totals = dict.fromkeys(_SUMMED, 0)
        self._ring = np.zeros(self.capacity, STEP_DTYPE)
        self._bytes = memoryview(self._ring).cast("B")

    def __len__(self) -> int:
        """Records in the ring."""
        return min(self._count, len(self._ring))

    @property
    def steps(self) -> int:
        """Records ever made."""
        return self._count

    @property
    def totals(self) -> dict[str, int]:
        """Sums over all records ever made, by the names in _SUMMED."""
        self._sum_up()
        return dict(self._totals)

    def record(self, **fields: float) -> bytes:
        """Add a step and return the record's bytes. fields: all of STEP_DTYPE. Raises TypeError for
        more or fewer, KeyError for others.
        """
        if len(fields) != len(_FIELDS):
            raise TypeError(f"a step record has the fields {', '.join(_FIELDS)}")
        size = STEP_DTYPE.itemsize
        at = self._count % len(self._ring) * size
        if self._count - self._summed == min(_SUM_EVERY, len(self._ring)):
            self._sum_up()
        record = _STEP_STRUCT.pack(*_in_order(fields))
        self._bytes[at : at + size] = record
        self._count += 1
        return record

    def _sum_up(self) -> None:
        """Add the records since the last call to the totals; the ring still has them."""
        new = self._newest(self._count - self._summed)
        for name in _SUMMED:
            self._totals[name] += int(new[name].sum(dtype=np.int64))
        self._summed = self._count

    def _newest(self, count: int) -> np.ndarray:
        """A copy of the newest `count` records of the ring, oldest first."""
        at = self._count % len(self._ring)
        if count <= at:
            return self._ring[at - count : at].copy()
        return np.concatenate((self._ring[at - count :], self._ring[:at]))

    def since(self, step: int) -> np.ndarray:
        """A copy of the ring's records with a greater step number, oldest first."""
        records = self._newest(len(self))
        return records[records["step"] > step]

    def closes(self) -> bool:
        """True if the kinds of rows add up to the computed rows, in every record and in total."""
        records, totals = self.since(-1), self.totals
        sums = np.sum([records[kind] for kind in ROW_KINDS], axis=0)
        total = sum(totals[kind] for kind in ROW_KINDS)
        records_close = bool(np.all(sums == records["bucket_tokens"]))
        return records_close and total == totals["bucket_tokens"]


#: Size of the ring: ten minutes of steps of 5 ms.
_KEPT_RECORDS = 1 << 17


class RecordRing:
    """The newest records, with the time when each step's tokens were on the host (`ready`, seconds
    of time.monotonic()). Step numbers and times increase.
    """

    def __init__(self, capacity: int = _KEPT_RECORDS):
        self._ring = np.zeros(capacity, STEP_DTYPE)
        # Separate arrays, since searching a field of the ring would copy it.
        self._steps = np.full(capacity, -1, np.int64)
        self._ready = np.full(capacity, -np.inf)
        self._count = 0

    def __len__(self) -> int:
        return min(self._count, len(self._ring))

    @property
    def _at(self) -> int:
        """Index of the next record; the newest one is before it."""
        return self._count % len(self._ring)

    @property
    def last_step(self) -> int:
        """Number of the newest step, -1 before the first."""
        return int(self._steps[self._at - 1])

    @property
    def first_step(self) -> int:
        """Number of the oldest step in the ring, -1 before the first."""
        if self._count < len(self._ring):
            return int(self._steps[0])
        return int(self._steps[self._at])

    @property
    def last_ready(self) -> float:
        """When the newest step was ready, -inf before the first."""
        return float(self._ready[self._at - 1])

    def add(self, record: bytes, renumber: int = 0) -> np.void:
        """Add a record, its step number raised by `renumber`; returns a copy. A step is ready
        device_s - earlier_s after its launch or the end of the step before, whichever is later.
        """
        new = np.frombuffer(record, STEP_DTYPE)[0].copy()
        new["step"] += renumber
        ready = max(_launched(new), self.last_ready) + float(new["device_s"] - new["earlier_s"])
        at = self._at
        self._ring[at], self._steps[at], self._ready[at] = new, new["step"], ready
        self._count += 1
        return new

    def since(self, step: int) -> np.ndarray:
        """A copy of the records with a greater step number, oldest first."""
        return self._slice(self._ring, self._find(self._steps, step), len(self))

    def steps(self, after: int, until: int) -> tuple[np.ndarray, np.ndarray]:
        """(records, ready) of the steps after < step <= until, oldest first."""
        return self._within(self._steps, after, until)

    def between(self, start: float, end: float) -> tuple[np.ndarray, np.ndarray]:
        """(records, ready) of the steps with start < ready <= end, oldest first."""
        return self._within(self._ready, start, end)

    def _within(
        self, keys: np.ndarray, after: float, until: float
    ) -> tuple[np.ndarray, np.ndarray]:
        low, high = self._find(keys, after), self._find(keys, until)
        return self._slice(self._ring, low, high), self._slice(self._ready, low, high)

    def span(self, start: float, end: float) -> tuple[int, int]:
        """(after, until) for `steps`, of the steps that `between` returns."""
        low, high = self._find(self._ready, start), self._find(self._ready, end)
        if low == high:
            return -1, -1
        first, last = self._slice(self._steps, low, high)[[0, -1]].tolist()
        return first - 1, last

    def _find(self, keys: np.ndarray, value: float) -> int:
        """Number of records with a key of at most `value`."""
        old, new = self._halves(keys)
        return int(np.searchsorted(old, value, "right") + np.searchsorted(new, value, "right"))

    def _slice(self, array: np.ndarray, low: int, high: int) -> np.ndarray:
        """A copy of items low .. high - 1, counted from the oldest."""
        old, new = self._halves(array)
        n_old = len(old)
        if high <= n_old:
            return old[low:high].copy()  # joining structured arrays compares their fields first
        if low >= n_old:
            return new[low - n_old : high - n_old].copy()
        return np.concatenate((old[low:], new[: high - n_old]))

    def _halves(self, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The items as two slices, older and newer, each in order of time."""
        if self._count < len(array):
            return array[: self._count], array[:0]
        return array[self._at :], array[: self._at]


def _launched(record: np.void) -> float:
    """Time of a step's launch, s."""
    planned = record["started"] + float(record["plan_s"])
    return planned + float(record["batch_s"]) + float(record["launch_s"])
