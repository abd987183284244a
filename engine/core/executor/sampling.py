"""The sampler, from logits to tokens: temperature, limits, penalties, biases, log-probabilities.

Parameters are arrays with one entry per row, never static; `lax.cond` skips parts that no row
needs. A row's result depends only on its own logits, parameters, seed and position. Axes: S logit
rows, V vocabulary, M seats, B bias entries per seat, K alternatives (`width`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.lax import bitcast_convert_type

from jitney.engine.common.requests import REQUEST_MOST, SamplingParams
from jitney.engine.core.executor.inputs import BIASED, PENALISED, SCORED
from jitney.engine.core.executor.seat_tokens import DraftRows
from jitney.engine.core.executor.vocabulary import Vocabulary
from jitney.kernels.interface import Threshold

#: Bit of a seat's token count that means "occurs in the prompt"; the bits below it count the token
#: in the output. It is larger than any context, so no count reaches it.
_IN_PROMPT = 1 << 30
#: Bias of an end token before min_tokens. It is finite, so that a grammar that allows no other
#: token still gets it: with -inf no logit would be left, and the row would count as not finite.
_HELD_BACK = -1e30
#: Rows whose top-k and top-p end within this many candidates need no search over the vocabulary.
_CANDIDATES = 256
#: The most bytes of logits of prompt rows that are scored at a time.
_SCORE_BYTES = 64 << 20
#: The most blocks of scored rows in a step; each is a branch of its program.
_MOST_BLOCKS = 16


class SeatState(NamedTuple):
    """Sampling state per seat on the device; donated to every step that changes it."""

    # int32 [M, V]: IN_PROMPT bit and output count; maintained for penalised seats only
    counts: Array
    bias_ids: Array  # int32 [M, B]: token ids, V = unused
    bias_values: Array  # float32 [M, B]
    bias_until: Array  # int32 [M, B]: added while the sampled token's position is below this

    @classmethod
    def empty(cls, seats: int, vocab: int) -> SeatState:
        """The state of free seats."""
        return cls(
            counts=jnp.zeros((seats, vocab), jnp.int32),
            bias_ids=jnp.full((seats, REQUEST_MOST.biases), vocab, jnp.int32),
            bias_values=jnp.zeros((seats, REQUEST_MOST.biases), jnp.float32),
            bias_until=jnp.zeros((seats, REQUEST_MOST.biases), jnp.int32),
        )

    @staticmethod
    def row(
        params: SamplingParams,
        tokens: list[int],
        n_prompt: int,
        vocab: int,
        end_ids: tuple[int, ...],
    ) -> tuple[np.ndarray, ...]:
        """One seat's row for a sequence that boards, in the order of the fields (numpy).

        tokens: all known ids, the first n_prompt the prompt; the rest rebuilds counts after a
        preemption. end_ids are held back until min_tokens.
        """
        prompt = np.asarray(tokens[:n_prompt], np.int64)
        output = np.asarray(tokens[n_prompt:], np.int64)
        counts = np.bincount(output, minlength=vocab).astype(np.int32)
        counts[prompt] |= _IN_PROMPT
        return counts, *_bias_row(params, n_prompt, vocab, end_ids)

    def count_tokens(self, rows: SamplingRows, tokens: Array) -> SeatState:
        """The state after these tokens, int32 [S]; only tokens of penalised rows are counted."""
        counted = rows.need(PENALISED) & (tokens >= 0)
        seats = jnp.where(counted, rows.seats, self.counts.shape[0])  # M: dropped
        counts = jax.lax.cond(
            jnp.any(counted),
            lambda c: c.at[seats, jnp.maximum(tokens, 0)].add(1, mode="drop"),
            lambda c: c,
            self.counts,
        )
        return self._replace(counts=counts)


class Sampled(NamedTuple):
    """Result of one step, per logit row. token -1: the row's logits are not finite; REJECTED: its
    draft is wrong.
    """

    tokens: Array  # int32 [S]
    logprobs: Array  # float32 [S] of `tokens` under the model's own distribution
    top_ids: Array  # int32 [S, K]
    top_logprobs: Array  # float32 [S, K]


def _bias_row(
    params: SamplingParams, n_prompt: int, vocab: int, end_ids: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, values, until) of one seat."""
    ids = np.full(REQUEST_MOST.biases, vocab, np.int32)
    values = np.zeros(REQUEST_MOST.biases, np.float32)
    until = np.zeros(REQUEST_MOST.biases, np.int32)
    for i, entry in enumerate(_biases(params, n_prompt, end_ids)):
        ids[i], values[i], until[i] = entry
    return ids, values, until


