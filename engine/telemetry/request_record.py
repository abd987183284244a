"""A sequence's whole way through the engine, as told by the engine's reports: what the page, its
timelines and "why was I slow" are made of. Plain data, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from jitney.engine.messages import PromptRows

TripState = Literal["waiting", "prefill", "decode", "finished"]


class ChunkDone(NamedTuple):
    """Prompt positions start .. start + count - 1, computed by a step; `recomputed` of them not for
    the first time.
    """

    step: int
    start: int
    count: int
    recomputed: int


@dataclass(slots=True, eq=False)
class Ride:
    """One stay in a seat, from step `step` to step `last_step`; times are seconds of
    time.monotonic().

    start: when the device could begin the first step. first_token, first_step: when a token first
    came of it. end, last_step, how: None, -1 and "" while on board; how: "preempted", or why the
    sequence ended.
    """

    seat: int
    step: int
    start: float
    first_token: float | None = None
    first_step: int = -1
    end: float | None = None
    last_step: int = -1
    how: str = ""


@dataclass(slots=True, eq=False)
class Trip:
    """One sequence, from its arrival until it is forgotten. number: rises with each trip.

    finish, code: why it ended, and the error's code, empty while it goes on. tokens: the prompt's
    ids and then the output's, None unless they are wanted.
    """

    number: int
    request: str
    index: int
    tenant: str
    priority: int
    n_prompt: int
    max_tokens: int
    arrival: float
    tokens: list[int] | None = None
    n_output: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    first_token: float | None = None
    finished: float | None = None
    finish: str = ""
    code: str = ""
    rides: list[Ride] = field(default_factory=list)
    chunks: list[ChunkDone] = field(default_factory=list)

    @property
    def ride(self) -> Ride | None:
        """The stay it is on."""
        return self.rides[-1] if self.rides and self.rides[-1].end is None else None

    @property
    def seat(self) -> int:
        """Its seat, -1 while it has none."""
        ride = self.ride
        return -1 if ride is None else ride.seat

    @property
    def seated(self) -> float | None:
        """When it first boarded."""
        return self.rides[0].start if self.rides else None

    @property
    def state(self) -> TripState:
        """prefill until the first token of its stay is out."""
        if self.finished is not None:
            return "finished"
        ride = self.ride
        if ride is None:
            return "waiting"
        return "prefill" if ride.first_token is None else "decode"

    @property
    def n_computed(self) -> int:
        """Positions whose KV its present stay has computed, as far as the host knows."""
        ride = self.ride
        if ride is None:
            return 0
        if ride.first_token is not None:
            return self.n_prompt + self.n_output - 1
        last = self.chunks[-1] if self.chunks else None
        return last.start + last.count if last is not None and last.step >= ride.step else 0

    @property
    def queued_s(self) -> float | None:
        """Seconds from arrival to its first seat."""
        return None if self.seated is None else max(0.0, self.seated - self.arrival)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token is None else max(0.0, self.first_token - self.arrival)

    @property
    def e2e_s(self) -> float | None:
        return None if self.finished is None else max(0.0, self.finished - self.arrival)

    def board(self, seat: int, step: int, t: float) -> None:
        self.rides.append(Ride(seat, step, t))

    def computed(self, step: int, rows: PromptRows) -> None:
        self.chunks.append(ChunkDone(step, rows.start, rows.count, rows.recomputed))

    def took(self, tokens: list[int], step: int, t: float) -> bool:
        """New output tokens; True if they are the first of all. The token of a preempted sequence
        may still come.
        """
        self.n_output += len(tokens)
        if self.tokens is not None:
            self.tokens += tokens
        ride = self.rides[-1] if self.rides else None
        if ride is not None and ride.first_token is None:
            ride.first_token, ride.first_step = t, step
        if self.first_token is not None:
            return False
        self.first_token = t
        return True

    def leave(self, step: int, t: float, how: str) -> None:
        """The seat is free after `step`, done at t."""
        ride = self.ride
        if ride is not None:
            ride.end, ride.last_step, ride.how = max(t, ride.start), step, how
