"""One record per step, the account of every computed row, and the ring in which records are kept.

The ledger writes a record for each committed step; the API process keeps the newest ones in a ring,
found again by step number or by time.
"""

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
        ("mixed", "u1"),  # 1: it had prompt rows
        # Rows and seats of the compiled program.
        ("bucket_tokens", "i4"),
        ("bucket_seats", "i4"),
        # Its rows by kind, which add up to bucket_tokens.
        ("prefill", "i4"),
        ("decode", "i4"),
        ("padding", "i4"),
        ("recomputed", "i4"),
        ("past_end", "i4"),
        ("cancelled", "i4"),
        # As of its plan.
        ("seats_busy", "i4"),
        ("seats", "i4"),
        ("pages_used", "i4"),
        ("pages_cached", "i4"),
        ("pages", "i4"),
        ("waiting", "i4"),
        ("waiting_tokens", "i8"),
        # Sequences: seated by its plan, ended since the record before, unseated by its plan.
        ("boarded", "i4"),
        ("finished", "i4"),
        ("preempted", "i4"),
        ("cached_tokens", "i4"),  # prompt tokens that its plan found in pages
        # The host's parts.
        ("plan_s", "f4"),
        ("batch_s", "f4"),
        ("launch_s", "f4"),
        # Until its tokens were on the host, since its launch or since the step before was ready,
        # whichever is later.
        ("device_s", "f4"),
        ("fetch_s", "f4"),
        ("commit_s", "f4"),
        ("gap_s", "f4"),  # how long the device had nothing to do before it
        ("compiled", "u1"),  # 1: it had to compile its program
        # What its attention read, see `engine.core.scheduler.plan.StepWork`.
        ("keys", "i8"),
        ("longest", "i4"),
        ("pairs", "i8"),
    ]
)

_FIELDS = STEP_DTYPE.names or ()
_CODES = {"i8": "q", "i4": "i", "f8": "d", "f4": "f", "u1": "B"}
#: The same for `struct`, which packs a record in a tenth of the time that numpy takes for its
#: fields one by one.
_STEP_STRUCT = struct.Struct("=" + "".join(_CODES[STEP_DTYPE[name].str[1:]] for name in _FIELDS))
#: A record's values in the order of _FIELDS, out of a dict.
_in_order = itemgetter(*_FIELDS)


def step_of(record: bytes) -> int:
    """The step number in a packed record."""
    return int.from_bytes(record[:8], sys.byteorder, signed=True)


#: What a computed row can turn out to be.
ROW_KINDS = ("prefill", "decode", "padding", "recomputed", "past_end", "cancelled")
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
#: Records added to the totals at once, by numpy.
_SUM_EVERY = 256


