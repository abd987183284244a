"""The record of a sequence from arrival to end, for history, simulator, benches, page and traces.
Times are seconds of one clock: time.monotonic(), or virtual time in the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import msgspec

from jitney.engine.common.requests import account_of

_RequestState = Literal["waiting", "prefill", "decode", "finished"]
#: Successful finish reasons.
_SERVED = ("stop", "length")
#: Errors of the engine; others are refusals.
_ENGINE_ERRORS = ("engine_dead", "internal_error", "request_failed")


class ComputedChunk(NamedTuple):
    """Prompt positions start .. start + count - 1, computed by one step."""

    step: int
    start: int
    count: int
    recomputed: int  # positions that had been computed before


class Stay(msgspec.Struct):
    """The time that a sequence holds a seat. Written by `history.RequestRecords`."""

    seat: int
    #: First step.
    step: int
    #: Earliest start of that step on the device.
    start: float
    #: Time of the first token in this seat; None: none yet, or the seat was left before.
    first_token: float | None = None
    #: Step of that token, -1 before.
    first_step: int = -1
    #: Time of leaving the seat; None while on board.
    end: float | None = None
    #: Last step, -1 while on board.
    last_step: int = -1
    #: "preempted", or the finish reason; "" while on board.
    how: str = ""

    @property
    def left(self) -> float:
        """Time of leaving the seat, infinity while on board."""
        if self.end is None:
            return math.inf
        return self.end

    def seconds(self, since: float = -math.inf, until: float = math.inf) -> float:
        """Seconds in the seat within `since` .. `until`, which must be finite while on board."""
        return max(0.0, min(self.left, until) - max(self.start, since))


class RequestRecord(msgspec.Struct, kw_only=True):
    """A sequence from arrival to end. `history.RequestRecords` writes it from a core's reports; a
    bench client fills in what it can measure from outside.
    """

    #: Increases with each record of a history.
    number: int
    n_prompt: int
    #: Time of arrival; in a bench the planned time, so that time before sending counts.
    arrival: float
    request_id: str = ""
    #: Number of the sequence among the request's n.
    index: int = 0
    #: As in `EngineRequest`.
    tenant: str = ""
    user: str = ""
    client_id: str = ""
    route: str = ""
    priority: int = 0
    #: See `SamplingParams.in_words`.
    parameters: str = ""
    #: A line of a batch.
    background: bool = False
    #: Number of its adapter; 0: none.
    adapter: int = 0
    #: Most output tokens; 0: not limited by the request.
    max_tokens: int = 0
    #: Output tokens so far.
    n_output: int = 0
    #: Prompt tokens found in the prefix cache, as of the first token.
    cached_tokens: int = 0
    #: Number of preemptions.
    preemptions: int = 0
    #: Output tokens so far that followed right drafts.
    accepted: int = 0
    #: Drafts that were checked for it and were wrong.
    rejected: int = 0
    #: Time of first boarding; None: never, or unknown.
    boarded: float | None = None
    #: Time of the first output token; None: never.
    first_token: float | None = None
    #: Time of its end; None while it runs.
    finished: float | None = None
    #: A FinishReason, or the kind of a client's error; "" while it runs.
    finish: str = ""
    #: Code and message of its error, if any, and the Retry-After in seconds, if sent.
    code: str = ""
    message: str = ""
    retry_s: float | None = None
    #: In order of time; the last one may be open.
    stays: list[Stay] = []
    #: Computed prompt chunks, in order; only in a server's `History`.
    chunks: list[ComputedChunk] = []
    #: Ids of the prompt and then of the output; None: not recorded.
    tokens: list[int] | None = None
    #: Time of each output token (over HTTP: of each piece of text); None: not recorded.
    token_times: list[float] | None = None

    @property
    def account(self) -> str:
        """As `EngineRequest` has it."""
        return account_of(self.tenant, self.user)

    @property
    def end(self) -> float:
        """Time of its end, infinity while it runs."""
        if self.finished is None:
            return math.inf
        return self.finished

    def until(self, t: float) -> RequestRecord:
        """The record as of t, a running sequence ended with its state; no stays, chunks, tokens."""
        record = msgspec.structs.replace(
            self,
            request_id="",
            tenant="",
            user="",
            client_id="",
            message="",
            stays=[],
            chunks=[],
            tokens=None,
        )
        if self.finished is None:
            record.finished = t
            record.finish = self.state
        return record

    @property
    def served(self) -> bool:
        """True if it ended successfully."""
        return self.finish in _SERVED

    @property
    def refused(self) -> bool:
        """True if it was refused: it ended with an error, not the engine's, before boarding."""
        return self.finish == "error" and not self.stays and self.code not in _ENGINE_ERRORS

    @property
    def stay(self) -> Stay | None:
        """The open stay, if any."""
        if not self.stays or self.stays[-1].end is not None:
            return None
        return self.stays[-1]

    def stays_within(self, start: float, end: float) -> Iterator[SeatStay]:
        """The stays that overlap start .. end."""
        for stay in self.stays:
            if stay.start < end and stay.left > start:
                yield self, stay

    @property
    def seat(self) -> int:
        """The seat, -1 without one."""
        stay = self.stay
        if stay is None:
            return -1
        return stay.seat

    @property
    def state(self) -> _RequestState:
        """The present state; prefill lasts until the first token of the stay."""
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
        """Positions whose KV the open stay has computed, as far as the host knows."""
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
        """Seconds from arrival to the first seat."""
        return self._after(self.boarded)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token."""
        return self._after(self.first_token)

    @property
    def e2e_s(self) -> float | None:
        """Seconds from arrival to the end."""
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


#: A sequence and one of its stays.
type SeatStay = tuple[RequestRecord, Stay]


def stays_of(requests: Iterable[RequestRecord]) -> list[SeatStay]:
    """All stays of these requests, by start."""
    pairs = ((request, stay) for request in requests for stay in request.stays)
    return sorted(pairs, key=lambda pair: pair[1].start)
