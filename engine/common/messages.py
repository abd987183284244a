"""Messages between the API process (`ToCore`) and the core process (`FromCore`), as MessagePack."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from jitney.engine.common.engine_info import EngineInfo, Seat
from jitney.engine.common.errors import ErrorInfo
from jitney.engine.common.outputs import FinishReason, SequenceOutput
from jitney.engine.common.requests import EngineRequest


class Add(msgspec.Struct, tag="add", frozen=True):
    request: EngineRequest


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """End a request, or a sequence. reason "stop": the API process found a stop string."""

    request_id: str
    index: int | None = None
    reason: FinishReason = "abort"


class AskSeatMap(msgspec.Struct, tag="ask_seat_map", frozen=True):
    """Ask for a `SeatMap`."""

    #: Number that the answer repeats, as in all messages with an answer.
    ticket: int
    #: False: only the pages, which costs almost nothing.
    seats: bool = True


class TokenizerJson(msgspec.Struct, tag="tokenizer", frozen=True):
    """The model's tokenizer; needed before requests with grammars."""

    #: JSON of the `tokenizers` library.
    json: str


class Sleep(msgspec.Struct, tag="sleep", frozen=True):
    """Free the device's memory; answered by `Done`, with error busy while requests are open."""

    ticket: int


class Wake(msgspec.Struct, tag="wake", frozen=True):
    """Load the weights and allocate memory again; answered by `Done`."""

    ticket: int


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache", frozen=True):
    """Hide all current pages from later prompts; answered by `Done`."""

    ticket: int