@dataclass(eq=False)
class Ledger:
    """A ring of the newest step records, and totals over all of them.

    Records are added up many at a time: a step only packs its own.
    """

    #: Records kept.
    capacity: int = 16384
    #: Records ever made, and those of them that are in `_totals`.
    _count: int = 0
    _summed: int = 0
    _totals: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._totals = dict.fromkeys(_SUMMED, 0)
        self._ring = np.zeros(self.capacity, STEP_DTYPE)
        self._bytes = memoryview(self._ring).cast("B")

    def __len__(self) -> int:
        """Records kept."""
        return min(self._count, len(self._ring))

    @property
    def steps(self) -> int:
        """Records ever made."""
        return self._count

    @property
    def totals(self) -> dict[str, int]:
        """Sums over all records ever made, by the names in SUMMED."""
        self._sum_up()
        return dict(self._totals)

    def record(self, **fields: float) -> bytes:
        """Keep one step; returns the record's bytes. fields: all of STEP_DTYPE, by name; raises
        TypeError for more or fewer, KeyError for others.
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
        """Add to the totals what was recorded since the last time, which the ring still has."""
        new = self._newest(self._count - self._summed)
        for name in _SUMMED:
            self._totals[name] += int(new[name].sum(dtype=np.int64))
        self._summed = self._count

    def _newest(self, count: int) -> np.ndarray:
        """A copy of the newest `count` records, of as many as are kept, oldest first."""
        at = self._count % len(self._ring)
        if count <= at:
            return self._ring[at - count : at].copy()
        return np.concatenate((self._ring[at - count :], self._ring[:at]))

    def since(self, step: int) -> np.ndarray:
        """A copy of the records with a greater step number, oldest first, as far back as they are
        kept.
        """
        kept = self._newest(len(self))
        return kept[kept["step"] > step]

    def closes(self) -> bool:
        """True if in every record kept, and in the totals, the kinds of rows add up to the rows
        computed.
        """
        records, totals = self.since(-1), self.totals
        sums = np.sum([records[kind] for kind in ROW_KINDS], axis=0)
        total = sum(totals[kind] for kind in ROW_KINDS)
        are_true = bool(np.all(sums == records["bucket_tokens"]))
        return are_true and total == totals["bucket_tokens"]


#: Records kept: ten minutes of steps of 5 ms.
_KEPT_RECORDS = 1 << 17


class RecordRing:
    """The newest records, and when each step's tokens were on the host (`ready`, seconds of
    time.monotonic()).

    Step numbers rise; so do the times.
    """

    def __init__(self, capacity: int = _KEPT_RECORDS):
        self._ring = np.zeros(capacity, STEP_DTYPE)
        # Apart from the ring: searching them copies nothing.
        self._steps = np.full(capacity, -1, np.int64)
        self._ready = np.full(capacity, -np.inf)
        self._count = 0

    def __len__(self) -> int:
        return min(self._count, len(self._ring))

    @property
    def _at(self) -> int:
        """Where the next record goes; the newest one lies before it."""
        return self._count % len(self._ring)

    @property
    def last_step(self) -> int:
        """Number of the newest step, -1 before the first."""
        return int(self._steps[self._at - 1])

    @property
    def first_step(self) -> int:
        """Number of the oldest step that is kept, -1 before the first."""
        if self._count < len(self._ring):
            return int(self._steps[0])
        return int(self._steps[self._at])

    @property
    def last_ready(self) -> float:
        """When the newest step was done, -inf before the first."""
        return float(self._ready[self._at - 1])

    def add(self, record: bytes, renumber: int = 0) -> np.void:
        """Keep a record whose step number is raised by `renumber`; returns a copy of it.

        A step is ready device_s after its launch, or after the step before it if the device was
        still busy with that.
        """
        taken = np.frombuffer(record, STEP_DTYPE)[0].copy()
        taken["step"] += renumber
        ready = max(_launched(taken), self.last_ready) + float(taken["device_s"])
        at = self._at
        self._ring[at], self._steps[at], self._ready[at] = taken, taken["step"], ready
        self._count += 1
        return taken

    def since(self, step: int) -> np.ndarray:
        """As `Ledger.since`."""
        return self._slice(self._ring, self._find(self._steps, step), len(self))

    def steps(self, after: int, until: int) -> tuple[np.ndarray, np.ndarray]:
        """(records, ready) of the steps after < step <= until, oldest first."""
        return self._within(self._steps, after, until)

    def between(self, start: float, end: float) -> tuple[np.ndarray, np.ndarray]:
        """(records, ready) of the steps that were done at start < ready <= end, oldest first."""
        return self._within(self._ready, start, end)

    def _within(
        self, keys: np.ndarray, after: float, until: float
    ) -> tuple[np.ndarray, np.ndarray]:
        low, high = self._find(keys, after), self._find(keys, until)
        return self._slice(self._ring, low, high), self._slice(self._ready, low, high)

    def span(self, start: float, end: float) -> tuple[int, int]:
        """(after, until), as `steps` takes them, of the steps that `between` would give."""
        low, high = self._find(self._ready, start), self._find(self._ready, end)
        if low == high:
            return -1, -1
        first, last = self._slice(self._steps, low, high)[[0, -1]].tolist()
        return first - 1, last

    def _find(self, keys: np.ndarray, value: float) -> int:
        """How many of the kept records have a key of at most `value`."""
        old, new = self._halves(keys)
        return int(np.searchsorted(old, value, "right") + np.searchsorted(new, value, "right"))

    def _slice(self, array: np.ndarray, low: int, high: int) -> np.ndarray:
        """A copy of the kept items low .. high - 1, counted from the oldest."""
        old, new = self._halves(array)
        passed = len(old)
        return np.concatenate((old[low:high], new[max(0, low - passed) : max(0, high - passed)]))

    def _halves(self, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The kept items in two pieces, each in order of time."""
        if self._count < len(array):
            return array[: self._count], array[:0]
        return array[self._at :], array[: self._at]


def _launched(record: np.void) -> float:
    """When a step went to the device, s."""
    planned = record["started"] + float(record["plan_s"])
    return planned + float(record["batch_s"]) + float(record["launch_s"])
