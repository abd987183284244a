"""Messages between the API process and the core process (msgspec, MessagePack; tagged unions).

One direction each: `ToCore` and `FromCore`. The encoders hold no state, so any process may make its
own.
"""

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

    #: The question's number, which its answer repeats; so in all that is answered.
    ticket: int
    seats: bool = True


class TokenizerJson(msgspec.Struct, tag="tokenizer", frozen=True):
    """The model's tokenizer: from here on answers can be held to grammars."""

    #: As the `tokenizers` library writes it.
    json: str


class Sleep(msgspec.Struct, tag="sleep", frozen=True):
    """Free the device's memory; answered by `Done`, code busy while there is work."""

    ticket: int


class Wake(msgspec.Struct, tag="wake", frozen=True):
    """Take the memory again; answered by `Done`."""

    ticket: int


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache", frozen=True):
    """Let no later prompt find a page that is there now; answered by `Done`."""

    ticket: int


class SetAdapters(msgspec.Struct, tag="set_adapters", frozen=True):
    """Serve these adapters from now on, and no others; answered by `AdaptersSet`."""

    ticket: int
    #: Folders by name.
    folders: dict[str, str]
    #: No adapter that comes gets a smaller number.
    first_number: int


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """Stop the loop after the current step and exit with status 0."""


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Of an engine that shares experts, which ends with the others: it takes no requests any more.
    Answered to all of them, by `DrainState`.
    """

    #: It has none left.
    drained: bool


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """How far the start is."""

    #: download | sizes | hosts | weights | proof | compile | warmup
    stage: str
    #: Of `total`, in the stage's own unit.
    done: int
    total: int
    #: What is at work, such as a tensor's name.
    detail: str = ""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    info: EngineInfo


class SequenceEvent(msgspec.Struct, array_like=True, frozen=True):
    """Something that happened to a sequence.

    The core reports what its outputs do not say: seated, preempted, released. The rest is added by
    `jitney.engine.common.history`.
    """

    #: queued | seated | first_token | preempted | finished | aborted | released (a seat that a
    #: batch held after its sequence's end is free).
    event: str
    request_id: str
    #: Of the sequence among the request's n.
    index: int
    #: -1: none, or not known.
    seat: int
    #: It happened in this step, or since the one before.
    step: int
    #: Seconds of time.monotonic().
    t: float
    #: Tokens of the prompt.
    n_in: int
    #: Output tokens known by then.
    n_out: int
    #: How the sequence ended, or an error's code.
    reason: str = ""


class PromptChunk(msgspec.Struct, array_like=True, frozen=True):
    """Rows of a prompt that a step computed."""

    request_id: str
    #: Of the sequence among the request's n.
    index: int
    #: Position of the first of them.
    start: int
    count: int
    #: How many of them were computed before.
    recomputed: int


class CanaryFinding(msgspec.Struct, array_like=True, frozen=True):
    """What came of computing one sequence again with the reference."""

    apart: float  # largest difference of two log-probabilities; infinite: it could not be computed
    right: bool  # rounding explains the difference


class GrammarWork(msgspec.Struct, array_like=True, frozen=True):
    """What grammars have cost since the last report."""

    #: Masks computed, and the seconds it took while the device computed the step.
    masks: int
    mask_s: float
    #: Grammars compiled, and the seconds it took, beside the steps.
    compiled: int
    compile_s: float
    #: Compiled grammars that are kept now.
    kept: int


class StepReport(msgspec.Struct, tag="step", frozen=True, omit_defaults=True):
    """What became known with one step."""

    #: New tokens and ends.
    outputs: list[SequenceOutput]
    #: One item of `records.STEP_DTYPE`; empty when nothing was computed.
    record: bytes = b""
    #: Who was preempted and who boarded for the step launched meanwhile, in that order: after the
    #: ends in `outputs`.
    events: list[SequenceEvent] = []
    #: The prompt chunks of the step.
    chunks: list[PromptChunk] = []
    #: Answers to questions about seats, or to new adapters, since the last report.
    answers: list[SeatMap | AdaptersSet] = []
    #: Of the sequences that were computed again since the last report.
    canary: list[CanaryFinding] = []
    #: None: there was none.
    grammars: GrammarWork | None = None
    #: Seconds that whoever comes now should wait for a seat; None: not looked at since the last
    #: report that said it.
    predicted_wait: float | None = None


class FirstStep(msgspec.Struct, tag="first_step", frozen=True):
    """The core is about to run the first step of a bucket, which may take much longer than others:
    programs are set up in it.
    """

    #: Its number.
    step: int


class Heartbeat(msgspec.Struct, tag="heartbeat", frozen=True):
    """The idle loop is alive (sent about once a second while there is no work)."""

    #: Sequences without a seat.
    waiting: int


class WaitingFor(msgspec.Struct, tag="waiting_for", frozen=True):
    """The core has a step to run and waits for engines that share experts with it, which have to
    say how large it is to be; sent every second of that.
    """

    #: Of the engines that have not, as far as is known; empty: not known yet.
    hosts: list[int]


class SeatMap(msgspec.Struct, tag="seat_map", frozen=True):
    """seats: empty if only the pages were asked for. page_states: uint8[N]: 0 free, 1 held, 2
    shared, 3 cached.
    """

    ticket: int
    seats: list[Seat]
    page_states: bytes


class Done(msgspec.Struct, tag="done", frozen=True, omit_defaults=True):
    """What was asked for with this ticket has been done, or why it has not."""

    ticket: int
    #: None: it has been done.
    error: ErrorInfo | None = None
    #: Bytes of device memory that it freed.
    freed: int = 0


class AdaptersSet(msgspec.Struct, tag="adapters_set", frozen=True, omit_defaults=True):
    """The adapters that are served from now on, or why they are those from before."""

    ticket: int
    #: None: they have been set.
    error: ErrorInfo | None = None
    #: Numbers by name.
    adapters: dict[str, int] = {}
    #: Of the configuration with them.
    config_digest: str = ""
    #: Names of those that came, that went, and whose files are others than before.
    added: list[str] = []
    removed: list[str] = []
    replaced: list[str] = []


class Fatal(msgspec.Struct, tag="fatal", frozen=True):
    """The core cannot start or go on; its process exits after this."""

    #: Code of the error of a core whose engine has lost a host; no request is to blame for that.
    host_lost: ClassVar[str] = "host_lost"
    #: The same of a core that refuses its model, its settings or this machine: the next one would
    #: refuse them too.
    refused: ClassVar[str] = "refused"

    error: ErrorInfo

    @classmethod
    def of(cls, reason: str, code: str = "engine_dead") -> Fatal:
        """reason: told in one line."""
        return cls(ErrorInfo(code, " ".join(reason.split())[:500]))


class DrainState(msgspec.Struct, tag="drain_state", frozen=True):
    """Of engines that share experts: one is told to end, so all are to drain; or all have."""

    drained: bool


class PeerLeft(msgspec.Struct, tag="peer_left", frozen=True):
    """The first host of an engine over several has ended it: nothing is left to do here, and the
    core's process exits after this.
    """

    #: Why, in words.
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
    | DrainState
    | Fatal
    | PeerLeft
)

encode = msgspec.msgpack.encode
