"""Jobs, rows, floors and sizes of a device's measurement, without jax.

A floor is the least time that the device's own copy bandwidth and product rate, measured in the
same run, allow for the bytes that must be moved and the operations that must be done (the roofline
of Williams, Waterman and Patterson, 2009).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import ClassVar

import msgspec

from jitney.engine.core import ModelConfig, ModelSource
from jitney.engine.lab.simulation.roofline import SHAPES

#: Start of the note in a row with wrong answers.
_WRONG = "WRONG"
#: Most copies of a kernel's inputs that are rotated.
_MOST_COPIES = 8


class Floors(msgspec.Struct, frozen=True):
    """Rates that the device reaches."""

    copy_bytes_s: float  # bytes read and written, a second
    product_flops_s: float  # of a large product in the run's dtype
    launch_s: float  # one launch of an empty program, many in a row

    def of(self, moved: float, operations: float = 0.0) -> tuple[float, str]:
        """(least seconds, limiting resource): the larger of bytes over bandwidth and operations
        over rate.
        """
        by_bytes = moved / self.copy_bytes_s
        by_operations = operations / self.product_flops_s
        if by_bytes >= by_operations:
            return by_bytes, "bytes"
        return by_operations, "operations"


class About(msgspec.Struct, frozen=True, kw_only=True):
    """The device and the programs, as described by the first part."""

    device: str  # as jax names its kind
    platform: str  # cpu, gpu or tpu
    kernels: str  # the kernel set with its instructions, as people read it
    kernel_set: str  # its name alone, as --kernels takes it
    dtype: str  # of weights and activations
    memory: int  # bytes that jax may use, 0: not known
    versions: dict[str, str]  # of the packages that decide the figures
    #: Folder of XLA's measurements for choosing products (`engine.core.executor.autotuning`); empty
    #: if they are not stored.
    choices: str = ""
    sm: int = 0  # compute capability of an NVIDIA GPU, 90 for 9.0; 0: it is none


class _CaseId(msgspec.Struct, frozen=True):
    """Names the case of a row."""

    #: See `Row`.
    part: str
    name: str
    case: str
    by: str


class PartJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job of one part. Until the device is described and its floors are measured, the shape may
    be "", and dtype and kernels "auto".
    """

    #: Name of the first part, which describes the device and its programs.
    ABOUT: ClassVar = "about"
    #: Name of the shape for a CPU.
    TINY: ClassVar = "tiny"

    part: str  # `ABOUT`, or a key of `parts.PARTS`
    shape: str  # `TINY`, or a key of SHAPES
    dtype: str
    kernels: str
    page_size: int
    seconds: float  # after so many it begins nothing new
    limit_s: float = 300.0  # and after so many its process is ended
    settled: frozenset[_CaseId] = frozenset()  # cases that an earlier call measured
    floors: Floors | None = None
    against: str = ""  # a second kernel set, "" for none
    platform: str = "auto"  # auto, or the one whose devices jax must have

    @property
    def config(self) -> ModelConfig:
        if self.shape == self.TINY:
            return ModelSource.resolve("tiny-random").config
        return SHAPES[self.shape]

    @property
    def sizes(self) -> Sizes:
        return _SMALL if self.shape == self.TINY else _LARGE

    @property
    def measured(self) -> Floors:
        """The floors, which every part except the first gets."""
        if self.floors is None:
            raise RuntimeError(f"part {self.part} was started without floors")
        return self.floors

    def row(self, name: str, case: str, by: str, goal: str = "") -> Row:
        """A row of this part without figures."""
        return Row(part=self.part, name=name, case=case, by=by, goal=goal)

    def batch_row(self, streams: int, by: str, goal: str = "") -> Row:
        """A row for the batch of equal requests, which peers also get; the case is the same for all
        engines.
        """
        n_prompt, n_output = self.sizes.batch
        case = f"{streams} streams, {self.dtype}, {n_prompt} + {n_output} tokens"
        return self.row("batch of equal requests", case, by, goal)

    def batch_tasks(self, by: str, goal: str, run: Callable[[int, Row], Iterator[Row]]) -> Tasks:
        """A task for each number of streams. goal: of the first one. run: called with a number."""
        others = [streams for streams in self.sizes.crowds if streams != self.sizes.streams]
        for streams in (self.sizes.streams, *others):
            counts = goal if streams == self.sizes.streams else ""
            yield Task(self.batch_row(streams, by, counts), partial(run, streams))

    def copies_of(self, moved: float) -> int:
        """Number of copies of inputs of `moved` bytes that exceed the cache."""
        return max(1, min(_MOST_COPIES, math.ceil(self.sizes.cache_bytes / moved)))


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measured figure."""

    #: Note of a case for which no time was left.
    NO_TIME: ClassVar = "the time was up"

    part: str  # the part that measured it
    name: str  # what was measured
    case: str  # in which sizes
    by: str  # the kernel set, or the peer
    seconds: float | None = None  # median of the repeats; None where `note` says why there is none
    least: float | None = None  # of the repeats
    most: float | None = None  # likewise
    repeats: int = 0  # how often
    # Seconds that the device's own copy and product would take; None: not known.
    floor_s: float | None = None
    bound: str = ""  # what the floor's time goes into: bytes, operations or steps
    error: float | None = None  # distance from the reference, as norm over norm
    figures: dict[str, float] = {}  # what else was read off
    goal: str = ""  # the key of the goal that it counts for, in `report`
    note: str = ""

    @property
    def of(self) -> _CaseId:
        """The row's case; two rows of the same case are two attempts."""
        return _CaseId(self.part, self.name, self.case, self.by)

    @property
    def settled(self) -> bool:
        """Whether it has a result: a time, an error or other figures."""
        return self.seconds is not None or self.error is not None or bool(self.figures)

    @property
    def wrong(self) -> bool:
        return self.note.startswith(_WRONG)

    @property
    def fraction(self) -> float | None:
        if self.seconds is None or self.floor_s is None:
            return None
        return self.floor_s / self.seconds

    def noted(self, note: str) -> Row:
        """A copy with a note and without figures, which counts for no goal."""
        return msgspec.structs.replace(self, note=note, goal="")

    def timed(self, samples: Sequence[float]) -> Row:
        """A copy with the times of these samples, in seconds."""
        return msgspec.structs.replace(
            self,
            seconds=median(samples),
            least=min(samples),
            most=max(samples),
            repeats=len(samples),
        )

    def as_wrong(self, why: str) -> Row:
        """A copy for a case with wrong answers."""
        return msgspec.structs.replace(self, note=f"{_WRONG}: {why}")


