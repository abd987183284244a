"""The engine as a viewer of the feed knows it: a key frame, and every change since. The terminal's
twin of the page; `jitney.dashboard.sse` explains the events.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

from jitney.dashboard.sse import Delta, Hello, KeyFrame, Note, SeatLists

#: Newest notes that are kept.
_MAX_NOTES = 20


@dataclass(slots=True)
class SeatView:
    """One seat; the numbers are `sse.SEAT_NUMBERS`, in their order."""

    #: A name of SEAT_STATES.
    state: str = "free"
    request: str | None = None
    index: int = 0
    n_prompt: int = 0
    n_computed: int = 0
    n_output: int = 0
    max_tokens: int = 0

    def advance(self, steps: int) -> None:
        """What happens to a seat of which the feed says nothing."""
        if self.state == "decode":
            self.n_output += steps
            self.n_computed = self.n_prompt + self.n_output - 1


@dataclass(slots=True)
class Replica:
    """Fed with the feed's events in order; most fields are those of `sse.KeyFrame`."""

    #: None before the first.
    hello: Hello | None = None
    t: float = 0.0
    step: int = -1
    state: str = "unknown"
    last_step_age_s: float = 0.0
    progress: dict[str, Any] | None = None
    #: None without an engine.
    seats: list[SeatView] | None = None
    #: A cell a byte; None while not known.
    cells: bytearray | None = None
    #: Pages by state.
    counts: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    n_events: int = 0

    @property
    def info(self) -> dict[str, Any]:
        """What runs; empty while nothing does."""
        if self.hello is None:
            return {}
        return self.hello["info"] or {}

    def apply(self, name: str, data: Any) -> None:
        """One event; unknown ones are passed over, as a newer server may send them."""
        if name == "hello":
            self.hello = data
        elif name == "key_frame":
            self._apply_key_frame(data)
        elif name == "delta":
            self._apply_delta(data)
        elif name == "note":
            self.notes = [*self.notes, data][-_MAX_NOTES:]

    def _apply_key_frame(self, frame: KeyFrame) -> None:
        self.t = frame["t"]
        self.step = frame["step"]
        self.state = frame["state"]
        self.last_step_age_s = frame["last_step_age_s"]
        self.progress = frame["progress"]
        self.metrics = dict(frame["metrics"])
        self.notes = frame["notes"]
        self.n_events = frame["n_events"]
        self.seats = None
        if frame["seats"] is not None:
            self.seats = self._seat_views(frame["seats"])
        self.cells = None
        self.counts = {}
        if frame["pages"] is not None:
            self.cells = bytearray(base64.b64decode(frame["pages"]["cells"]))
            self.counts = frame["pages"]["counts"]

    @property
    def _states(self) -> tuple[str, ...]:
        return self.hello["seat_states"] if self.hello is not None else ()

    def _seat_views(self, seats: SeatLists) -> list[SeatView]:
        codes = base64.b64decode(seats["state"])
        rows = zip(
            [self._states[code] for code in codes],
            seats["request"],
            seats["index"],
            seats["n_prompt"],
            seats["n_computed"],
            seats["n_output"],
            seats["max_tokens"],
            strict=True,
        )
        return [SeatView(*row) for row in rows]

    def _apply_delta(self, delta: Delta) -> None:
        self._change_seats(delta)
        pages = delta.get("pages")
        if pages is not None and self.cells is not None:
            for first, count, state in pages["runs"]:
                self.cells[first : first + count] = bytes([state]) * count
            self.counts = pages["counts"]
        self.t = delta["t"]
        self.step = delta["step"]
        self.n_events = delta["n_events"]
        self.state = delta.get("state", self.state)
        self.last_step_age_s = delta.get("last_step_age_s", self.last_step_age_s)
        self.progress = delta.get("progress", self.progress)
        self.metrics = self.metrics | delta.get("metrics", {})

    def _change_seats(self, delta: Delta) -> None:
        for seat in self.seats or ():
            seat.advance(delta["step"] - self.step)
        for number, code, *row in delta.get("seats", ()):
            assert self.seats is not None  # the feed sends a key frame when seats appear
            self.seats[number] = SeatView(self._states[code], *row)
