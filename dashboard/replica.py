"""The engine's state as rebuilt from its feed: a key frame, and all changes since. Used by the
terminal view; `jitney.dashboard.sse` explains the events.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

from jitney.dashboard.sse import (
    SEAT_NUMBERS,
    Delta,
    FeedStart,
    KeyFrame,
    Note,
    PageChanges,
    SeatLists,
    with_note,
)
from jitney.engine.common.requests import JsonDict

#: Number of newest notes that are stored.
_MAX_NOTES = 20
#: Fields that a delta has only if they changed.
_STATE = ("state", "last_step_age_s", "progress")


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
        """Advance a seat that deltas do not mention by this many steps."""
        if self.state == "decode":
            self.n_output += steps
            self.n_computed = self.n_prompt + self.n_output - 1


@dataclass(slots=True)
class ReplicaView:
    """The state after the feed's events so far; most fields are those of `sse.KeyFrame`."""

    #: None before the first.
    hello: FeedStart | None = None
    t: float = 0.0
    step: int = -1
    state: str = "unknown"
    last_step_age_s: float = 0.0
    progress: JsonDict | None = None
    #: None without an engine.
    seats: list[SeatView] | None = None
    #: One byte per cell; None while unknown.
    cells: bytearray | None = None
    #: Pages by state.
    counts: dict[str, int] = field(default_factory=dict)
    metrics: JsonDict = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    n_events: int = 0

    @property
    def info(self) -> JsonDict:
        """Facts of the running engine; empty while there is none."""
        if self.hello is None:
            return {}
        return self.hello["info"] or {}

    def apply(self, name: str, data: Any) -> None:
        """Apply an event. Unknown events are ignored, as a newer server may send them."""
        match name:
            case "hello":
                self.hello = data
            case "key_frame":
                self._apply_key_frame(data)
            case "delta":
                self._apply_delta(data)
            case "note":
                self.notes = with_note(self.notes, data, _MAX_NOTES)

    def _apply_key_frame(self, frame: KeyFrame) -> None:
        for name in ("t", "step", "n_events", "notes", *_STATE):
            setattr(self, name, frame[name])
        self.metrics = dict(frame["metrics"])
        seats, pages = frame["seats"], frame["pages"]
        self.seats = None if seats is None else self._seat_views(seats)
        self.cells, self.counts = None, {}
        if pages is not None:
            self.cells = bytearray(base64.b64decode(pages["cells"]))
            self.counts = pages["counts"]

    @property
    def _states(self) -> tuple[str, ...]:
        return self.hello["seat_states"] if self.hello is not None else ()

    def _seat_views(self, seats: SeatLists) -> list[SeatView]:
        states = [self._states[code] for code in base64.b64decode(seats["state"])]
        columns = [seats[name] for name in ("request", *SEAT_NUMBERS)]
        return [SeatView(*row) for row in zip(states, *columns, strict=True)]

    def _apply_delta(self, delta: Delta) -> None:
        self._change_seats(delta)
        pages = delta.get("pages")
        if pages is not None:
            self._change_pages(pages)
        self.metrics = self.metrics | delta.get("metrics", {})
        for name in ("t", "step", "n_events", *_STATE):
            setattr(self, name, delta.get(name, getattr(self, name)))

    def _change_pages(self, pages: PageChanges) -> None:
        if self.cells is not None:
            for first, count, state in pages["runs"]:
                self.cells[first : first + count] = bytes([state]) * count
            self.counts = pages["counts"]

    def _change_seats(self, delta: Delta) -> None:
        seats = self.seats or []  # the feed sends a key frame when seats appear
        for seat in seats:
            seat.advance(delta["step"] - self.step)
        for number, code, *row in delta.get("seats", ()):
            seats[number] = SeatView(self._states[code], *row)
