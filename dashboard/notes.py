"""Things that a person should know of, found by comparing a snapshot with those before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from jitney.dashboard.snapshot import Snapshot
from jitney.dashboard.sse import Note, with_note
from jitney.engine.common.requests import JsonDict

#: Preemptions are counted over so many seconds.
_WINDOW_S = 5.0
#: Seconds until the same burst is worth another note.
_QUIET_S = 30.0
#: Preemptions within the window that are worth a note, on a few seats.
_FEW_PREEMPTIONS = 4
#: Notes that are kept.
_KEPT = 20
_STORM = (
    "sequences lose their seats for lack of KV pages: fewer seats, shorter contexts or more pages "
    "would compute less twice"
)
_KERNELS_OUT = (
    "kernels taken out, because they were wrong here: {}; the slower reference serves in their "
    "place, and answers are right"
)
#: Why requests are turned away, by the code of the answer.
_WHY = {
    "queue_full": "too many wait (max_waiting_requests, max_waiting_tokens, max_predicted_wait_s)",
    "rate_limit": "a key has as much as it may have at a time or in a minute",
    "too_many_attempts": "wrong API keys are tried",
    "restarting": "the engine starts again",
    "loading": "the model is being loaded",
    "draining": "the server stops",
    "sleeping": "the engine sleeps",
    "engine_dead": "the engine is dead",
}
_DISK_FULL = (
    "a disk that files, batches, jobs or the record of traffic are written to is full; the log "
    "names it, and other answers go on"
)


class Notes:
    """Finds notes, and keeps the newest, oldest first (`kept`)."""

    def __init__(self) -> None:
        self.kept: list[Note] = []
        self._before: Snapshot | None = None
        #: (t, total) of the preemptions of the snapshots within the window.
        self._preemptions: deque[tuple[float, int]] = deque()
        #: When the last note of a storm of them was written.
        self._storm_at = -np.inf
        #: When the engine got ready whose proof was told of.
        self._proof_of = -np.inf
        #: What was told of outages and refusals, by code and beginning.
        self._told: dict[tuple[str, float], Note] = {}
        #: When the disk got full that was told of.
        self._full_at = -np.inf

    def compare(self, now: Snapshot, records: np.ndarray) -> list[Note]:
        """New notes, and those that are renewed. records: the steps since the snapshot before. The
        first snapshot tells of what happened before anybody looked.
        """
        before, self._before = self._before, now
        new = [
            *self._kernels_out(now),
            *self._renewed(now),
            *self._full_disk(now),
            *_accidents(before, now),
        ]
        if before is not None:
            new += _compiles(now, records)
        new += self._storms(now)
        for note in new:
            self.kept = with_note(self.kept, note, _KEPT)
        return new

    def _kernels_out(self, now: Snapshot) -> list[Note]:
        """Kernels that an engine's proof left out, once per engine, at the time when it got ready:
        the first viewer may come much later.
        """
        if not now.kernels_out or now.ready_at <= self._proof_of:
            return []
        self._proof_of = now.ready_at
        message = _KERNELS_OUT.format(", ".join(now.kernels_out))
        hit = {"kernels": len(now.kernels_out)}
        return [make_note(now.ready_at, "error", "kernels_out", message, hit)]

    def _renewed(self, now: Snapshot) -> list[Note]:
        """New notes of outages and refusals, each from its start on."""
        notes = [_outage_note(outage) for outage in now.outages]
        notes += [_refusals_note(refusals) for refusals in now.refusals]
        told, self._told = self._told, {(note["code"], note["t"]): note for note in notes}
        return [note for what, note in self._told.items() if told.get(what) != note]

    def _full_disk(self, now: Snapshot) -> list[Note]:
        """That a disk got full, once for each time."""
        if now.disk_full_at <= self._full_at:
            return []
        self._full_at = now.disk_full_at
        return [make_note(self._full_at, "error", "disk_full", _DISK_FULL)]

    def _storms(self, now: Snapshot) -> list[Note]:
        """That many lost their seats within the window, unless a note said so a moment ago."""
        recent = self._preemptions
        recent.append((now.t, now.metrics["preemptions"]))
        while recent[0][0] < now.t - _WINDOW_S:
            recent.popleft()
        growth = recent[-1][1] - recent[0][1]
        if growth < _many_preemptions(now) or now.t - self._storm_at < _QUIET_S:
            return []
        self._storm_at = now.t
        hit = {"preempted": growth}
        return [make_note(now.t, "warn", "preemption_storm", _STORM, hit)]


def _many_preemptions(now: Snapshot) -> int:
    """How many in a window are worth a note."""
    return max(_FEW_PREEMPTIONS, now.n_seats // 4)


def _compiles(now: Snapshot, records: np.ndarray) -> list[Note]:
    compiled = records[records["compiled"] > 0]
    return [_compile_note(now.t, record) for record in compiled]


def _compile_note(t: float, record: np.void) -> Note:
    """All streams waited for the step."""
    hit = {"rows": int(record["bucket_tokens"])}
    seconds = float(record["device_s"] + record["launch_s"])
    return make_note(t, "warn", "compile", _compile_message(record), hit, seconds)


def _compile_message(record: np.void) -> str:
    seconds = record["device_s"] + record["launch_s"]
    return (
        f"step {record['step']} had to compile a program for {record['bucket_tokens']} rows "
        f"and took {seconds:.1f} s"
    )


def _accidents(before: Snapshot | None, now: Snapshot) -> Iterator[Note]:
    for code, counter in _ACCIDENTS.items():
        more = counter(now) - (0 if before is None else counter(before))
        if more > 0:
            unit, message = _ACCIDENT_TEXTS[code]
            yield make_note(
                now.t, "error", code, message.format(more), {unit: int(more)} if unit else None
            )


#: How often each accident has happened.
_ACCIDENTS: dict[str, Callable[[Snapshot], int]] = {
    "nan": lambda snapshot: snapshot.metrics["nan_rows"],
    "canary": lambda snapshot: snapshot.metrics["canary"]["mismatched"],
    "dead": lambda snapshot: snapshot.state == "dead",
}
#: The unit of each accident's count ("" for none), and its message.
_ACCIDENT_TEXTS = {
    "nan": ("rows", "logits were not finite in {} rows; their requests have ended"),
    "canary": (
        "answers",
        "computed again with the reference kernels, so many answers came out otherwise: "
        "{}. `jitney doctor` compares every kernel",
    ),
    "dead": ("", "the engine is dead and is not started again"),
}


def _outage_note(outage: JsonDict) -> Note:
    """From the core's end until streams flow again."""
    message = (
        f"{outage['cause']}. {_back(outage)} Requests that went on: {outage['n_resumed']}; that "
        f"ended with an error: {outage['n_lost']}"
    )
    hit = {"resumed": outage["n_resumed"], "lost": outage["n_lost"]}
    silence_s = None if outage["flowing"] is None else outage["flowing"] - outage["began"]
    return make_note(outage["began"], "error", "outage", message, hit, silence_s)