def _biases(
    params: SamplingParams, n_prompt: int, end_ids: tuple[int, ...]
) -> Iterator[tuple[int, float, int]]:
    """(id, value, until) of every token with a bias."""
    for token, bias in params.logit_bias.items():
        yield token, bias, np.iinfo(np.int32).max
    if params.min_tokens:
        for token in dict.fromkeys((*end_ids, *params.stop_token_ids)):
            yield token, _HELD_BACK, n_prompt + params.min_tokens


class SamplingRows(NamedTuple):
    """The sampler's inputs for the logit rows of a step, without logits."""

    #: One array [S] for each parameter that `SamplingParams` declares as uploaded, by its name;
    #: `parts` int32 [S], bits of PENALISED, BIASED and SCORED; `seed` int32 [S, 2], low word first.
    params: dict[str, Array]
    #: int32 [S]: position of the row; the sampled token's position is one more.
    position: Array
    #: int32 [S]: seat of the row; M: none.
    seats: Array
    #: Drafts that the rows read; None: no speculation.
    drafts: DraftRows | None = None

    def need(self, part: int) -> Array:
        """Rows that need this part of the sampler, bool [S]."""
        return (self.params["parts"] & part) > 0


def unpack_masks(masks: Array, vocab: int) -> Array:
    """Unpack masks of one bit a token, int32 [S, ceil(V / 32)], low bits first -> bool [S, V]."""
    bits = (masks[:, :, None] >> jnp.arange(32)) & 1
    return bits.reshape(masks.shape[0], -1)[:, :vocab] > 0


def _penalise(logits: Array, rows: SamplingRows, seat_counts: Array) -> Array:
    """Apply the penalties for repetition (arXiv 1909.05858), presence and frequency. seat_counts:
    int32 [M, V].
    """
    counts = seat_counts[rows.seats]
    if rows.drafts is not None:
        counts = rows.drafts.count(counts)
    counts = jnp.where(rows.need(PENALISED)[:, None], counts, 0)
    in_output = (counts & (_IN_PROMPT - 1)).astype(jnp.float32)
    factor = jnp.where(counts != 0, rows.params["repetition_penalty"][:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    return (
        logits
        - rows.params["frequency_penalty"][:, None] * in_output
        - rows.params["presence_penalty"][:, None] * (in_output > 0)
    )


def _uniform(rows: SamplingRows) -> Array:
    """A random number in [0, 1) per row: Threefry keyed by the seed, folded with the position."""

    def one(seed: Array, position: Array) -> Array:
        words = bitcast_convert_type(seed[::-1], jnp.uint32)
        key = random.wrap_key_data(words, impl="threefry2x32")
        return random.uniform(random.fold_in(key, position))

    return jax.vmap(one)(rows.params["seed"], rows.position)


def threshold(scaled: Array, top_k: Array, top_p: Array) -> Array:
    """The smallest kept logit per row: from the best candidates, else by search over all."""
    quick, decided = _among_candidates(scaled, top_k, top_p)
    undecided = ~decided & ((top_k > 0) | (top_p < 1.0))
    return jax.lax.cond(
        jnp.any(undecided),
        lambda: jnp.where(undecided, _search(scaled, top_k, top_p), quick),
        lambda: quick,
    )


def _among_candidates(scaled: Array, top_k: Array, top_p: Array) -> tuple[Array, Array]:
    """(the smallest kept logit of the candidates [S], bool [S]: no other token is kept)."""
    best = jax.lax.top_k(scaled, min(_CANDIDATES, scaled.shape[-1]))[0]
    n = best.shape[-1]
    by_k = jnp.where((top_k > 0)[:, None], jnp.arange(n) < top_k[:, None], True)
    mass = jnp.where(by_k, jnp.exp(best), 0.0)
    inside_k = (top_k > 0) & (top_k <= n)
    whole = jnp.where(inside_k, jnp.sum(mass, -1), jnp.sum(jnp.exp(scaled), -1))
    before = jnp.cumsum(mass, -1) - mass
    is_kept = by_k & (before < (top_p * whole)[:, None])
    decided = jnp.where(top_k > 0, inside_k, jnp.sum(mass, -1) >= top_p * whole)
    return jnp.min(jnp.where(is_kept, best, jnp.inf), axis=-1), decided


def _search(scaled: Array, top_k: Array, top_p: Array) -> Array:
    """`threshold` for any k and p: bisect the bits of float32, first by count, then by mass."""
    weights = jnp.exp(scaled)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, scaled.shape[-1]), scaled.shape[-1])
    floor_k = _bisect(lambda t: jnp.sum(scaled >= t[:, None], -1) >= k, scaled.shape[0])
    whole = jnp.sum(jnp.where(scaled >= floor_k[:, None], weights, 0.0), -1)
    floor_p = _bisect(
        lambda t: jnp.sum(jnp.where(scaled >= t[:, None], weights, 0.0), -1) >= top_p * whole,
        scaled.shape[0],
    )
    return jnp.maximum(floor_k, jnp.where(top_p < 1.0, floor_p, -jnp.inf))


