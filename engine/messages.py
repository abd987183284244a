"""Messages between the API process and the core process (msgspec, MessagePack; tagged unions).

One direction each: `ToCore` and `FromCore`. The encoders hold no state, so any process may make its
own.
"""

from __future__ import annotations

import msgspec

from jitney.engine.errors import ErrorInfo
from jitney.engine.types import EngineInfo, EngineRequest, FinishReason, Seat, SequenceOutput


class Add(msgspec.Struct, tag="add", frozen=True):
    request: EngineRequest


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """End a request (index None) or one of its sequences. reason "stop": the text half found a stop
    string.
    """

    request_id: str
    index: int | None = None
    reason: FinishReason = "abort"


class AskSeatMap(msgspec.Struct, tag="ask_seat_map", frozen=True):
    """Ask for a `SeatMap` with the same ticket. seats False: the pages alone, which costs next to
    nothing.
    """

    ticket: int
    seats: bool = True


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """Stop the loop after the current step and exit with status 0."""


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """Start-up news. stage: download | weights | compile | warmup; done of total in the stage's own
    unit.
    """

    stage: str
    done: int
    total: int
    detail: str = ""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    info: EngineInfo


class Life(msgspec.Struct, array_like=True, frozen=True):
    """Something that happened to a sequence, at time t (time.monotonic()) and in or before step
    `step`.

    event: queued | seated | first_token | preempted | finished | aborted | released (a seat that a
    batch held after its passenger's end is free). The core tells what its outputs do not: seated,
    preempted, released; the rest is found by `jitney.engine.telemetry.history`. seat -1: none, or
    not known to who tells. n_out: output tokens known by then. reason: how it ended, or an error's
    code.
    """

    event: str
    request_id: str
    index: int
    seat: int
    step: int
    t: float
    n_in: int
    n_out: int
    reason: str = ""


class PromptRows(msgspec.Struct, array_like=True, frozen=True):
    """A prompt chunk that a step computed: positions start .. start + count - 1, `recomputed` of
    them not for the first time."""

    request_id: str
    index: int
    start: int
    count: int
    recomputed: int


class CanaryFinding(msgspec.Struct, array_like=True, frozen=True):
    """What came of computing one sequence again with the reference."""

    apart: float  # largest difference of two log-probabilities; infinite: it could not be computed
    right: bool  # rounding explains the difference


class StepReport(msgspec.Struct, tag="step", frozen=True, omit_defaults=True):
    """What one step made known. record: bytes of one `ledger.STEP_DTYPE` item, empty when nothing
    was computed.

    chunks: the prompt chunks of that step. life: who boarded and who was preempted for the step
    launched meanwhile, in that order of happening: after the ends in `outputs`. answers: to whoever
    asked for a seat map since the last report. canary: of the sequences that were computed again
    since the last report.
    """

    outputs: list[SequenceOutput]
    record: bytes = b""
    life: list[Life] = []
    chunks: list[PromptRows] = []
    answers: list[SeatMap] = []
    canary: list[CanaryFinding] = []


class Tick(msgspec.Struct, tag="tick", frozen=True):
    """The idle loop is alive (sent about once a second while there is no work)."""

    waiting: int


class SeatMap(msgspec.Struct, tag="seat_map", frozen=True):
    """seats: empty if only the pages were asked for. page_states: uint8[N]: 0 free, 1 held, 2
    shared, 3 cached.
    """

    ticket: int
    seats: list[Seat]
    page_states: bytes


class Fatal(msgspec.Struct, tag="fatal", frozen=True):
    """The core cannot start or go on; its process exits after this."""

    error: ErrorInfo


ToCore = Add | Abort | AskSeatMap | Shutdown
FromCore = Progress | Ready | StepReport | Tick | SeatMap | Fatal

encode = msgspec.msgpack.encode
decode_to_core = msgspec.msgpack.Decoder(ToCore).decode
decode_from_core = msgspec.msgpack.Decoder(FromCore).decode
