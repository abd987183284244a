"""Things that a person should know of, found by comparing a snapshot with those before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from jitney.dashboard.snapshot import Snapshot
from jitney.dashboard.sse import Note
from jitney.engine.types import JsonDict

#: Preemptions and refusals are counted over so many seconds.
_WINDOW_S = 5.0
#: Seconds until the same burst is worth another note.
_QUIET_S = 30.0
#: Refusals within the window that are worth a note, and preemptions on a few seats.
_MANY_REFUSALS = 10
_FEW_PREEMPTIONS = 4
#: Notes that are kept.
_KEPT = 20


_BURSTS = {
    "preemption_storm": "sequences lose their seats for lack of KV pages: fewer seats, shorter "
    "contexts or more pages would compute less twice",
    "rejections": "requests are being refused because too many wait",
}
_KERNELS_OUT = (
    "kernels taken out, because they were wrong here: {}; the slower reference serves in their "
    "place, and answers are right"
)
_DISK_FULL = (
    "a disk that files, batches, jobs or the record of traffic are written to is full; the log "
    "names it, and other answers go on"
)
_OUTAGE = (
    "{cause}; requests that go on in the next one: {n_resumed}, that ended with an error: {n_lost}"
)


class Notes:
    """Finds notes, and keeps the newest, oldest first (`kept`)."""

    def __init__(self) -> None:
        self.kept: deque[Note] = deque(maxlen=_KEPT)
        self._before: Snapshot | None = None
        #: By note code: (t, total) of the snapshots within the window.
        self._totals: dict[str, deque[tuple[float, int]]] = {}
        #: By note code: when its last note was written.
        self._noted: dict[str, float] = {}
        #: When the engine got ready whose proof was told of.
        self._proof_of = -np.inf
        #: When the disk got full that was told of.
        self._full_at = -np.inf

    def compare(self, now: Snapshot, records: np.ndarray) -> list[Note]:
        """New notes. records: the steps since the snapshot before."""
        before, self._before = self._before, now
        bursts = self._bursts(now)  # the first time it is what the counting starts from
        new = [*self._kernels_out(now), *self._full_disk(now)]
        if before is not None:
            new += [*_compiles(now, records), *_accidents(before, now), *bursts]
        self.kept.extend(new)
        return new

    def _kernels_out(self, now: Snapshot) -> list[Note]:
        """What an engine's proof took out, once for each engine, at the time when it got ready:
        whoever looks first may come much later.
        """
        if not now.kernels_out or now.ready_at <= self._proof_of:
            return []
        self._proof_of = now.ready_at
        message = _KERNELS_OUT.format(", ".join(now.kernels_out))
        return [_note(now.ready_at, "error", "kernels_out", message)]

    def _full_disk(self, now: Snapshot) -> list[Note]:
        """That a disk got full, once for each time."""
        if now.disk_full_at <= self._full_at:
            return []
        self._full_at = now.disk_full_at
        return [_note(self._full_at, "error", "disk_full", _DISK_FULL)]

    def _bursts(self, now: Snapshot) -> list[Note]:
        refused = sum(now.metrics["rejected"].values())
        totals = (
            ("preemption_storm", now.metrics["preemptions"], _many_preemptions(now)),
            ("rejections", refused, _MANY_REFUSALS),
        )
        bursts = [code for code, total, many in totals if self._is_burst(code, now.t, total, many)]
        return [_note(now.t, "warn", code, _BURSTS[code]) for code in bursts]

    def _is_burst(self, code: str, t: float, total: int, many: int) -> bool:
        """True if the total has grown by `many` within the window, and no note said so a moment
        ago.
        """
        quiet_for = t - self._noted.get(code, -np.inf)
        if self._growth(code, t, total) < many or quiet_for < _QUIET_S:
            return False
        self._noted[code] = t
        return True

    def _growth(self, code: str, t: float, total: int) -> int:
        """Of a total within the window."""
        totals = self._totals.setdefault(code, deque())
        totals.append((t, total))
        while totals[0][0] < t - _WINDOW_S:
            totals.popleft()
        return total - totals[0][1]


def _many_preemptions(now: Snapshot) -> int:
    """How many in a window are worth a note."""
    if now.seats is None:
        return _FEW_PREEMPTIONS
    return max(_FEW_PREEMPTIONS, len(now.seats.state) // 4)


def _compiles(now: Snapshot, records: np.ndarray) -> list[Note]:
    compiled = records[records["compiled"] > 0]
    return [_note(now.t, "warn", "compile", _compile_message(record)) for record in compiled]


def _compile_message(record: np.void) -> str:
    seconds = record["device_s"] + record["launch_s"]
    return (
        f"step {record['step']} had to compile a program for {record['bucket_tokens']} rows "
        f"and took {seconds:.1f} s"
    )


def _accidents(before: Snapshot, now: Snapshot) -> list[Note]:
    notes = _outages(before, now)
    for code, counter in _ACCIDENTS.items():
        more = counter(now) - counter(before)
        if more > 0:
            notes.append(_note(now.t, "error", code, _ACCIDENT_MESSAGES[code].format(more)))
    return notes


#: How often each accident has happened.
_ACCIDENTS: dict[str, Callable[[Snapshot], int]] = {
    "nan": lambda snapshot: snapshot.metrics["nan_rows"],
    "canary": lambda snapshot: snapshot.metrics["canary"]["mismatched"],
    "dead": lambda snapshot: snapshot.state == "dead",
}
_ACCIDENT_MESSAGES = {
    "nan": "logits were not finite in {} rows; their requests have ended",
    "canary": "computed again with the reference kernels, so many answers came out otherwise: "
    "{}. `jitney doctor` compares every kernel",
    "dead": "the engine is dead and is not started again",
}


def _outages(before: Snapshot, now: Snapshot) -> list[Note]:
    """That the engine's process is gone, and that another one is ready."""
    known = {outage["began"]: outage for outage in before.outages}
    notes = []
    for outage in now.outages:
        notes += _outage_notes(outage, known.get(outage["began"]), now.t)
    return notes


def _outage_notes(outage: JsonDict, seen: JsonDict | None, t: float) -> Iterator[Note]:
    """seen: what was known of it before."""
    if seen is None:
        yield _note(t, "error", "outage", _OUTAGE.format_map(outage))
    was_over = seen is not None and seen["ready"] is not None
    if outage["ready"] is not None and not was_over:
        yield _note(t, "warn", "restarted", _restart_message(outage))


def _restart_message(outage: JsonDict) -> str:
    seconds = outage["ready"] - outage["began"]
    return (
        f"restart {outage['restart']}: the engine was ready again after {seconds:.1f} s; "
        f"requests that went on: {outage['n_resumed']}"
    )


def _note(t: float, level: str, code: str, message: str) -> Note:
    return {"level": level, "code": code, "message": message, "t": round(t, 4)}
