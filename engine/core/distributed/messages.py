"""Messages between the hosts of one engine (msgspec, MessagePack, tagged unions). Imports no jax.

Host 0, the leader, schedules; the workers run the same programs in the same order. A step is small
on the wire: which program runs, and its one input array. Engines that share the experts of a model
schedule for themselves and agree on the size of every step (`ProposeStep`, `AskForStep`, `RunStep`,
`Stragglers`; see `jitney.engine.core.distributed.step_barrier`) and on when to end (`DrainState`).
"""

from __future__ import annotations

import msgspec
import numpy as np

#: The value (`Propose`) that hosts agree on once they have read adapters: the content of the
#: model's files and of its adapters'.
ADAPTER_FILES = "files of adapters"


class PackedArray(msgspec.Struct, frozen=True, array_like=True):
    """A numpy array as bytes."""

    dtype: str
    shape: tuple[int, ...]
    #: In native byte order, C-contiguous.
    data: bytes

    @classmethod
    def of(cls, array: np.ndarray) -> PackedArray:
        return cls(array.dtype.str, array.shape, array.tobytes())

    def unpacked(self) -> np.ndarray:
        """The array, read-only."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """The first message of a worker to the leader."""

    #: From 1; the leader is 0.
    host_id: int
    #: Versions of Jitney and jax.
    versions: str
    #: Digest of the settings that must be equal on all hosts (`jitney.engine.config.digest`).
    digest: str


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """All hosts have joined. jax_port: of the jax distributed service on the leader."""

    jax_port: int
    #: Numbers of adapters by name, as host 0's earlier core had them; empty: from 1, in order.
    adapters: dict[str, int] = {}


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The worker may not join, or the hosts disagree."""

    #: One line.
    reason: str


class Propose(msgspec.Struct, tag="propose", frozen=True):
    """A value that all hosts must agree on; answered by `Accept` or `Refused`."""

    #: Name of the value.
    what: str
    value: int | str


class Accept(msgspec.Struct, tag="accept", frozen=True):
    what: str
    value: int | str


class Heartbeat(msgspec.Struct, tag="heartbeat", frozen=True):
    """Sent once a second."""


class Leave(msgspec.Struct, tag="leave", frozen=True):
    """The sender ends; its last message."""

    #: One line.
    reason: str
    #: The sender failed; False: it was told to end.
    failed: bool


class Step(msgspec.Struct, tag="step", frozen=True):
    """Run the program of a bucket."""

    tokens: int  #: rows of the bucket
    seats: int  #: sequences of the bucket
    greedy_only: bool  #: the program without a sampler
    packed: PackedArray  #: the step's input


class Board(msgspec.Struct, tag="board", frozen=True):
    """Set the sampling state of a seat. row: the columns of `SeatState`, in order."""

    seat: int
    row: list[PackedArray]


class Choose(msgspec.Struct, tag="choose", frozen=True):
    """Sample the rows of the last step that have token masks."""

    #: Numbers of the logit rows; None: all.
    numbers: PackedArray | None
    #: As in `MaskedRows`.
    heads: PackedArray
    masks: PackedArray


class StepSize(msgspec.Struct, frozen=True):
    """The size of one engine's next step, or of the step that all engines run."""

    #: Rows and sequences of the bucket.
    tokens: int
    seats: int
    #: No row belongs to a prompt.
    decode_only: bool
    #: The program without a sampler is enough.
    greedy_only: bool


class ProposeStep(msgspec.Struct, tag="propose_step", frozen=True):
    """The size of an engine's next step; sent to host 0 once a round."""

    #: Rising from 0.
    round: int
    #: None: the engine has no step of its own and joins that of the others.
    size: StepSize | None


class AskForStep(msgspec.Struct, tag="ask_for_step", frozen=True):
    """An engine has a step to run: host 0 asks the others to propose theirs."""

    round: int


class RunStep(msgspec.Struct, tag="run_step", frozen=True):
    """All engines run a step of this size now; ends the round."""

    round: int
    size: StepSize


class DrainState(msgspec.Struct, tag="drain_state", frozen=True):
    """An engine drains, or has drained. Engines that share experts end together: host 0 tells all
    when the first one drains, and when all have drained.
    """

    #: No request is open; False: no new request is accepted, some may be open.
    drained: bool


class Stragglers(msgspec.Struct, tag="stragglers", frozen=True):
    """The engines that a round waits for: asked by a waiting engine, answered by host 0."""

    round: int
    #: Hosts that have not proposed a step; None in the question.
    hosts: list[int] | None = None


class ReadAdapters(msgspec.Struct, tag="read_adapters", frozen=True):
    """Read adapters that are to be served; answered by `Propose` or `Refused`, and then again."""

    #: Name -> number of all adapters, in the list's order.
    numbers: dict[str, int]
    #: Name -> folder of those that are new or whose files changed.
    folders: dict[str, str]


class InstallAdapter(msgspec.Struct, tag="install_adapter", frozen=True):
    """Copy an adapter that was read to the device."""

    number: int


class UseAdapter(msgspec.Struct, tag="use_adapter", frozen=True):
    """Use the adapter that was copied last, from the next step on."""


class DropAdapter(msgspec.Struct, tag="drop_adapter", frozen=True):
    """No request asks for this adapter any more: its columns are free."""

    number: int


type AdapterMessage = ReadAdapters | InstallAdapter | UseAdapter | DropAdapter
type Command = Step | Board | Choose
type BarrierMessage = ProposeStep | AskForStep | RunStep | Stragglers | DrainState
type Message = (
    Command
    | AdapterMessage
    | BarrierMessage
    | Hello
    | Welcome
    | Refused
    | Propose
    | Accept
    | Heartbeat
    | Leave
)
