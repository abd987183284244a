"""The sampler in parts, as a CPU runs it: the host runs only the programs that the rows need.

In one program (`sampling.Sampler`) XLA would compile code that several branches need once for each.

Axes: S logit rows, V vocabulary, M seats, W words of a row's parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jitney.engine.core.executor.inputs import BIASED, PENALISED, SAMPLING, SCORED, MaskedHeads
from jitney.engine.core.executor.program import Chosen, DeviceState, Program
from jitney.engine.core.executor.sampling import (
    Sampled,
    Sampler,
    SamplingRows,
    SeatState,
    unpack_masks,
)
from jitney.engine.core.executor.seat_tokens import DraftRows, SeatTokens, Taken
from jitney.engine.core.executor.vocabulary import Vocabulary
from jitney.engine.core.scheduler.plan import mask_words


class LogitRows(NamedTuple):
    """Inputs of the sampler from the model; float32 and int32 arrays, or their shapes."""

    logits: Any  #: float32 [S, V]
    positions: Any  #: int32 [S]: of the rows
    seats: Any  #: int32 [S]; M: none
    drafts: DraftRows | None = None  #: drafts that the rows read; None: no speculation

    def take(self, seat_tokens: SeatTokens, tokens: Array) -> Taken:
        """Store the tokens int32 [S] that these rows sampled."""
        return seat_tokens.take(self.seats, self.positions, self.drafts, tokens)

    def asking(self, sampling: Array) -> SamplingRows:
        """These rows with their sampling parameters, int32 [S, W] as uploaded."""
        return SamplingRows(SAMPLING.columns(sampling), self.positions, self.seats, self.drafts)


def _choose_likeliest(seat_tokens: SeatTokens, rows: LogitRows) -> Taken:
    return rows.take(seat_tokens, Vocabulary().greedy(rows.logits))


def _choose(sampler: Sampler, seat_tokens: SeatTokens, rows: LogitRows, sampling: Array) -> Taken:
    return rows.take(seat_tokens, sampler.choose_tokens(rows.logits, rows.asking(sampling)))


def _shape(rows: LogitRows, seats: SeatState, sampling: Array) -> Array:
    """Logits [S, V] after penalties and biases."""
    return Sampler().shape_logits(rows.logits, rows.asking(sampling), seats)


def _mask(logits: Array, masks: Array) -> Array:
    """Set logits to -inf where masks int32 [S, ceil(V / 32)] forbid them; NaN in non-finite
    rows.
    """
    allowed = jnp.where(unpack_masks(masks, logits.shape[-1]), logits, -jnp.inf)
    whole = jnp.isfinite(jnp.max(logits, axis=-1, keepdims=True))
    return jnp.where(whole, allowed, jnp.nan)


def _count(state: SeatState, seats: Array, parts: Array, tokens: Array) -> SeatState:
    """Count sampled tokens for penalties. seats, parts, tokens: int32 [S]."""
    return state.count_tokens(SamplingRows({"parts": parts}, seats, seats), tokens)


@dataclass(frozen=True)
class RowSampler:
    """The sampler for one number of rows."""

    #: One program for each part of `engine.core.executor.sampling`: argmax; draw; penalties and
    #: bias; log-probabilities; grammar masks; counts of the tokens chosen.
    likeliest: jax.stages.Compiled
    choose: jax.stages.Compiled
    shape: jax.stages.Compiled
    score: jax.stages.Compiled
    mask: jax.stages.Compiled
    count: jax.stages.Compiled
    #: `Sampled` without its tokens, for rows without log-probabilities.
    no_scores: tuple[Array, ...]

    @property
    def programs(self) -> tuple[jax.stages.Compiled, ...]:
        return (self.likeliest, self.choose, self.shape, self.score, self.mask, self.count)

    def sample_masked(
        self,
        logits: Array,
        seat_tokens: SeatTokens,
        seats: SeatState,
        heads: np.ndarray,
        masks: np.ndarray,
    ) -> tuple[SeatTokens, SeatState, Chosen]:
        """See `Program.choose`."""
        own = MaskedHeads.of(heads)
        drafts = seat_tokens.draft_rows(own.numbers, own.drafts)
        rows = LogitRows(self.mask(logits, masks), own.positions, own.seats, drafts)
        taken, seats, sampled = self.sample(seat_tokens, seats, rows, own.sampling, logits)
        return taken.seat_tokens, seats, Chosen(sampled, taken.guessed, taken.drafts)

    def sample(
        self,
        seat_tokens: SeatTokens,
        seats: SeatState,
        rows: LogitRows,
        sampling: np.ndarray,
        unmasked: Array | None = None,
    ) -> tuple[Taken, SeatState, Sampled]:
        """Sample one token for each row, and update the seats' state; see `sampling.Sampler`.

        sampling: int32 [S, W]. unmasked: logits for log-probabilities; None: those of the rows.
        """
        own_logits = rows.logits if unmasked is None else unmasked
        params = SAMPLING.columns(sampling)
        parts = params["parts"].copy()  # `count` may read it after the upload is overwritten
        needed_parts = np.bitwise_or.reduce(parts)
        if needed_parts & (PENALISED | BIASED):
            rows = rows._replace(logits=self.shape(rows, seats, sampling))
        if params["temperature"].any():
            taken = self.choose(seat_tokens, rows, sampling)
        else:
            taken = self.likeliest(seat_tokens, rows)
        tokens = taken.tokens
        if needed_parts & PENALISED:
            seats = self.count(seats, rows.seats, parts, tokens)
        scores = self.no_scores
        if needed_parts & SCORED:
            scores = self.score(own_logits, tokens)
        return taken, seats, Sampled(tokens, *scores)


class SamplerParts:
    """Compiles the sampler programs once for each number of rows; for one device. state: arrays or
    shapes.
    """

    def __init__(self, program: Program, state: DeviceState):
        self._program = program
        self._state = state
        self._made: dict[int, dict[str, Future[jax.stages.Compiled]]] = {}
        #: Compiled samplers by number of rows.
        self._samplers: dict[int, RowSampler] = {}

    def start(self, pool: Executor, rows: int) -> Callable[[], RowSampler]:
        """Begin to compile the sampler for `rows` rows. -> a function that waits and returns it."""
        if rows not in self._made:
            self._made[rows] = {
                name: pool.submit(
                    self._program.compile, self._program.lowered(f"{name} {rows}", lower)
                )
                for name, lower in self._lowerings(rows).items()
            }
        return partial(self._finish, rows)

    def _finish(self, rows: int) -> RowSampler:
        if rows not in self._samplers:
            programs = {name: made.result() for name, made in self._made[rows].items()}
            nothing = self._program.sampler.no_scores(jnp.zeros(rows, jnp.int32))
            self._samplers[rows] = RowSampler(no_scores=nothing, **programs)
        return self._samplers[rows]

    def _lowerings(self, rows: int) -> dict[str, Callable[[], jax.stages.Lowered]]:
        """Functions that trace and lower the programs, by their field names in `RowSampler`."""
        state, sampler = self._state, self._program.sampler
        vocab = state.seats.counts.shape[1]
        logits, tokens = jax.ShapeDtypeStruct((rows, vocab), jnp.float32), _words(rows)
        drafts = state.seat_tokens.draft_rows(tokens, tokens)
        logit_rows = LogitRows(logits, tokens, tokens, drafts)
        sampling = _words(rows, SAMPLING.words)
        masks = _words(rows, mask_words(vocab))
        choose = partial(_choose, sampler)

        def replacing(part: Callable[..., Any], *args: Any) -> Callable[[], jax.stages.Lowered]:
            """Lower a part whose first argument becomes its first result."""
            return partial(jax.jit(part, donate_argnums=0).lower, *args)

        return {
            "likeliest": replacing(_choose_likeliest, state.seat_tokens, logit_rows),
            "choose": replacing(choose, state.seat_tokens, logit_rows, sampling),
            "shape": partial(jax.jit(_shape).lower, logit_rows, state.seats, sampling),
            "score": partial(jax.jit(sampler.score_tokens).lower, logits, tokens),
            "mask": partial(jax.jit(_mask).lower, logits, masks),
            "count": replacing(_count, state.seats, tokens, tokens, tokens),
        }


def _words(*shape: int) -> jax.ShapeDtypeStruct:
    """The shape of an int32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)
