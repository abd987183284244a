"""One sequence's way through an engine: the record that the history, the simulator and the benches
fill, and that pages, figures and traces are made of. Plain data, no clock.

All times are seconds of one clock: time.monotonic() of a server and of a bench, virtual time of the
simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import msgspec

_RequestState = Literal["waiting", "prefill", "decode", "finished"]
#: Ends that gave the client what it asked for.
_SERVED = ("stop", "length")
#: Errors of the engine, not of a request that it refused.
_ENGINE_ERRORS = ("engine_dead", "internal_error", "request_failed")


class ComputedChunk(NamedTuple):
    """Prompt positions start .. start + count - 1, computed by one step."""

    step: int
    start: int
    count: int
    recomputed: int  # so many of them had been computed before


class Stay(msgspec.Struct):
    """One stay in a seat. Written by `history.RequestRecords`."""

    seat: int
    #: Its first step.
    step: int
    #: When the device could begin that step.
    start: float
    #: When a token first came of this stay; None while none did, or if the seat was gone by then.
    first_token: float | None = None
    #: The step that brought it, -1 while none did.
    first_step: int = -1
    #: When the seat was left; None while on board.
    end: float | None = None
    #: The last step it took part in, -1 while on board.
    last_step: int = -1
    #: "preempted", or why the sequence ended; empty while on board.
    how: str = ""

    @property
    def left(self) -> float:
        """When the seat was left, infinity while on board."""
        if self.end is None:
            return math.inf
        return self.end

    def seconds(self, since: float = -math.inf, until: float = math.inf) -> float:
        """How long it lasted, of the time between these two alone; `until` must be finite if it
        lasts still.
        """
        return max(0.0, min(self.left, until) - max(self.start, since))


class RequestRecord(msgspec.Struct, kw_only=True):
    """One sequence, from its arrival to its end.

    Written by `history.RequestRecords` from a core's reports. A client that measures from outside
    fills in what it can see, and leaves the rest as it is.
    """

    #: Rises with each record of one history.
    number: int
    n_prompt: int
    #: When it came; in a bench when it should have come, so that time spent unsent counts too.
    arrival: float
    request_id: str = ""
    #: Which of the request's `n` sequences it is.
    index: int = 0
    #: As in `EngineRequest`.
    tenant: str = ""
    priority: int = 0
    #: Nobody waits for it: a line of a batch.
    background: bool = False
    #: The adapter that answers it, from 1; 0: none.
    adapter: int = 0
    #: Most output tokens it may have, 0: no limit of its own.
    max_tokens: int = 0
    #: Output tokens so far.
    n_output: int = 0
    #: Prompt tokens found in the prefix cache when its first token came.
    cached_tokens: int = 0
    #: How often it lost its seat to others.
    preemptions: int = 0
    #: When it first boarded; None: never, or not known.
    boarded: float | None = None
    #: When its first output token came; None: never.
    first_token: float | None = None
    #: When it ended; None while it goes on.
    finished: float | None = None
    #: Why: a FinishReason, or the kind of a client's error; empty while it goes on.
    finish: str = ""
    #: The error's code and message, if it ended with one, and the seconds after which a client was
    #: told to come again; None: it was told of none.
    code: str = ""
    message: str = ""
    retry_s: float | None = None
    #: In order of time; of them the last one may still last.
    stays: list[Stay] = []
    #: Prompt chunks that steps computed, in order; kept by a server's `History` alone.
    chunks: list[ComputedChunk] = []
    #: The prompt's ids and then the output's; None unless they are wanted.
    tokens: list[int] | None = None
    #: When each output token (over HTTP: each piece of text) came; None unless they are wanted.
    token_times: list[float] | None = None

    @property
    def end(self) -> float:
        """When it ended, infinity while it goes on."""
        if self.finished is None:
            return math.inf
        return self.finished

    def until(self, t: float) -> RequestRecord:
        """It as it stood at t: who had not ended is said to end then, in the state it was in.

        Without stays, chunks and tokens.
        """
        record = msgspec.structs.replace(
            self, request_id="", tenant="", message="", stays=[], chunks=[], tokens=None
        )
        if self.finished is None:
            record.finished = t
            record.finish = self.state
        return record

    @property
    def served(self) -> bool:
        """True when it ended as its client wished."""
        return self.finish in _SERVED

    @property
    def refused(self) -> bool:
        """True when it was not let in: it ended with an error of its own before it had a seat."""
        return self.finish == "error" and not self.stays and self.code not in _ENGINE_ERRORS

    @property
    def stay(self) -> Stay | None:
        """The stay it is on."""
        if not self.stays or self.stays[-1].end is not None:
            return None
        return self.stays[-1]

    def stays_within(self, start: float, end: float) -> Iterator[SeatStay]:
        """Its stays that touch the time from start to end."""
        for stay in self.stays:
            if stay.start < end and stay.left > start:
                yield self, stay

    @property
    def seat(self) -> int:
        """Its seat, -1 while it has none."""
        stay = self.stay
        if stay is None:
            return -1
        return stay.seat

    @property
    def state(self) -> _RequestState:
        """prefill until the first token of its stay is out."""
        if self.finished is not None:
            return "finished"
        stay = self.stay
        if stay is None:
            return "waiting"
        if stay.first_token is None:
            return "prefill"
        return "decode"

    @property
    def n_computed(self) -> int:
        """Positions whose KV its present stay has computed, as far as the host knows."""
        stay = self.stay
        if stay is None:
            return 0
        if stay.first_token is not None:
            return self.n_prompt + self.n_output - 1
        if not self.chunks or self.chunks[-1].step < stay.step:
            return 0
        return self.chunks[-1].start + self.chunks[-1].count

    @property
    def queue_s(self) -> float | None:
        """Seconds from its arrival to its first seat."""
        return self._after(self.boarded)

    @property
    def ttft_s(self) -> float | None:
        """Seconds to its first token."""
        return self._after(self.first_token)

    @property
    def e2e_s(self) -> float | None:
        """Seconds to its end."""
        return self._after(self.finished)

    def _after(self, t: float | None) -> float | None:
        if t is None:
            return None
        return max(0.0, t - self.arrival)

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; None for fewer than two tokens."""
        if self.first_token is None or self.finished is None or self.n_output < 2:
            return None
        return (self.finished - self.first_token) / (self.n_output - 1)


#: A request, and one of its stays.
type SeatStay = tuple[RequestRecord, Stay]


def stays_of(requests: Iterable[RequestRecord]) -> list[SeatStay]:
    """All stays of these requests, by their beginning."""
    pairs = ((request, stay) for request in requests for stay in request.stays)
    return sorted(pairs, key=_start)


def _start(pair: SeatStay) -> float:
    return pair[1].start
