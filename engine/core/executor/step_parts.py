"""Steps in parts, as a CPU runs them: a model program per bucket, then head and sampler programs,
which exist for several numbers of logit rows and are shared by all buckets.

A decode step has about as many logit rows as its bucket; a mixed step has a few, so the host runs
programs that are just large enough. XLA:CPU compiles a sampler three times as long as thirty layers
of native kernels, and starting a second program costs little. A GPU or TPU runs one program
(`Program.greedy_only`, `Program.full`).

The model program of a step with many prompt rows can be cut between layers (`segments`): the host
may then run another step between two segments.

Axes: T token rows and S logit rows of the bucket, R logit rows that are computed, V vocabulary, M
seats, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jitney.engine.core.executor.inputs import UploadLayout
from jitney.engine.core.executor.kept_programs import Lowered
from jitney.engine.core.executor.program import DeviceState, Program, Shaped, StepOutput
from jitney.engine.core.executor.sampler_parts import LogitRows, RowSampler, SamplerParts
from jitney.engine.core.executor.sampling import RowScores, score_rows_at_once
from jitney.engine.core.executor.seat_tokens import DraftRows, SeatTokens
from jitney.engine.core.executor.segments import Segments
from jitney.engine.core.models.hidden import Hidden
from jitney.engine.core.scheduler.buckets import Bucket

#: The future of a compiled program.
type _Part = Future[jax.stages.Compiled]
#: Launches a step's programs. It stops before each further segment and yields a result of the one
#: before. -> the step's output, and its logits for `Program.choose` unless it is all-greedy.
type StepRun = Generator[Array, None, tuple[StepOutput, Array | None]]


class _LastRows(NamedTuple):
    """Rows whose logits are needed, followed by rows of no sequence; arrays or their shapes."""

    hidden: Hidden  #: M rows
    positions: Any  #: int32 [M]
    seats: Any  #: int32 [M]; M: none
    drafts: DraftRows | None  #: see `LogitRows`


class _ModelOutput(NamedTuple):
    """Results of the model's program, without the pools that it replaces."""

    rows: LogitRows | _LastRows  #: in a decode step with their logits
    hidden: Hidden | None = None  #: of all rows; in a decode step see `Program.left`
    broken: Array | None = None  #: see `StepOutput.broken`
    for_head: Array | None = None  #: see `StepOutput.for_head`


