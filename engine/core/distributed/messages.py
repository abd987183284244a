"""What the processes of one engine over several hosts say to each other (msgspec, MessagePack;
tagged unions). Jax-free.

The first host plans; the others do on their devices what it does on its own, in its order. What a
plan comes to is small: which program runs, and the one array that it takes. Engines that share a
mixture's experts plan each for itself, and agree upon the size of every step (`Want`, `Wanted`,
`Together`, `Missing`; `jitney.engine.core.distributed.rounds`) and upon their end (`Parting`).
"""

from __future__ import annotations

import msgspec
import numpy as np


class PackedArray(msgspec.Struct, frozen=True, array_like=True):
    """A numpy array on its way."""

    dtype: str
    shape: tuple[int, ...]
    #: In this machine's order of bytes, rows last.
    data: bytes

    @classmethod
    def of(cls, array: np.ndarray) -> PackedArray:
        return cls(array.dtype.str, array.shape, array.tobytes())

    def unpacked(self) -> np.ndarray:
        """Read-only."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Who wants to join; the first message of a host, to the first one."""

    #: From 1; the first host is 0.
    host_id: int
    #: Of Jitney and of jax.
    versions: str
    #: Of what all hosts must be told alike (`jitney.engine.config.digest`).
    digest: str


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """All hosts are there. jax_port: of the first one, where jax's own service will listen."""

    jax_port: int


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """This host cannot take part, or the hosts do not agree."""

    #: One line.
    reason: str


class Say(msgspec.Struct, tag="say", frozen=True):
    """What a host found, which all must agree upon; answered by `Agreed` or `Refused`."""

    #: The name of the finding.
    what: str
    value: int | str


class Agreed(msgspec.Struct, tag="agreed", frozen=True):
    what: str
    value: int | str


class Beat(msgspec.Struct, tag="beat", frozen=True):
    """A sign of life, once a second."""


class Goodbye(msgspec.Struct, tag="goodbye", frozen=True):
    """The sender ends; nothing follows."""

    #: One line.
    reason: str
    #: It could not go on; else it was told to end.
    failed: bool


class Step(msgspec.Struct, tag="step", frozen=True):
    """Run the program of a bucket."""

    tokens: int  #: of the bucket
    seats: int  #: of the bucket
    greedy_only: bool  #: the one without a sampler
    packed: PackedArray  #: the upload


class Board(msgspec.Struct, tag="board", frozen=True):
    """Give a seat its sampling state. row: the columns of `SeatState`, in order."""

    seat: int
    row: list[PackedArray]


class Choose(msgspec.Struct, tag="choose", frozen=True):
    """Choose tokens of the step that was run last, under masks."""

    #: Which of its logit rows; None: all of them.
    numbers: PackedArray | None
    #: As in `MaskedRows`.
    heads: PackedArray
    masks: PackedArray


class StepSize(msgspec.Struct, frozen=True):
    """What a step of one engine needs, or what one for all of them has."""

    #: Rows and sequences of the bucket.
    tokens: int
    seats: int
    #: Nobody in it has a prompt.
    decode_only: bool
    #: The program without a sampler does.
    greedy_only: bool


class Want(msgspec.Struct, tag="want", frozen=True):
    """An engine's part in a round; to host 0, once a round."""

    #: Rising from 0.
    round: int
    #: Of its next step; None: it has none, and takes part in that of the others.
    size: StepSize | None


class Wanted(msgspec.Struct, tag="wanted", frozen=True):
    """Somebody has a step to run: host 0 asks what you want in this round."""

    round: int


class Together(msgspec.Struct, tag="together", frozen=True):
    """All engines run this step now; it ends the round."""

    round: int
    size: StepSize


class Parting(msgspec.Struct, tag="parting", frozen=True):
    """Engines that share experts end together. An engine says it of itself to host 0, which tells
    all: that some engine drains, so that all do; and that all have drained.
    """

    #: It has no requests any more, and takes none; else it takes none, and may have some.
    drained: bool


class Missing(msgspec.Struct, tag="missing", frozen=True):
    """Who keeps a round from its end: asked of host 0 by an engine that waits, and answered."""

    round: int
    #: Hosts whose engines have said nothing in it; None: that is the question.
    hosts: list[int] | None = None


type Command = Step | Board | Choose
type Meeting = Want | Wanted | Together | Missing | Parting
type Message = Command | Meeting | Hello | Welcome | Refused | Say | Agreed | Beat | Goodbye
