"""Things that a person should know of, found by comparing a snapshot with those before it."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from jitney.dashboard.snapshot import Snapshot
from jitney.dashboard.sse import Note

#: Preemptions and refusals are counted over so many seconds.
_WINDOW_S = 5.0
#: Seconds until the same burst is worth another note.
_QUIET_S = 30.0
#: Refusals within the window that are worth a note, and preemptions on a few seats.
_MANY_REFUSALS = 10
_FEW_PREEMPTIONS = 4
#: Notes that are kept.
_KEPT = 20


_PREEMPTION_STORM = (
    "sequences lose their seats for lack of KV pages: fewer seats, shorter contexts or "
    "more pages would compute less twice"
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

    def compare(self, now: Snapshot, records: np.ndarray) -> list[Note]:
        """New notes. records: the steps since the snapshot before."""
        before = self._before
        self._before = now
        bursts = self._bursts(now)  # the first time it is what the counting starts from
        new = self._kernels_out(now)
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
        message = (
            f"kernels taken out, because they were wrong here: {', '.join(now.kernels_out)}; the "
            "slower reference serves in their place, and answers are right"
        )
        note = _note(now, "error", "kernels_out", message)
        note["t"] = round(now.ready_at, 4)
        return [note]

    def _bursts(self, now: Snapshot) -> list[Note]:
        notes = []
        preempted, many = now.metrics["preemptions"], _many_preemptions(now)
        if self._bursts_of("preemption_storm", now, preempted, many):
            notes.append(_note(now, "warn", "preemption_storm", _PREEMPTION_STORM))
        refused = sum(now.metrics["rejected"].values())
        if self._bursts_of("rejections", now, refused, _MANY_REFUSALS):
            message = "requests are being refused because too many wait"
            notes.append(_note(now, "warn", "rejections", message))
        return notes

    def _bursts_of(self, code: str, now: Snapshot, total: int, many: int) -> bool:
        """True if the total has grown by `many` within the window, and no note said so a moment
        ago.
        """
        totals = self._totals.setdefault(code, deque())
        totals.append((now.t, total))
        while totals[0][0] < now.t - _WINDOW_S:
            totals.popleft()
        grown = total - totals[0][1]
        quiet_for = now.t - self._noted.get(code, -np.inf)
        if grown < many or quiet_for < _QUIET_S:
            return False
        self._noted[code] = now.t
        return True


def _many_preemptions(now: Snapshot) -> int:
    """How many in a window are worth a note."""
    if now.seats is None:
        return _FEW_PREEMPTIONS
    return max(_FEW_PREEMPTIONS, len(now.seats.state) // 4)


def _compiles(now: Snapshot, records: np.ndarray) -> list[Note]:
    notes = []
    for record in records[records["compiled"] > 0]:
        seconds = record["device_s"] + record["launch_s"]
        message = (
            f"step {record['step']} had to compile a program for {record['bucket_tokens']} rows "
            f"and took {seconds:.1f} s"
        )
        notes.append(_note(now, "warn", "compile", message))
    return notes


def _accidents(before: Snapshot, now: Snapshot) -> list[Note]:
    notes = _outages(before, now)
    nan_rows = now.metrics["nan_rows"] - before.metrics["nan_rows"]
    if nan_rows > 0:
        message = f"logits were not finite in {nan_rows} rows; their requests have ended"
        notes.append(_note(now, "error", "nan", message))
    wrong = now.metrics["canary"]["mismatched"] - before.metrics["canary"]["mismatched"]
    if wrong > 0:
        message = (
            "computed again with the reference kernels, so many answers came out otherwise: "
            f"{wrong}. `jitney doctor` compares every kernel"
        )
        notes.append(_note(now, "error", "canary", message))
    if now.state == "dead" and before.state != "dead":
        message = "the engine is dead and is not started again"
        notes.append(_note(now, "error", "dead", message))
    return notes


def _outages(before: Snapshot, now: Snapshot) -> list[Note]:
    """That the engine's process is gone, and that another one is ready."""
    notes = []
    known = {outage["began"]: outage for outage in before.outages}
    for outage in now.outages:
        seen = known.get(outage["began"])
        if seen is None:
            message = (
                f"{outage['cause']}; requests that go on in the next one: {outage['n_resumed']}, "
                f"that ended with an error: {outage['n_lost']}"
            )
            notes.append(_note(now, "error", "outage", message))
        was_over = seen is not None and seen["ready"] is not None
        if outage["ready"] is not None and not was_over:
            notes.append(_note(now, "warn", "restarted", _restart_message(outage)))
    return notes


def _restart_message(outage: dict[str, Any]) -> str:
    seconds = outage["ready"] - outage["began"]
    return (
        f"restart {outage['restart']}: the engine was ready again after {seconds:.1f} s; "
        f"requests that went on: {outage['n_resumed']}"
    )


def _note(now: Snapshot, level: str, code: str, message: str) -> Note:
    return {"level": level, "code": code, "message": message, "t": round(now.t, 4)}