class SetAdapters(msgspec.Struct, tag="set_adapters", frozen=True):
    """Serve exactly these adapters from now on; answered by `AdaptersSet`."""

    ticket: int
    #: Name -> folder.
    folders: dict[str, str]
    #: Smallest number for new adapters.
    first_number: int


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """Stop the loop after the current step and exit with status 0."""


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Accept no more requests; `DrainState` informs the engines that share experts."""

    #: It has no open request left.
    drained: bool


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """Progress of the start."""

    #: Stages that count bytes.
    IN_BYTES: ClassVar = ("download", "weights")

    #: download | sizes | hosts | weights | proof | compile | warmup
    stage: str
    #: Bytes of a stage in `IN_BYTES`; else items.
    done: int
    total: int
    #: Current item, such as a program's name.
    detail: str = ""

    @property
    def so_far(self) -> str:
        """Done and total in words: "3 of 9", or "1.9 of 15.3 GiB"."""
        if self.stage not in self.IN_BYTES:
            return f"{self.done} of {self.total}"
        scale, unit = (1 << 30, "GiB") if self.total >= 1 << 30 else (1 << 20, "MiB")
        return f"{self.done / scale:.1f} of {self.total / scale:.1f} {unit}"


class Ready(msgspec.Struct, tag="ready", frozen=True):
    info: EngineInfo


class SequenceEvent(msgspec.Struct, array_like=True, frozen=True):
    """A state change. The core reports seated, preempted and released; `History` derives others."""

    #: queued | seated | first_token | preempted | finished | aborted | released (a seat that a
    #: batch held after its sequence ended is free).
    event: str
    request_id: str
    #: Number of the sequence among the request's n.
    index: int
    #: -1: none, or unknown.
    seat: int
    #: The step, or the next one after the event.
    step: int
    #: Seconds of time.monotonic().
    t: float
    #: Tokens of the prompt.
    n_in: int
    #: Output tokens so far.
    n_out: int
    #: A FinishReason or an error's code.
    reason: str = ""


class PromptChunk(msgspec.Struct, array_like=True, frozen=True):
    """Rows of a prompt that a step computed."""

    request_id: str
    #: Number of the sequence among the request's n.
    index: int
    #: First position.
    start: int
    count: int
    #: Rows that had been computed before.
    recomputed: int


class CanaryFinding(msgspec.Struct, array_like=True, frozen=True):
    """Comparison of a sequence with its computation by the reference kernels."""

    apart: float  # largest difference of log-probabilities; infinite: not computed
    right: bool  # rounding explains the difference


class GrammarWork(msgspec.Struct, array_like=True):
    """Cost of grammars since the last report."""

    #: Masks computed, and their seconds, while the device computed the step.
    masks: int = 0
    mask_s: float = 0.0
    #: Grammars compiled, and their seconds, beside the steps.
    compiled: int = 0
    compile_s: float = 0.0
    #: Compiled grammars in the cache.
    cached: int = 0


class StepReport(msgspec.Struct, tag="step", frozen=True, omit_defaults=True):
    """Results of one step."""

    #: New tokens and ends.
    outputs: list[SequenceOutput]
    #: One item of `records.STEP_DTYPE`; empty if nothing was computed.
    record: bytes = b""
    #: Preemptions, then boardings, for the step launched meanwhile; after the ends in `outputs`.
    events: list[SequenceEvent] = []
    #: Prompt chunks of the step.
    chunks: list[PromptChunk] = []
    #: Answers to `AskSeatMap` and `SetAdapters` since the last report.
    answers: list[SeatMap | AdaptersSet] = []
    #: Canary results since the last report.
    canary: list[CanaryFinding] = []
    #: None: no work.
    grammars: GrammarWork | None = None
    #: Predicted wait of a new request for a seat, s; None: not computed since the last report.
    predicted_wait: float | None = None


class FirstStep(msgspec.Struct, tag="first_step", frozen=True):
    """The core is about to run the first step of a bucket, which may take much longer."""

    #: Number of the step.
    step: int


class Heartbeat(msgspec.Struct, tag="heartbeat", frozen=True):
    """The idle loop is alive; sent about once a second without work."""

    #: Sequences without a seat.
    waiting: int


class WaitingFor(msgspec.Struct, tag="waiting_for", frozen=True):
    """The core waits for the step sizes of engines that share experts with it; sent each second."""

    #: Hosts that have not answered; empty: unknown.
    hosts: list[int]


class SeatMap(msgspec.Struct, tag="seat_map", frozen=True):
    """The state of seats and pages."""

    ticket: int
    #: Empty if only the pages were asked for.
    seats: list[Seat]
    #: uint8[N]: 0 free, 1 in use, 2 shared, 3 cached.
    page_states: bytes
    #: Of layers with pages of their own, by window: pages free, in use, shared and cached.
    window_pages: dict[int, list[int]] = {}


class Done(msgspec.Struct, tag="done", frozen=True, omit_defaults=True):
    """The request with this ticket is done, or failed."""

    ticket: int
    #: None: it succeeded.
    error: ErrorInfo | None = None
    #: Bytes of device memory that it freed.
    freed: int = 0


class AdaptersSet(msgspec.Struct, tag="adapters_set", frozen=True, omit_defaults=True):
    """The adapters that are served from now on, or why they are unchanged."""

    ticket: int
    #: None: they were set.
    error: ErrorInfo | None = None
    #: Name -> number.
    adapters: dict[str, int] = {}
    #: Digest of the configuration with them.
    config_digest: str = ""
    #: Names of new adapters, of removed ones, and of those with changed files.
    added: list[str] = []
    removed: list[str] = []
    replaced: list[str] = []
    #: Names of those with changed files that are served with the old ones until the next start.
    needs_restart: list[str] = []


class AdaptersFollowed(msgspec.Struct, tag="adapters_followed", frozen=True):
    """A following host serves these adapters from now on, and after its next start."""

    #: Name -> folder.
    folders: dict[str, str]


class Fatal(msgspec.Struct, tag="fatal", frozen=True):
    """The core cannot start or continue; its process exits after this."""

    #: Error code of an engine that lost a host, for which no request is to blame.
    host_lost: ClassVar[str] = "host_lost"
    #: Error code of a core that refuses its model, settings or machine, as the next one would too.
    refused: ClassVar[str] = "refused"

    error: ErrorInfo

    @classmethod
    def of(cls, reason: str, code: str = "engine_dead") -> Fatal:
        """The message with `reason` in one line."""
        return cls(ErrorInfo(code, " ".join(reason.split())[:500]))


class DrainState(msgspec.Struct, tag="drain_state", frozen=True):
    """One of the engines that share experts must stop, so all must drain; or all have drained."""

    drained: bool


class PeerLeft(msgspec.Struct, tag="peer_left", frozen=True):
    """The first host of an engine has ended it; this core's process exits after this."""

    #: One line.
    reason: str


type ToCore = (
    Add
    | Abort
    | AskSeatMap
    | TokenizerJson
    | Sleep
    | Wake
    | ResetPrefixCache
    | SetAdapters
    | Drain
    | Shutdown
)
type FromCore = (
    Progress
    | Ready
    | FirstStep
    | StepReport
    | Heartbeat
    | WaitingFor
    | SeatMap
    | Done
    | AdaptersSet
    | AdaptersFollowed
    | DrainState
    | Fatal
    | PeerLeft
)

encode = msgspec.msgpack.encode