class StepParts:
    """Builds steps from parts, and compiles each part once; for one device.

    leaves, state: arrays or shapes. layout_of: (bucket, greedy_only) -> layout of the step's
    upload. sizes: numbers of logit rows for which programs are made; the largest is M. segments_of:
    the number of segments of a bucket's model program.
    """

    def __init__(
        self,
        program: Program,
        leaves: Sequence[Shaped],
        state: DeviceState,
        layout_of: Callable[[Bucket, bool], UploadLayout],
        sizes: Sequence[int],
        segments_of: Callable[[Bucket], int],
    ):
        self._program = program
        self._leaves = leaves
        self._state = state
        self._layout_of = layout_of
        self._sizes = tuple(sorted(sizes))
        self._segments_of = segments_of
        #: Sampler programs for each number of logit rows.
        self.samplers = SamplerParts(program, state)
        #: The segments of each bucket's model program.
        self._models: dict[Bucket, list[_Part]] = {}
        self._scores: dict[Bucket, _Part] = {}
        #: Head programs by number of logit rows R.
        self._heads: dict[int, _Part] = {}

    def start(self, pool: Executor, bucket: Bucket, greedy_only: bool) -> Callable[[], PartedStep]:
        """Begin to compile a step's missing parts. -> a function that returns the step."""
        if bucket not in self._models:
            self._start_model(pool, bucket)
        segments, tails = self._models[bucket], self._start_tails(pool, bucket)
        layout = self._layout_of(bucket, greedy_only)
        score = self._scores[bucket] if layout.scores else None

        def finish() -> PartedStep:
            model = tuple([segment.result() for segment in segments])
            return PartedStep(layout, model, tails(), score and score.result())

        return finish

    def _start_tails(self, pool: Executor, bucket: Bucket) -> Callable[[], _Tails]:
        """Begin to compile the programs that run after a bucket's model program."""
        sizes: Sequence[int] = self._sizes
        heads = self._heads
        if bucket.decode_only:
            sizes, heads = (bucket.seats,), {}
        samplers = {size: self.samplers.start(pool, size) for size in sizes}

        def finish() -> _Tails:
            return _Tails(
                {size: sampler() for size, sampler in samplers.items()},
                {size: head.result() for size, head in heads.items()},
            )

        return finish

    def _submit(self, pool: Executor, lowered: Lowered) -> _Part:
        return pool.submit(self._program.compile, lowered)

    def _start_model(self, pool: Executor, bucket: Bucket) -> None:
        layout, state = self._layout_of(bucket, True), self._state
        upload = self._program.whole((layout.size,), jnp.int32)
        run = partial(_run_model, self._program, layout)
        args = self._leaves, state.kv, state.seat_tokens, upload
        count = self._segments_of(bucket)
        if count == 1:
            model = jax.jit(run, donate_argnums=1)
            programs = [self._program.lowered(f"model {bucket}", lambda: model.lower(*args))]
        else:
            segments = Segments(run, args, count)
            programs = [
                self._program.lowered(
                    f"model {bucket}, {number} of {count}", partial(segments.lower, number)
                )
                for number in range(count)
            ]
        self._models[bucket] = [self._submit(pool, lowered) for lowered in programs]
        if not bucket.decode_only:
            _, output = programs[-1].out_info
            scores = self._program.lowered(
                f"scores {bucket}", lambda: self._lower_scores(bucket, output.hidden)
            )
            self._scores[bucket] = self._submit(pool, scores)
            self._start_heads(pool, output.rows)

    def _start_heads(self, pool: Executor, rows: Any) -> None:
        """Begin to compile the head programs. rows: shapes of any model program's rows; all are
        equal.
        """
        for size in self._sizes:
            if size not in self._heads:
                head = jax.jit(partial(_run_head, self._program, size))
                lower = partial(head.lower, self._leaves, _shapes_of(rows))
                self._heads[size] = self._submit(pool, self._program.lowered(f"head {size}", lower))

    def _lower_scores(self, bucket: Bucket, hidden: Any) -> jax.stages.Lowered:
        layout = self._layout_of(bucket, False)
        score = jax.jit(partial(_score, self._program, layout, self._vocab))
        upload = self._program.whole((layout.size,), jnp.int32)
        return score.lower(self._leaves, _shapes_of(hidden), upload)

    @property
    def _vocab(self) -> int:
        return self._state.seats.counts.shape[1]


def _shapes_of(outputs: Any) -> Any:
    """Shapes of one program's outputs that another program reads."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), outputs)


def _run_model(
    program: Program,
    layout: UploadLayout,
    leaves: list[Array],
    kv: list[Array],
    seat_tokens: SeatTokens,
    packed: Array,
) -> tuple[list[Array], _ModelOutput]:
    """The model's program. layout: of the step without a sampler; every upload begins with it."""
    inputs, drafts = seat_tokens.fill(layout.split(packed))
    logits_of, hidden, kv = program.forward(leaves, kv, inputs)
    at = inputs.logit_rows
    positions = inputs.positions[at]
    if layout.bucket.decode_only:
        rows = LogitRows(logits_of(at), positions, inputs.seats, drafts)
        left = program.left(hidden, layout.bucket)
        return kv, _ModelOutput(rows, left, for_head=hidden.for_head)
    seats = len(seat_tokens.last)
    absent = seats - layout.bucket.seats
    rows = _LastRows(
        jax.tree.map(partial(_padded, absent=absent), hidden[at]),
        _padded(positions, absent),
        jnp.pad(inputs.seats, (0, absent), constant_values=seats),
        jax.tree.map(partial(_padded, absent=absent), drafts),
    )
    broken = hidden.broken_sequences(inputs.cu_q)
    return kv, _ModelOutput(rows, hidden.bare, broken, hidden.for_head)


def _padded(rows: Array, absent: int) -> Array:
    """Append `absent` rows of zeros."""
    return jnp.pad(rows, ((0, absent), *[(0, 0)] * (rows.ndim - 1)))


def _run_head(program: Program, size: int, leaves: list[Array], rows: _LastRows) -> LogitRows:
    """Compute the logits of the first `size` rows."""
    first = jax.tree.map(lambda array: array[:size], rows)
    logits = program.model(leaves).logits(first.hidden, program.kernels)
    return LogitRows(logits, first.positions, first.seats, first.drafts)


