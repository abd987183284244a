"""Messages between the API process and the core process (msgspec, MessagePack; tagged unions).

One direction each: `ToCore` and `FromCore`. The encoders hold no state, so any process may make its own.
"""

from __future__ import annotations

import msgspec

from jitney.engine.errors import ErrorInfo
from jitney.engine.types import EngineInfo, EngineRequest, FinishReason, SequenceOutput, Slot


class Add(msgspec.Struct, tag="add", frozen=True):
    request: EngineRequest


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """End a request (index None) or one of its sequences. reason "stop": the text half found a stop string."""

    request_id: str
    index: int | None = None
    reason: FinishReason = "abort"


class AskSlots(msgspec.Struct, tag="slots", frozen=True):
    """Ask for a `Slots` answer carrying the same ticket."""

    ticket: int


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """Stop the loop after the current step and exit with status 0."""


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """Start-up news. stage: download | weights | compile | warmup; done of total in the stage's own unit."""

    stage: str
    done: int
    total: int
    detail: str = ""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    info: EngineInfo


class StepReport(msgspec.Struct, tag="step", frozen=True):
    """What one step made known. record: bytes of one `ledger.STEP_DTYPE` item, empty when nothing was computed."""

    outputs: list[SequenceOutput]
    record: bytes = b""


class Tick(msgspec.Struct, tag="tick", frozen=True):
    """The idle loop is alive (sent about once a second while there is no work)."""

    waiting: int


class Slots(msgspec.Struct, tag="slots_are", frozen=True):
    ticket: int
    slots: list[Slot]
    page_states: bytes  # uint8[N]: 0 free, 1 held, 2 shared, 3 cached


class Fatal(msgspec.Struct, tag="fatal", frozen=True):
    """The core cannot start or go on; its process exits after this."""

    error: ErrorInfo


ToCore = Add | Abort | AskSlots | Shutdown
FromCore = Progress | Ready | StepReport | Tick | Slots | Fatal

encode = msgspec.msgpack.encode
decode_to_core = msgspec.msgpack.Decoder(ToCore).decode
decode_from_core = msgspec.msgpack.Decoder(FromCore).decode
