"""The step in parts, as a CPU runs it: the model, one program a bucket, and behind it the sampler's
programs, which all buckets of as many logit rows share.

XLA:CPU compiles a sampler for three times as long as thirty layers of native kernels. To start a
second program takes little where a step takes milliseconds. A GPU or TPU runs the whole step as one
(`Program.plain`, `Program.full`).

Axes: T token rows and S logit rows of the bucket, V vocabulary, M seats, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from jitney.engine.executor.inputs import UploadLayout
from jitney.engine.executor.program import DeviceState, Program, StepOutput, broken_sequences
from jitney.engine.executor.sampler_parts import LogitRows, RowSampler, SamplerParts, words
from jitney.engine.executor.sampling import (
    RowScores,
    SeatState,
    score_prompt,
    score_rows_at_once,
)
from jitney.engine.scheduler.buckets import Bucket

#: A program as it is compiled, or will be.
type _Part = Future[jax.stages.Compiled]
#: What runs a step, by the arguments and results of `Program.plain` or `Program.full`.
type _Step = Callable[..., Any]


class _ModelOutput(NamedTuple):
    """What the model's program brings, beside the pools that it replaces."""

    rows: LogitRows
    hidden: Any = None  #: [T, E]; None of a decode step
    broken: Any = None  #: see `StepOutput.broken`


class StepParts:
    """Makes steps out of parts, and each part once; for one device.

    leaves, state: arrays or shapes, as for `Program.lower`. layout_of: (bucket, plain) -> what the
    step uploads.
    """

    def __init__(
        self,
        program: Program,
        leaves: list[Any],
        state: DeviceState,
        layout_of: Callable[[Bucket, bool], UploadLayout],
    ):
        self._program = program
        self._leaves = leaves
        self._state = state
        self._layout_of = layout_of
        #: Of every number of logit rows.
        self.samplers = SamplerParts(program, state)
        self._models: dict[Bucket, _Part] = {}
        self._scores: dict[Bucket, _Part] = {}

    def start(self, pool: Executor, bucket: Bucket, plain: bool) -> Callable[[], _Step]:
        """Begin to compile what this step takes and none before it took. -> what waits for that,
        and returns the step.
        """
        if bucket not in self._models:
            self._start_model(pool, bucket)
        model, sampler = self._models[bucket], self.samplers.start(pool, bucket.seats)
        if plain:
            return lambda: _PlainStep(model.result(), sampler())
        layout = self._layout_of(bucket, False)
        if not layout.scores:
            return lambda: _SampledStep(layout, model.result(), sampler(), None)
        score = self._scores[bucket]
        return lambda: _SampledStep(layout, model.result(), sampler(), score.result())

    def _submit(self, pool: Executor, lowered: jax.stages.Lowered) -> _Part:
        return pool.submit(self._program.compile, lowered)

    def _start_model(self, pool: Executor, bucket: Bucket) -> None:
        layout, state = self._layout_of(bucket, True), self._state
        model = jax.jit(partial(_run_model, self._program, layout), donate_argnums=1)
        lowered = model.lower(self._leaves, state.kv, state.last_token, words(layout.size))
        self._models[bucket] = self._submit(pool, lowered)
        if not bucket.decode_only:
            _, output = lowered.out_info
            self._scores[bucket] = self._submit(pool, self._lower_scores(bucket, output.hidden))

    def _lower_scores(self, bucket: Bucket, hidden: Any) -> jax.stages.Lowered:
        layout = self._layout_of(bucket, False)
        score = jax.jit(partial(_score, self._program, layout, self._vocab))
        shape = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype)
        return score.lower(self._leaves, shape, words(layout.size))

    @property
    def _vocab(self) -> int:
        return self._state.seats.counts.shape[1]


def _run_model(
    program: Program,
    layout: UploadLayout,
    leaves: list[Array],
    kv: list[Array],
    last_token: Array,
    packed: Array,
) -> tuple[list[Array], _ModelOutput]:
    """layout: of the step without a sampler, whose upload every step's begins with."""
    inputs = layout.split(packed)
    logits_of, hidden, kv = program.forward(leaves, kv, last_token, inputs)
    at = inputs.logit_rows
    rows = LogitRows(logits_of(at), inputs.positions[at], inputs.seats)
    if layout.bucket.decode_only:
        return kv, _ModelOutput(rows)
    return kv, _ModelOutput(rows, hidden, broken_sequences(hidden, inputs.cu_q))


def _score(
    program: Program,
    layout: UploadLayout,
    vocab: int,
    leaves: list[Array],
    hidden: Array,
    packed: Array,
) -> RowScores:
    """Of the scored prompt rows; layout: of the step with a sampler."""
    inputs, model = layout.split(packed), program.model(leaves)
    return score_prompt(
        lambda rows: model.logits(hidden[rows], program.kernels),
        inputs.score_rows,
        inputs.score_tokens,
        inputs.score_count[0],
        score_rows_at_once(layout.bucket.tokens, vocab),
        program.logprobs,
    )


@dataclass(frozen=True)
class _PlainStep:
    """An all-greedy step, called as `Program.plain` would be."""

    model: jax.stages.Compiled
    sampler: RowSampler

    def __call__(
        self, leaves: list[Array], kv: list[Array], last_token: Array, packed: np.ndarray
    ) -> tuple[list[Array], Array, StepOutput]:
        kv, output = self.model(leaves, kv, last_token, packed)
        last_token, tokens = self.sampler.likeliest(last_token, output.rows)
        return kv, last_token, StepOutput(tokens, output.broken, hidden=output.hidden)


@dataclass(frozen=True)
class _SampledStep:
    """A step with every sampling option, called as `Program.full` would be."""

    layout: UploadLayout
    model: jax.stages.Compiled
    sampler: RowSampler
    #: Of prompt rows; None of a step that has none.
    score: jax.stages.Compiled | None

    def __call__(
        self,
        leaves: list[Array],
        kv: list[Array],
        last_token: Array,
        seats: SeatState,
        packed: np.ndarray,
    ) -> tuple[list[Array], Array, SeatState, StepOutput, Array]:
        own = self.layout.slices["sampling"]
        sampling = packed[own].reshape(self.layout.shapes["sampling"])
        kv, output = self.model(leaves, kv, last_token, packed[: own.start])
        last_token, seats, sampled = self.sampler.sample(last_token, seats, output.rows, sampling)
        scores = self._scores(leaves, output.hidden, packed)
        result = StepOutput(sampled, output.broken, scores, output.hidden)
        return kv, last_token, seats, result, output.rows.logits

    def _scores(self, leaves: list[Array], hidden: Any, packed: np.ndarray) -> RowScores | None:
        """Of the scored prompt rows; None where there are none."""
        if self.score is None or not packed[self.layout.slices["score_count"]][0]:
            return None
        return self.score(leaves, hidden, packed)