def _score(
    program: Program,
    layout: UploadLayout,
    vocab: int,
    leaves: list[Array],
    hidden: Hidden,
    packed: Array,
) -> RowScores:
    """Log-probabilities of the scored prompt rows; layout: of the step with a sampler."""
    inputs, model = layout.split(packed), program.model(leaves)
    return program.sampler.score_prompt(
        lambda rows: model.logits(hidden[rows], program.kernels),
        inputs.score_rows,
        inputs.score_tokens,
        inputs.score_count[0],
        score_rows_at_once(layout.bucket.tokens, vocab),
    )


@dataclass(frozen=True)
class _Tails:
    """Programs that run after a bucket's model program, by R, ascending."""

    samplers: dict[int, RowSampler]
    #: Head programs, for mixed steps only.
    heads: dict[int, jax.stages.Compiled]

    @property
    def programs(self) -> Iterator[jax.stages.Compiled]:
        for sampler in self.samplers.values():
            yield from sampler.programs
        yield from self.heads.values()

    def rows(
        self, leaves: list[Array], rows: LogitRows | _LastRows, seats: np.ndarray
    ) -> LogitRows:
        """Compute the logits of at least all rows with a seat. seats: int32 [S], as uploaded."""
        if isinstance(rows, LogitRows):
            return rows
        count = np.count_nonzero(seats != len(rows.seats))
        size = next(size for size in self.heads if count <= size)
        return self.heads[size](leaves, rows)

    def sampler(self, rows: LogitRows) -> RowSampler:
        return self.samplers[len(rows.seats)]


@dataclass(frozen=True)
class PartedStep:
    """A step in parts: all-greedy if its layout is, else with every sampling option."""

    layout: UploadLayout
    #: The step up to the rows that choose a token, in segments.
    model: tuple[jax.stages.Compiled, ...]
    tails: _Tails
    #: Scores prompt rows; None for a decode step and an all-greedy one.
    score: jax.stages.Compiled | None

    @property
    def programs(self) -> tuple[jax.stages.Compiled, ...]:
        """All its programs."""
        scores = () if self.score is None else (self.score,)
        return (*self.model, *self.tails.programs, *scores)

    def run(self, leaves: list[Array], state: DeviceState, packed: np.ndarray) -> StepRun:
        """Launch the step; replaces the state. Between two segments another step may be launched,
        which must neither write the pages that this one reads or writes, nor read those that it
        writes.
        """
        first, *others = self.model
        if others:  # both may change before the last segment is launched
            leaves, packed = [*leaves], packed.copy()
        own = self.layout.slices
        end = packed.size if self.layout.greedy_only else own["sampling"].start
        state.kv, output = first(leaves, state.kv, state.seat_tokens, packed[:end])
        for segment in others:
            yield output[0]
            state.kv, output = segment(leaves, state.kv, output)
        rows = self.tails.rows(leaves, output.rows, packed[own["seats"]])
        sampler = self.tails.sampler(rows)
        if self.layout.greedy_only:
            taken = sampler.likeliest(state.seat_tokens, rows)
            sampled, scores, logits = taken.tokens, None, None
        else:
            sampling = packed[own["sampling"]].reshape(self.layout.shapes["sampling"])
            taken, state.seats, sampled = sampler.sample(
                state.seat_tokens, state.seats, rows, _first(sampling, len(rows.seats))
            )
            scores, logits = self._scores(leaves, output.hidden, packed), rows.logits
        state.seat_tokens = taken.seat_tokens
        return (
            StepOutput(
                sampled, output.broken, scores, output.hidden, taken.guessed, output.for_head
            ),
            logits,
        )

    def _scores(self, leaves: list[Array], hidden: Any, packed: np.ndarray) -> RowScores | None:
        """Log-probabilities of the scored prompt rows; None where there are none."""
        if self.score is None or not packed[self.layout.slices["score_count"]][0]:
            return None
        return self.score(leaves, hidden, packed)


def _first(sampling: np.ndarray, count: int) -> np.ndarray:
    """Sampling parameters of the first `count` rows, padded with zeros."""
    if count <= len(sampling):
        return sampling[:count]
    return np.pad(sampling, ((0, count - len(sampling)), (0, 0)))
