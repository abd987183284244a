"""Notes about an engine: events and conditions that an operator should know."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import msgspec
import numpy as np

from jitney.dashboard.sse import Note, with_note
from jitney.engine.common.requests import JsonDict
from jitney.engine.server import EngineClient

#: Preemptions are counted over so many seconds.
_WINDOW_S = 5.0
#: Least seconds between two notes about preemptions.
_QUIET_S = 30.0
#: Least preemptions within the window for a note, on a few seats.
_FEW_PREEMPTIONS = 4
#: Most notes stored for the page, and for `since`.
_KEPT, _NEWS = 20, 400
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
    "store_unavailable": "files, batches and jobs cannot be stored",
}


class _TroubleText(NamedTuple):
    """Level and text of the note about one kind of trouble (`incidents._Trouble`)."""

    level: str
    #: Text with placeholders for count and cause.
    message: str
    #: What is counted; "": nothing.
    unit: str = ""


#: By the kind of incident.
TROUBLES = {
    "disk_full": _TroubleText(
        "error",
        "a disk that files, batches, jobs or the record of traffic are written to is full "
        "({cause}); other answers go on",
    ),
    "store": _TroubleText(
        "error",
        "reads and writes of a store that failed: {count}; the newest: {cause}. Answers go on",
        "failures",
    ),
    "webhook": _TroubleText(
        "warn",
        "messages about ended batches and jobs that were not accepted: {count}; the newest: "
        "{cause}. Each is sent again up to seven times within ten hours",
        "messages",
    ),
}


class Notes:
    """Finds notes of one engine, each once, for all that show or store them. `newest`: the newest
    ones, oldest first.
    """

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.newest: list[Note] = []
        #: Notes found so far, renewed ones included.
        self.n = 0
        self._news: deque[Note] = deque(maxlen=_NEWS)
        #: The newest step that was processed.
        self._last_step = client.history.records.last_step
        #: (t, total) of the preemptions at each call of `look` within the window.
        self._preemptions: deque[tuple[float, int]] = deque()
        #: Time of the last note about preemptions.
        self._storm_at = -np.inf
        #: Start time of the engine whose kernel proof was noted last.
        self._proof_of = -np.inf
        #: The last notes of outages, refusals and trouble, by code and beginning.
        self._sent: dict[tuple[str, float], Note] = {}
        #: How often each accident has happened.
        self._accidents = dict.fromkeys(_ACCIDENTS, 0)
        #: Monotonic time at which the engine was first seen asleep; whether the drain was noted.
        self._asleep_at: float | None = None
        self._drain_noted = False

    def since(self, number: int) -> list[Note]:
        """Notes found after the first `number`, as far back as they are known."""
        forgotten = self.n - len(self._news)
        return list(islice(self._news, max(0, number - forgotten), None))

    def look(self, now: float) -> None:
        """Find new and renewed notes; the first call also finds earlier events. now:
        time.monotonic().
        """
        for note in (
            *self._kernels_out(),
            *self._renewed(),
            *self._new_accidents(now),
            *self._compiles(),
            *self._storms(now),
            *self._sleep(now),
            *self._drain(),
        ):
            self.newest = with_note(self.newest, note, _KEPT)
            self._news.append(note)
            self.n += 1

    def _kernels_out(self) -> Iterator[Note]:
        """Kernels that an engine's proof left out, once per engine, at the time when it got ready:
        the first viewer may come much later.
        """
        info, ready_at = self.client.info, self.client.history.ready_at
        out = info.kernels.out if info is not None else []
        if out and ready_at > self._proof_of:
            self._proof_of = ready_at
            message = _KERNELS_OUT.format(", ".join(out))
            yield _make_note(ready_at, "error", "kernels_out", message, {"kernels": len(out)})

    def _renewed(self) -> list[Note]:
        """New notes of outages, refusals and trouble, each from its start on."""
        incidents = self.client.history.incidents
        notes = [_outage_note(msgspec.structs.asdict(one)) for one in incidents.outages]
        notes += [_refusals_note(msgspec.structs.asdict(one)) for one in incidents.refusals]
        notes += [_trouble_note(msgspec.structs.asdict(one)) for one in incidents.troubles]
        before, self._sent = self._sent, {(note["code"], note["t"]): note for note in notes}
        return [note for what, note in self._sent.items() if before.get(what) != note]

    def _new_accidents(self, now: float) -> Iterator[Note]:
        for code, accident in _ACCIDENTS.items():
            before, self._accidents[code] = self._accidents[code], accident.counted(self.client)
            more = self._accidents[code] - before
            if more > 0:
                hit = {accident.unit: more} if accident.unit else None
                yield _make_note(now, "error", code, accident.message.format(more), hit)

    def _compiles(self) -> Iterator[Note]:
        """Notes of programs compiled while serving, for which all streams of the step waited."""
        ring = self.client.history.records
        records, ready = ring.steps(self._last_step, ring.last_step)
        self._last_step = ring.last_step
        for place in np.flatnonzero(records["compiled"]):
            record = records[place]
            seconds = float(record["device_s"] + record["launch_s"])
            message = (
                f"step {record['step']} had to compile a program for {record['bucket_tokens']} "
                f"rows and took {seconds:.1f} s"
            )
            hit = {"streams": int(record["seats_busy"]), "rows": int(record["bucket_tokens"])}
            yield _make_note(float(ready[place]), "warn", "compile", message, hit, seconds)

    def _storms(self, now: float) -> Iterator[Note]:
        """A note of many preemptions within the window, unless there was one recently."""
        recent = self._preemptions
        recent.append((now, self.client.counters.preemptions))
        while recent[0][0] < now - _WINDOW_S:
            recent.popleft()
        growth = recent[-1][1] - recent[0][1]
        many = max(_FEW_PREEMPTIONS, len(self.client.history.seats) // 4)
        if growth >= many and now - self._storm_at >= _QUIET_S:
            self._storm_at = now
            yield _make_note(now, "warn", "preemption_storm", _STORM, {"preempted": growth})

    def _sleep(self, now: float) -> Iterator[Note]:
        asleep, began = self.client.state == "sleeping", self._asleep_at
        if asleep and began is None:
            self._asleep_at = now
            yield _make_note(now, "info", "sleep", "the engine was sent to sleep")
        elif not asleep and began is not None:
            self._asleep_at = None
            message = f"the engine slept for {now - began:.0f} s"
            yield _make_note(began, "info", "sleep", message, silence_s=now - began)

    def _drain(self) -> Iterator[Note]:
        drain = self.client.history.incidents.drain
        if drain is not None and not self._drain_noted:
            self._drain_noted = True
            t, n_open = drain
            message = f"the server was told to stop; open sequences: {n_open}"
            yield _make_note(t, "info", "drain", message, {"open": n_open})


class _Accident(NamedTuple):
    """A counted event that should not happen."""

    counted: Callable[[EngineClient], int]
    #: Unit of the count; "": none.
    unit: str
    #: Text with a placeholder for the increase of the count.
    message: str


def _is_dead(client: EngineClient) -> bool:
    """Whether the core died while the server was not told to stop."""
    return client.state == "dead" and client.history.incidents.drain is None


#: By their codes.
_ACCIDENTS = {
    "nan": _Accident(
        lambda client: client.counters.nan_rows,
        "rows",
        "logits were not finite in {} rows; their requests have ended",
    ),
    "canary": _Accident(
        lambda client: client.counters.canary_mismatched,
        "answers",
        "computed again with the reference kernels, so many answers came out otherwise: "
        "{}. `jitney doctor` compares every kernel",
    ),
    "dead": _Accident(_is_dead, "", "the engine is dead and is not started again"),
}


def _outage_note(outage: JsonDict) -> Note:
    """The note of an outage: from the core's end until streams continue."""
    message = (
        f"{outage['cause']}. {_back(outage)} Requests that went on: {outage['n_resumed']}; that "
        f"ended with an error: {outage['n_lost']}"
    )
    hit = {"resumed": outage["n_resumed"], "lost": outage["n_lost"]}
    silence_s = None if outage["flowing"] is None else outage["flowing"] - outage["began"]
    return _make_note(outage["began"], "error", "outage", message, hit, silence_s)


def _back(outage: JsonDict) -> str:
    """The part of the text about recovery."""
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
    counts = sorted(refusals["counts"].items(), key=lambda item: -item[1])
    total = sum(count for _, count in counts)
    reasons = "; ".join(f"{count} x {name}{_why(name)}" for name, count in counts)
    requests = "request was" if total == 1 else "requests were"
    seconds = refusals["newest"] - refusals["began"]
    within = f" within {seconds:.0f} s" if seconds >= 1 else ""
    message = f"{total} {requests} turned away{within}: {reasons}"
    if refusals["retry_s"] is not None:
        message += f"; the newest was told to come again in {refusals['retry_s']:.1f} s"
    return _make_note(refusals["began"], "warn", "refusals", message, {"refused": total})


def _trouble_note(trouble: JsonDict) -> Note:
    text, count = TROUBLES[trouble["code"]], trouble["count"]
    message = text.message.format(count=count, cause=trouble["cause"])
    hit = {text.unit: count} if text.unit else None
    return _make_note(trouble["began"], text.level, trouble["code"], message, hit)


def _why(name: str) -> str:
    """name: "429 queue_full"."""
    reason = _WHY.get(name.partition(" ")[2])
    return f" ({reason})" if reason else ""


def _make_note(
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
