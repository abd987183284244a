"""Input tokens of each seat's next rows: the token sampled last and, with speculation, drafts of
the tokens behind it.

A draft is read by a row of its own, whose position is one more. It is accepted if and only if it is
the token that the row before it samples anyway; so speculation changes no token, at any
temperature (sampling depends on seed and position alone). The host plans a step before it knows how
many drafts of the last one were accepted; rows take that from here.

Axes: M seats, T token rows, S logit rows, K drafts, N recent tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jitney.engine.core.scheduler.plan import REJECTED

#: Newest tokens of each seat in which drafts are looked up.
_RECENT = 4096
#: Above any position.
_FAR = 1 << 28


class DraftRows(NamedTuple):
    """The drafts that logit rows read, int32 [S] each; arrays or their shapes."""

    numbers: Any  #: which draft a row reads, from 1; 0: none
    tokens: Any  #: the token that a row reads; -1: there is no such draft

    def count(self, counts: Array) -> Array:
        """The counts of output tokens int32 [S, V] as they are for each row: with the drafts that
        it and the rows before it read.
        """
        rows = jnp.arange(len(self.tokens))
        own = (rows <= rows[:, None]) & (rows > (rows - self.numbers)[:, None])
        return counts.at[rows[:, None], self.tokens].add(own)


class Taken(NamedTuple):
    """The seats' tokens after sampling, and what the host is told of them."""

    seat_tokens: SeatTokens
    tokens: Array  #: int32 [S]; REJECTED of rows whose draft was
    guessed: Array | None = None  #: bool [S]: the draft of the token behind was right
    drafts: Array | None = None  #: int32 [S, K]: of what follows each row's token; -1: none


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SeatTokens:
    """The tokens sampled last; donated to every step."""

    last: Any  #: int32 [M], or its shape

    def fill(self, inputs: Any) -> tuple[Any, DraftRows | None]:
        """A step's upload with the tokens that the host did not know, and the drafts of its logit
        rows.
        """
        sampled = jnp.maximum(self.last[inputs.token_seats], 0)
        return inputs._replace(tokens=jnp.where(inputs.tokens >= 0, inputs.tokens, sampled)), None

    def take(
        self, seats: Array, positions: Array, drafts: DraftRows | None, tokens: Array
    ) -> Taken:
        """Note the tokens int32 [S] that rows sampled. seats: int32 [S], M or more for none;
        positions: of the rows.
        """
        return Taken(replace(self, last=self.last.at[seats].set(tokens, mode="drop")), tokens)

    def draft_rows(self, numbers: Any, tokens: Any) -> DraftRows | None:
        """`DraftRows` of these, as the programs of this engine take them."""
        return None


class _Drafter(Protocol):
    """Guesses the next tokens of sequences; hashable, since programs are made for it."""

    def drafts(self, recent: Array, newest: Array, count: int) -> Array:
        """recent: int32 [S, N], the newest tokens, each in the place of its position modulo N;
        newest: int32 [S], position of the last one -> int32 [S, count]; -1: no guess.
        """
        ...


@dataclass(frozen=True)
class PromptLookup:
    """Drafts what followed the newest earlier place where the same tokens stand as at the end, in
    prompt or output: of the places with the most equal tokens, `most` at most and `least` at least
    (prompt lookup decoding, Saxena 2023; vLLM's method "ngram").
    """

    least: int = 1
    most: int = 3

    def drafts(self, recent: Array, newest: Array, count: int) -> Array:
        """See `_Drafter.drafts`. Text that repeats itself at a short distance is continued so."""
        size = recent.shape[1]
        behind = (newest[:, None] - jnp.arange(size)) % size
        positions = newest[:, None] - behind
        same = behind > 0
        length = jnp.zeros_like(recent)
        for distance in range(self.most):
            wanted = jnp.take_along_axis(recent, ((newest - distance) % size)[:, None], 1)
            same &= (jnp.roll(recent, distance, axis=1) == wanted) & (positions >= distance)
            length += same
        rank = jnp.where(length >= self.least, length * _FAR + positions, -1)
        best = jnp.argmax(rank, axis=1)
        found = jnp.take_along_axis(rank, best[:, None], 1) >= 0
        period = jnp.take_along_axis(behind, best[:, None], 1)
        steps = jnp.arange(count) % jnp.maximum(period, 1)
        places = (best[:, None] + 1 + steps) % size
        return jnp.where(found, jnp.take_along_axis(recent, places, 1), -1)