def _back(outage: JsonDict) -> str:
    """How far it is over."""
    restart, ready, flowing = outage["restart"], outage["ready"], outage["flowing"]
    if ready is None:
        return f"Restart {restart} is under way."
    back = f"another engine was there after {ready - outage['began']:.1f} s"
    if flowing is not None:
        seconds = flowing - outage["began"]
        return f"Restart {restart}: streams flowed again after {seconds:.1f} s ({back})."
    return (
        f"Restart {restart}: {back} and computes again what streams had; "
        f"{outage['n_flowing']} of {outage['n_streams']} go on."
    )


def _refusals_note(refusals: JsonDict) -> Note:
    """How many were turned away since it began, and why."""
    counts = sorted(refusals["counts"].items(), key=lambda item: -item[1])
    total = sum(count for _, count in counts)
    reasons = "; ".join(f"{count} x {name}{_why(name)}" for name, count in counts)
    requests = "request was" if total == 1 else "requests were"
    seconds = refusals["newest"] - refusals["began"]
    within = f" within {seconds:.0f} s" if seconds >= 1 else ""
    message = f"{total} {requests} turned away{within}: {reasons}"
    if refusals["retry_s"] is not None:
        message += f"; the newest was told to come again in {refusals['retry_s']:.1f} s"
    return make_note(refusals["began"], "warn", "refusals", message, {"refused": total})


def _why(name: str) -> str:
    """name: "429 queue_full"."""
    reason = _WHY.get(name.partition(" ")[2])
    return f" ({reason})" if reason else ""


def make_note(
    t: float,
    level: str,
    code: str,
    message: str,
    hit: dict[str, int] | None = None,
    silence_s: float | None = None,
) -> Note:
    """A note with rounded times. hit: names of units to counts; those of 0 are left out."""
    return {
        "level": level,
        "code": code,
        "message": message,
        "t": round(t, 4),
        "hit": {unit: n for unit, n in (hit or {}).items() if n},
        "silence_s": None if silence_s is None else round(silence_s, 3),
    }