def _bisect(holds, rows: int) -> Array:
    """The largest t <= 0 per row with holds(t), which is true from -inf up to some point.

    Floats up to 0 are ordered by magnitude bits, so 31 halvings end at the exact float.
    """

    def halve(_, span):
        low, high = span  # magnitudes: holds(-high) is known, low is the smallest still possible
        middle = low + (high - low) // 2
        good = holds(-bitcast_convert_type(middle, jnp.float32))
        return jnp.where(good, low, middle + 1), jnp.where(good, middle, high)

    infinity = jnp.full((rows,), 0x7F800000, jnp.int32)
    _, high = jax.lax.fori_loop(0, 31, halve, (jnp.zeros_like(infinity), infinity))
    return -bitcast_convert_type(high, jnp.float32)


#: Log-probabilities [S], then ids and log-probabilities of the best, both [S, K].
type _Columns = tuple[Array, Array, Array]


class RowScores(NamedTuple):
    """Log-probabilities of scored prompt rows, in the order of `StepInputs.score_rows`, followed by
    zeros. NaN: the row's logits are not finite.
    """

    logprobs: Array  # float32 [T] of the tokens that follow
    top_ids: Array  # int32 [T, K]
    top_logprobs: Array  # float32 [T, K]


def score_rows_at_once(rows: int, vocab: int) -> int:
    """Number of rows whose logits are computed at a time: a power of two within _SCORE_BYTES, or
    more if that makes over _MOST_BLOCKS blocks; at most `rows`.
    """
    most = max(1, _SCORE_BYTES // (4 * vocab))
    block = 1 << (most.bit_length() - 1)
    while block * _MOST_BLOCKS < rows:
        block *= 2
    return min(rows, block)


_WHOLE = Vocabulary()


@dataclass(frozen=True)
class Sampler:
    """Chooses a token for each row of float32 logits [S, V], and scores tokens."""

    #: The kernel set's own `threshold`; None: the one here.
    top_k_top_p: Threshold | None = None
    #: K: the alternatives of each token that are scored.
    width: int = REQUEST_MOST.logprobs
    #: The columns that the logits hold; the state of seats and masks hold all columns.
    vocabulary: Vocabulary = _WHOLE

    def sample(
        self, logits: Array, rows: SamplingRows, state: SeatState, allowed: Array | None = None
    ) -> Sampled:
        """Sample one token for each row, with the counts in `state`. allowed: bool [S, V], allowed
        tokens; None: all.
        """
        if allowed is not None:
            allowed = self.vocabulary.columns(allowed)
        choose = partial(self.choose_tokens, rows=rows, allowed=allowed)
        # Both branches choose. With the choice after them, the branch that changes nothing would
        # still copy all logits, since the model's own logits are read again afterwards.
        tokens = jax.lax.cond(
            self.vocabulary.any_row(rows.need(PENALISED | BIASED)),
            lambda: choose(self.shape_logits(logits, rows, state)),
            lambda: choose(logits),
        )
        scores = jax.lax.cond(
            self.vocabulary.any_row(rows.need(SCORED)),
            lambda: self.score_tokens(logits, tokens),
            lambda: self.no_scores(tokens),
        )
        return Sampled(tokens, *scores)

    def choose_tokens(
        self, logits: Array, rows: SamplingRows, allowed: Array | None = None
    ) -> Array:
        """Choose one token for each row of shaped logits [S, V] -> int32 [S]. allowed: bool [S, V]
        or None.
        """
        if allowed is not None:
            logits = jnp.where(allowed, logits, -jnp.inf)
        chosen = self.vocabulary.greedy(logits)
        by_chance = (rows.params["temperature"] > 0) & (chosen >= 0)
        return jax.lax.cond(
            self.vocabulary.any_row(by_chance),
            lambda: jnp.where(by_chance, self._draw(logits, rows), chosen),
            lambda: chosen,
        )

    def shape_logits(self, logits: Array, rows: SamplingRows, state: SeatState) -> Array:
        """Logits [S, V] after penalties and biases, for the rows that have any."""
        logits = jax.lax.cond(
            jnp.any(rows.need(PENALISED)),
            lambda: _penalise(logits, rows, self.vocabulary.columns(state.counts)),
            lambda: logits,
        )
        return jax.lax.cond(
            jnp.any(rows.need(BIASED)),
            lambda: self._add_bias(logits, rows, state),
            lambda: logits,
        )

    def _add_bias(self, logits: Array, rows: SamplingRows, state: SeatState) -> Array:
        """Add the entries of each seat that are in force at the sampled token's position."""
        live = rows.need(BIASED)[:, None]
        live &= rows.position[:, None] + 1 < state.bias_until[rows.seats]
        values = jnp.where(live, state.bias_values[rows.seats], 0.0)
        at = jnp.arange(logits.shape[0])[:, None]
        places = self.vocabulary.places(state.bias_ids[rows.seats], logits.shape[-1])
        return logits.at[at, places].add(values, mode="drop")

    def _draw(self, logits: Array, rows: SamplingRows) -> Array:
        """Draw a token for each row of [S, V] after temperature, top-k, top-p (of the tokens that
        top-k leaves) and min-p -> int32 [S]. Ties with the last token kept are kept too.
        """
        # Subtract first, so that the best is exactly 0 in every program. With the division first,
        # a compiler could fuse the two roundings into one in some programs and not in others.
        scaled = logits - self.vocabulary.largest(logits)
        scaled /= jnp.maximum(rows.params["temperature"], 1e-5)[:, None]
        floor = self._floor(scaled, rows)
        weights = jnp.where(scaled >= floor[:, None], jnp.exp(scaled), 0.0)
        return self.vocabulary.invert(weights, _uniform(rows))

    def _floor(self, scaled: Array, rows: SamplingRows) -> Array:
        """The smallest kept logit per row [S]; -inf if all are kept."""
        top_k, top_p = rows.params["top_k"], rows.params["top_p"]
        limited = (top_k > 0) | (top_p < 1.0)
        floor = jax.lax.cond(
            self.vocabulary.any_row(limited),
            lambda: self.vocabulary.threshold(scaled, top_k, top_p, self.top_k_top_p or threshold),
            lambda: jnp.full_like(top_p, -jnp.inf),
        )
        least = jnp.where(rows.params["min_p"] > 0, jnp.log(rows.params["min_p"]), -jnp.inf)
        return jnp.maximum(jnp.where(limited, floor, -jnp.inf), least)

    def score_tokens(self, logits: Array, tokens: Array) -> _Columns:
        """Log-probabilities of tokens [S] and of the `width` best by the model's distribution."""
        total = self.vocabulary.log_total(logits)
        best, ids = self.vocabulary.top(logits, self.width)
        own = self.vocabulary.entry(logits, jnp.maximum(tokens, 0))
        room = ((0, 0), (0, self.width - best.shape[-1]))
        own = jnp.where(jnp.isfinite(total), own - total, jnp.nan)
        ids = jnp.pad(ids, room)
        return own, ids, jnp.pad(best - total[:, None], room, constant_values=-jnp.inf)

    def no_scores(self, tokens: Array) -> _Columns:
        """Zeros, for tokens [S] whose log-probabilities were not requested."""
        shape = (*tokens.shape, self.width)
        return jnp.zeros(tokens.shape), jnp.zeros(shape, jnp.int32), jnp.zeros(shape)

    def score_prompt(
        self,
        logits_of: Callable[[Array], Array],
        rows: Array,
        tokens: Array,
        count: Array,
        block: int,
    ) -> RowScores:
        """Score the first `count` of rows int32 [T], each against its entry of tokens int32 [T].

        logits_of: row numbers int32 [block] -> float32 [block, V], computed a block at a time, so
        that the logits of a whole prompt never exist at once.
        """
        size = rows.shape[0]
        spare = -size % block
        rows, tokens = jnp.pad(rows, (0, spare)), jnp.pad(tokens, (0, spare))

        def scored(first: int) -> RowScores:
            end = first + block
            return RowScores(*self.score_tokens(logits_of(rows[first:end]), tokens[first:end]))

        def nothing() -> RowScores:
            return RowScores(*self.no_scores(tokens[:block]))

        # Branches, not a loop: a GPU's driver runs a branch inside a CUDA graph, but the host would
        # wait for a loop whose end the device decides. XLA also hoists constant work out of a loop,
        # among it a copy of the output head: 90 ms in a step whose loop does not run once. It
        # hoists nothing out of a branch.
        blocks = [
            jax.lax.cond(first < count, partial(scored, first), nothing)
            for first in range(0, size, block)
        ]
        return RowScores(*(jnp.concatenate(parts)[:size] for parts in zip(*blocks, strict=True)))
