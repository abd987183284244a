"""The engine as a viewer of the feed knows it: a key frame, and every change since. The terminal's
twin of the page.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import msgspec


@dataclass(slots=True)
class SeatView:
    """One seat; state is a name of hello's "states"."""

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
    """Fed with the feed's events in order. hello: None before the first; seats, cells: None without
    an engine.
    """

    hello: dict[str, Any] | None = None
    t: float = 0.0
    step: int = -1
    state: str = "unknown"
    age: float = 0.0
    progress: dict[str, Any] | None = None
    seats: list[SeatView] | None = None
    cells: bytearray | None = None
    counts: dict[str, int] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    notes: list[dict[str, Any]] = field(default_factory=list)
    n_life: int = 0

    @property
    def info(self) -> dict[str, Any]:
        """What runs; empty while nothing does."""
        return (self.hello or {}).get("info") or {}

    def take(self, name: str, data: Any) -> None:
        """One event; unknown ones are passed over, as a newer server may send them."""
        if name == "hello":
            self.hello = data
        elif name == "key":
            self._key(data)
        elif name == "d":
            self._delta(data)
        elif name == "note":
            self.notes = [*self.notes, data][-20:]

    def _key(self, data: dict[str, Any]) -> None:
        self.t, self.step, self.state, self.age = (
            data["t"],
            data["step"],
            data["state"],
            data["age"],
        )
        self.progress, self.scalars, self.notes, self.n_life = (
            data["progress"],
            data["s"],
            data["notes"],
            data["life"],
        )
        self.seats = None if data["seats"] is None else self._columns(data["seats"])
        self.cells = (
            None if data["pages"] is None else bytearray(base64.b64decode(data["pages"]["cells"]))
        )
        self.counts = {} if data["pages"] is None else data["pages"]["counts"]

    def _columns(self, seats: dict[str, Any]) -> list[SeatView]:
        names = self.hello["states"] if self.hello else []
        states = [names[code] for code in base64.b64decode(seats["state"])]
        return [
            SeatView(*row)
            for row in zip(
                states,
                seats["request"],
                seats["index"],
                seats["n_prompt"],
                seats["n_computed"],
                seats["n_output"],
                seats["max_tokens"],
                strict=True,
            )
        ]

    def _delta(self, data: dict[str, Any]) -> None:
        names = self.hello["states"] if self.hello else []
        for seat in self.seats or ():
            seat.advance(data["step"] - self.step)
        for number, code, *row in data.get("seats", ()):
            assert self.seats is not None  # the feed sends a key frame when seats appear
            self.seats[number] = SeatView(names[code], *row)
        if (pages := data.get("pages")) and self.cells is not None:
            for first, count, state in pages["runs"]:
                self.cells[first : first + count] = bytes([state]) * count
            self.counts = pages["counts"]
        self.t, self.step, self.n_life = data["t"], data["step"], data["life"]
        self.state, self.age = data.get("state", self.state), data.get("age", self.age)
        self.progress = data.get("progress", self.progress)
        self.scalars = self.scalars | data.get("s", {})


class EventReader:
    """Server-sent events out of pieces of bytes as they arrive. last_id: of the newest event that
    had one.
    """

    def __init__(self) -> None:
        self.last_id = ""
        self._rest = b""

    def feed(self, piece: bytes) -> list[tuple[str, Any]]:
        """The events that are complete now: (name, data)."""
        *blocks, self._rest = (self._rest + piece).split(b"\n\n")
        return [self._event(block) for block in blocks if block and not block.startswith(b":")]

    def _event(self, block: bytes) -> tuple[str, Any]:
        fields = dict(line.split(b": ", 1) for line in block.split(b"\n"))
        self.last_id = fields.get(b"id", self.last_id.encode()).decode()
        return fields[b"event"].decode(), msgspec.json.decode(fields[b"data"])
