"""The account of every computed row, and the one record per step that everything else reads."""

from __future__ import annotations

import struct

import numpy as np

#: One step. Rows by kind (i4) close exactly: prefill + decode + padding + recomputed + past_end + cancelled ==
#: bucket_tokens. started: seconds of time.monotonic(); *_s: seconds; mixed, compiled: 0 or 1. seats_busy to
#: waiting_tokens are as of the step's plan; boarded, preempted, cached_tokens (prompt tokens found in pages) are what
#: that plan did; finished: sequences that ended since the record before. device_s: until the step's tokens were on the
#: host, since its launch or since the step before was ready, whichever is later; gap_s: how long the device had nothing
#: to do before it. keys, longest, pairs: what its attention read, see `engine.work.Work`.
STEP_DTYPE = np.dtype([
    ("step", "i8"), ("started", "f8"), ("mixed", "u1"), ("bucket_tokens", "i4"), ("bucket_seats", "i4"),
    ("prefill", "i4"), ("decode", "i4"), ("padding", "i4"), ("recomputed", "i4"), ("past_end", "i4"),
    ("cancelled", "i4"),
    ("seats_busy", "i4"), ("seats", "i4"), ("pages_used", "i4"), ("pages_cached", "i4"), ("pages", "i4"),
    ("waiting", "i4"), ("waiting_tokens", "i8"),
    ("boarded", "i4"), ("finished", "i4"), ("preempted", "i4"), ("cached_tokens", "i4"),
    ("plan_s", "f4"), ("batch_s", "f4"), ("launch_s", "f4"), ("device_s", "f4"), ("fetch_s", "f4"), ("commit_s", "f4"),
    ("gap_s", "f4"), ("compiled", "u1"),
    ("keys", "i8"), ("longest", "i4"), ("pairs", "i8"),
])

FIELDS = STEP_DTYPE.names or ()
CODES = {"i8": "q", "i4": "i", "f8": "d", "f4": "f", "u1": "B"}
#: The same for `struct`, which packs a record in a tenth of the time that numpy takes for its fields one by one.
STEP_STRUCT = struct.Struct("=" + "".join(CODES[STEP_DTYPE[name].str[1:]] for name in FIELDS))

#: What a computed row can turn out to be.
ROW_KINDS = ("prefill", "decode", "padding", "recomputed", "past_end", "cancelled")
#: Fields that add up over steps.
SUMMED = ("bucket_tokens", *ROW_KINDS, "boarded", "finished", "preempted", "cached_tokens", "compiled")


class Ledger:
    """A ring of the newest step records, and totals over all of them (`totals`, by the names in SUMMED)."""

    def __init__(self, capacity: int = 16384):
        self._ring = np.zeros(capacity, STEP_DTYPE)
        self._bytes = memoryview(self._ring).cast("B")
        self._count = 0
        self.totals = dict.fromkeys(SUMMED, 0)

    def __len__(self) -> int:
        """Records kept."""
        return min(self._count, len(self._ring))

    @property
    def steps(self) -> int:
        """Records ever made."""
        return self._count

    def record(self, **fields: float) -> bytes:
        """Keep one step, given all fields of STEP_DTYPE by name; returns the record's bytes."""
        at = self._count % len(self._ring) * STEP_DTYPE.itemsize
        record = STEP_STRUCT.pack(*[fields[name] for name in FIELDS])
        self._bytes[at : at + STEP_DTYPE.itemsize] = record
        self._count += 1
        totals = self.totals
        for name in SUMMED:
            totals[name] += int(fields[name])
        return record

    def since(self, step: int) -> np.ndarray:
        """A copy of the records with a greater step number, oldest first, as far back as they are kept."""
        at = self._count % len(self._ring)
        ordered = np.concatenate((self._ring[at:], self._ring[:at]))[-len(self):] if len(self) else self._ring[:0]
        return ordered[ordered["step"] > step]

    def closes(self) -> bool:
        """True if in every record kept, and in the totals, the kinds of rows add up to the rows computed."""
        records = self.since(-1)
        sums = np.sum([records[kind] for kind in ROW_KINDS], axis=0)
        total = sum(self.totals[kind] for kind in ROW_KINDS)
        return bool(np.all(sums == records["bucket_tokens"])) and total == self.totals["bucket_tokens"]