@dataclass(frozen=True, slots=True)
class Task:
    """One case of a part. If it raises, its row has the error as a note."""

    row: Row  # without figures
    run: Callable[[Row], Iterable[Row]]  # the rows that come of it, made of the one above


type Tasks = Iterator[Task]


@dataclass(frozen=True, slots=True)
class Sizes:
    copy_bytes: int  #: of the copy that is the floor of bandwidth
    product_side: int  #: rows and columns of the square product that is the floor of operations
    attention: tuple[tuple[int, int], ...]  # (sequences, context) of decode
    long: int  # context of one long sequence
    prompts: tuple[int, ...]  # rows of one prompt
    mixed: tuple[int, int, int]  # sequences that decode, their context, rows of a prompt
    rows: tuple[int, ...]  # that are rotated and written
    product_rows: tuple[int, ...]  #: rows of products with a layer's matrices
    sampled: tuple[int, ...]  # rows of logits
    #: Rows of decode steps, and of mixed ones, in which all kernels are checked.
    proved: tuple[tuple[int, ...], tuple[int, ...]]
    steps: tuple[tuple[int, ...], tuple[int, ...]]  # seats, the first group before all other work
    contexts: tuple[tuple[int, ...], tuple[int, ...]]  # of decode steps, short and long
    quantised: tuple[int, ...]  # seats of steps with quantised weights
    prefill: tuple[int, ...]  # rows of steps of one prompt
    streams: int  # of the closed loop, and of the batch that the goal is about
    crowds: tuple[int, ...]  # streams of the other batches
    served: tuple[int, ...]  # streams over HTTP
    requests: int  # of the closed loop, in all
    loop: tuple[int, int]  # its (prompt, output) tokens at most
    batch: tuple[int, int]  # (prompt, output) tokens of each request of the batch
    token_budget: int
    sample_s: float  # seconds of work between two looks at the clock
    cache_bytes: int  # copies of inputs together exceed this

    @classmethod
    def on(cls, platform: str) -> Sizes:
        """The sizes for a platform (jax's name), for any shape."""
        return _SMALL if platform == "cpu" else _LARGE


_LARGE = Sizes(
    copy_bytes=1 << 30,
    product_side=8192,
    attention=(
        (32, 4096),
        (64, 4096),
        (128, 4096),
        (256, 1024),
        (64, 1024),
        (8, 4096),
        (1, 4096),
        (8, 32768),
        (256, 256),
        (32, 256),
        (8, 256),
        (1, 256),
        (8, 1024),
        (1, 1024),
        (256, 4096),
        (32, 32768),
    ),
    long=32768,
    prompts=(4096, 8192, 512, 1024, 2048),
    mixed=(32, 1024, 512),
    rows=(64, 1, 512),
    product_rows=(1, 16, 64),
    sampled=(64, 1),
    proved=((1, 8, 64), (256,)),
    steps=((1, 8, 32), (64, 256, 2, 4, 16, 128)),
    contexts=((256, 1024), (4096, 16384, 32768)),
    quantised=(1, 8, 32, 128),
    prefill=(4096, 512, 1024, 2048, 8192),
    streams=64,
    crowds=(1, 8, 32, 128, 256),
    served=(1, 32, 256),
    requests=256,
    loop=(512, 256),
    batch=(256, 256),
    token_budget=2048,
    sample_s=0.02,
    # Four times the L2 cache of an H100, so that no repeat finds its data in it.
    cache_bytes=1 << 28,
)
_SMALL = Sizes(
    copy_bytes=1 << 22,
    product_side=256,
    attention=((4, 64),),
    long=128,
    prompts=(32,),
    mixed=(2, 32, 16),
    rows=(4,),
    product_rows=(4,),
    sampled=(4,),
    proved=((4,), (16,)),
    steps=((2,), (4,)),
    contexts=((16,), (64,)),
    quantised=(4,),
    prefill=(16,),
    streams=4,
    crowds=(1,),
    served=(1, 4),
    requests=6,
    loop=(16, 8),
    batch=(8, 8),
    token_budget=32,
    sample_s=0.001,
    cache_bytes=0,
)
