"""The sampler in parts, as a CPU runs it: programs for a number of logit rows, of which the host,
who knows what the rows ask for, runs those that they need.

In one program, as a GPU or TPU has it (`sampling.sample`), conditions skip what no row asks for,
and XLA compiles what more than one branch needs once for each.

Axes: S logit rows, V vocabulary, M seats, W words of a row's parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jitney.engine.executor.inputs import BIASED, PENALISED, SAMPLING, SCORED, MaskedHeads
from jitney.engine.executor.program import DeviceState, Program
from jitney.engine.executor.sampling import (
    Sampled,
    SamplingRows,
    SeatState,
    choose_tokens,
    count_tokens,
    greedy,
    no_scores,
    score_tokens,
    shape_logits,
    threshold,
    unpack_masks,
)
from jitney.engine.scheduler.plan import mask_words
from jitney.kernels.interface import Threshold


class LogitRows(NamedTuple):
    """What the model leaves for the sampler; float32 and int32 arrays, or their shapes."""

    logits: Any  #: float32 [S, V]
    positions: Any  #: int32 [S]: of the rows
    seats: Any  #: int32 [S]; M: none

    def asking(self, sampling: Array) -> SamplingRows:
        """These rows with their parameters, int32 [S, W] as uploaded."""
        return SamplingRows(SAMPLING.columns(sampling), self.positions, self.seats)


def _choose_likeliest(last_token: Array, rows: LogitRows) -> tuple[Array, Array]:
    """-> (last_token, tokens int32 [S])."""
    tokens = greedy(rows.logits)
    return last_token.at[rows.seats].set(tokens, mode="drop"), tokens


def _choose(
    cut: Threshold, last_token: Array, rows: LogitRows, sampling: Array
) -> tuple[Array, Array]:
    """-> (last_token, tokens int32 [S])."""
    tokens = choose_tokens(rows.logits, rows=rows.asking(sampling), cut=cut)
    return last_token.at[rows.seats].set(tokens, mode="drop"), tokens


def _shape(rows: LogitRows, seats: SeatState, sampling: Array) -> Array:
    """Logits [S, V] after penalties and biases."""
    return shape_logits(rows.logits, rows.asking(sampling), seats)


def _mask(logits: Array, masks: Array) -> Array:
    """Logits of what masks int32 [S, ceil(V / 32)] allow, -inf of all else. Of a row that is not
    finite nothing is, even if the mask would hide where.
    """
    allowed = jnp.where(unpack_masks(masks, logits.shape[-1]), logits, -jnp.inf)
    whole = jnp.isfinite(jnp.max(logits, axis=-1, keepdims=True))
    return jnp.where(whole, allowed, jnp.nan)


def _count(state: SeatState, seats: Array, parts: Array, tokens: Array) -> SeatState:
    """seats, parts, tokens: int32 [S]."""
    return count_tokens(state, SamplingRows({"parts": parts}, seats, seats), tokens)


@dataclass(frozen=True)
class RowSampler:
    """The sampler of so many rows: programs, or while they are compiled their futures."""

    likeliest: Any
    choose: Any
    shape: Any
    score: Any
    mask: Any
    count: Any
    #: `Sampled` without its tokens, of rows that ask for no log-probabilities.
    no_scores: tuple[Array, ...]

    def sample(
        self, last_token: Array, seats: SeatState, rows: LogitRows, sampling: np.ndarray
    ) -> tuple[Array, SeatState, Sampled]:
        """One token for each row, and what the seats keep after it; see `sampling.sample`.

        sampling: int32 [S, W].
        """
        return self._sample(last_token, seats, rows, rows.logits, sampling)

    def sample_masked(
        self,
        logits: Array,
        last_token: Array,
        seats: SeatState,
        heads: np.ndarray,
        masks: np.ndarray,
    ) -> tuple[Array, SeatState, Sampled]:
        """See `Program.choose`."""
        own = MaskedHeads.of(heads)
        rows = LogitRows(self.mask(logits, masks), own.positions, own.seats)
        return self._sample(last_token, seats, rows, logits, heads[:, 2:])

    def _sample(
        self,
        last_token: Array,
        seats: SeatState,
        rows: LogitRows,
        own_logits: Array,
        sampling: np.ndarray,
    ) -> tuple[Array, SeatState, Sampled]:
        """own_logits: the model's, which log-probabilities are of."""
        params = SAMPLING.columns(sampling)
        parts = params["parts"].copy()  # `count` may read it when the upload is another step's
        wanted = np.bitwise_or.reduce(parts)
        if wanted & (PENALISED | BIASED):
            rows = rows._replace(logits=self.shape(rows, seats, sampling))
        if params["temperature"].any():
            last_token, tokens = self.choose(last_token, rows, sampling)
        else:
            last_token, tokens = self.likeliest(last_token, rows)
        if wanted & PENALISED:
            seats = self.count(seats, rows.seats, parts, tokens)
        scores = self.no_scores
        if wanted & SCORED:
            scores = self.score(own_logits, tokens)
        return last_token, seats, Sampled(tokens, *scores)


class SamplerParts:
    """Makes the sampler of each number of rows once; for one device. state: arrays or shapes."""

    def __init__(self, program: Program, state: DeviceState):
        self._program = program
        self._state = state
        self._made: dict[int, RowSampler] = {}

    def start(self, pool: Executor, rows: int) -> Callable[[], RowSampler]:
        """Begin to compile the sampler of so many rows. -> what waits for it, and returns it."""
        if rows not in self._made:
            self._made[rows] = self._start(pool, rows)
        return partial(_finished, self._made[rows])

    def _start(self, pool: Executor, rows: int) -> RowSampler:
        state, width = self._state, self._program.logprobs
        vocab = state.seats.counts.shape[1]
        logits, tokens = _floats(rows, vocab), _words(rows)
        given = LogitRows(logits, tokens, tokens)
        sampling = _words(rows, SAMPLING.words)
        choose = partial(_choose, self._program.kernels.threshold or threshold)
        score = partial(score_tokens, width=width)

        def compiled(part: Callable[..., Any], *args: Any, replaces: int | None = None) -> Any:
            donated = () if replaces is None else (replaces,)
            lowered = jax.jit(part, donate_argnums=donated).lower(*args)
            return pool.submit(self._program.compile, lowered)

        return RowSampler(
            likeliest=compiled(_choose_likeliest, state.last_token, given, replaces=0),
            choose=compiled(choose, state.last_token, given, sampling, replaces=0),
            shape=compiled(_shape, given, state.seats, sampling),
            score=compiled(score, logits, tokens),
            mask=compiled(_mask, logits, _words(rows, mask_words(vocab))),
            count=compiled(_count, state.seats, tokens, tokens, tokens, replaces=0),
            no_scores=no_scores(jnp.zeros(rows, jnp.int32), width),
        )


def _finished(sampler: RowSampler) -> RowSampler:
    """With its programs in place of their futures."""
    values = {field.name: getattr(sampler, field.name) for field in fields(sampler)}
    done = {name: each.result() for name, each in values.items() if isinstance(each, Future)}
    return replace(sampler, **done)


def _words(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