@dataclass(frozen=True)
class Drafting:
    """How tokens are drafted."""

    #: None: programs beside the step draft (`engine.core.executor.draft_model`).
    drafter: _Drafter | None
    count: int  #: K: drafts of a step at most
    #: How likely a draft counts as right, whatever it is; 0: by what it is.
    chance: float = 0.0

    def empty(self, seats: int, context: int, page_size: int) -> DraftedTokens:
        """The tokens of free seats. context: most tokens of a sequence."""
        nothing = jnp.zeros(seats, jnp.int32)
        drafts = jnp.full((seats, self.count), -1, jnp.int32)
        if self.drafter is None:
            return DraftedTokens(nothing, nothing, drafts, page_size, self.chance)
        recent = jnp.zeros((seats, min(context, _RECENT)), jnp.int32)
        return LookedUpTokens(
            nothing, nothing, drafts, page_size, self.chance, recent, self.drafter
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftedTokens(SeatTokens):
    """Those of an engine that speculates."""

    accepted: Any  #: int32 [M]: drafts of the seat's last rows that were accepted
    drafts: Any  #: int32 [M, K]: those that its next rows may read; -1: none
    page_size: int = field(metadata={"static": True})
    chance: float = field(metadata={"static": True})  #: see `Drafting`

    def fill(self, inputs: Any) -> tuple[Any, DraftRows | None]:
        """See `SeatTokens.fill`. Rows whose tokens the host did not know move behind the accepted
        drafts, which it did not know either.
        """
        numbers = jnp.maximum(-1 - inputs.tokens, 0)
        unknown = inputs.tokens < 0
        seats = inputs.token_seats
        drafted = self.drafts[seats, jnp.maximum(numbers - 1, 0)]
        read = jnp.where(numbers > 0, drafted, self.last[seats])
        tokens = jnp.where(unknown, read, inputs.tokens)
        moved = jnp.where(unknown, self.accepted[seats], 0)
        last_rows = jnp.maximum(inputs.cu_q[1:] - 1, 0)
        at = inputs.logit_rows
        filled = inputs._replace(
            tokens=jnp.maximum(tokens, 0),
            positions=inputs.positions + moved,
            kv_lens=jnp.where(inputs.kv_lens > 0, inputs.kv_lens + moved[last_rows], 0),
        )
        return self.write_anew(filled, moved > 0), DraftRows(numbers[at], tokens[at])

    def write_anew(self, inputs: Any, moved: Array) -> Any:
        """The upload with the pool rows of rows that moved, bool [T]. They decode, and so are the
        first rows, each with a page table of its own; rows behind its last page go to the trash.
        """
        sequences = inputs.page_table.shape[0]
        owners = jnp.minimum(jnp.arange(moved.shape[0]), sequences - 1)
        pages, offsets = inputs.positions // self.page_size, inputs.positions % self.page_size

        def rows_of(table: Array, rows: Array) -> Array:
            own = table.at[owners, pages].get(mode="fill", fill_value=0)
            return jnp.where(moved, own * self.page_size + offsets, rows)

        return inputs._replace(
            write_rows=rows_of(inputs.page_table, inputs.write_rows),
            window_rows=jax.vmap(rows_of)(inputs.window_tables, inputs.window_rows),
        )

    def take(
        self, seats: Array, positions: Array, drafts: DraftRows | None, tokens: Array
    ) -> Taken:
        """See `SeatTokens.take`; accepts drafts."""
        assert drafts is not None  # of every program of an engine that speculates
        numbers, most = drafts.numbers, self.drafts.shape[1]
        expected = self.drafts.at[seats, jnp.minimum(numbers, most - 1)].get(mode="clip")
        before, next_right = jnp.roll(tokens, 1), expected == tokens
        right = drafts.tokens == before
        if self.chance:
            right = _drawn(self.chance, seats, positions)
            next_right = _drawn(self.chance, seats, positions + 1)
        accepted = _accepted(numbers, right & (before >= 0))
        guessed = accepted & (numbers < most) & next_right
        tokens = jnp.where(accepted, tokens, REJECTED)
        followed = jnp.append((accepted & (numbers > 0))[1:], False)
        none = len(self.last)
        owners = jnp.where(accepted, seats, none)
        last = jnp.where(followed, none, owners)
        kept = replace(
            self,
            last=self.last.at[last].set(tokens, mode="drop"),
            accepted=self.accepted.at[last].set(numbers, mode="drop"),
        )
        kept, following = kept.draft(seats, owners, last, positions + 1, tokens)
        return Taken(kept, tokens, guessed, following)

    def draft(
        self, seats: Array, owners: Array, last: Array, newest: Array, tokens: Array
    ) -> tuple[DraftedTokens, Array]:
        """Draft what follows tokens int32 [S] at positions `newest`. seats: of the rows; owners: of
        those whose token counts; last: of the last such row of each; M: of the others. -> (the
        tokens with these drafts, and the drafts behind each row, int32 [S, K]; -1: not known yet).
        """
        return self, jnp.full((len(tokens), self.drafts.shape[1]), -1, jnp.int32)

    def draft_rows(self, numbers: Any, tokens: Any) -> DraftRows:
        return DraftRows(numbers, tokens)

    def with_drafts(self, seats: Array, drafts: Array) -> DraftedTokens:
        """The next rows of seats int32 [S] read these, int32 [S, K]; M: of no seat."""
        return replace(self, drafts=self.drafts.at[seats].set(drafts, mode="drop"))

    def expect(self, seats: Array, rows: DraftRows, tokens: Array) -> DraftedTokens:
        """Note the tokens int32 [S] that a model expects behind logit rows: as the draft behind
        those that a sequence's rows read. What they read stays as it is.
        """
        none = len(self.last)
        own = jnp.where(seats > none, seats - none - 1, seats)  # chosen behind the step
        followed = jnp.append(rows.numbers[1:], 0) > rows.numbers
        owners = jnp.where(followed, none, own)
        return replace(self, drafts=self.drafts.at[owners, rows.numbers].set(tokens, mode="drop"))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LookedUpTokens(DraftedTokens):
    """Those with the recent tokens of each seat, from which drafts are made behind every step."""

    recent: Any  #: int32 [M, N]: see `_Drafter.drafts`
    drafter: _Drafter = field(metadata={"static": True})

    def draft(
        self, seats: Array, owners: Array, last: Array, newest: Array, tokens: Array
    ) -> tuple[LookedUpTokens, Array]:
        """See `DraftedTokens.draft`."""
        recent = self.recent.at[owners, newest % self.recent.shape[1]].set(tokens, mode="drop")
        count = self.drafts.shape[1]
        following = self.drafter.drafts(recent.at[seats].get(mode="clip"), newest, count)
        drafts = self.drafts.at[last].set(following, mode="drop")
        return replace(self, drafts=drafts, recent=recent), following

    def board(self, seat: Array, row: Array) -> LookedUpTokens:
        """A sequence takes a seat; row: int32 [N], see `row_of`."""
        return replace(self, recent=self.recent.at[seat].set(row))

    def row_of(self, tokens: list[int]) -> np.ndarray:
        """A seat's row of `recent` for the tokens of a sequence."""
        size = self.recent.shape[1]
        row = np.zeros(size, np.int32)
        first = max(0, len(tokens) - size)
        row[np.arange(first, len(tokens)) % size] = tokens[first:]
        return row


def _accepted(numbers: Array, right: Array) -> Array:
    """bool [S]: rows that read no draft, or only right ones. right: bool [S], of the draft that a
    row reads. The rows of a sequence stand one behind the other, in the order of their numbers.
    """
    rows = jnp.arange(len(numbers))
    last_wrong = jax.lax.cummax(jnp.where((numbers == 0) | right, -1, rows))
    return last_wrong < rows - numbers + 1


def _drawn(chance: float, seats: Array, positions: Array) -> Array:
    """bool [S]: true by this chance, the same whenever it is drawn for a seat and a position."""
    first, second, third = map(jnp.uint32, (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D))
    mixed = seats.astype(jnp.uint32) * first + positions.astype(jnp.uint32) * second
    mixed = (mixed ^ (mixed >> 15)) * third
    return (mixed >> 8) < jnp.uint32(chance * (1 << 24))
