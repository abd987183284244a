"""Input tokens of each seat's next rows: the token sampled last and, with speculation, drafts of
the tokens after it.

Each draft is read by a row of its own, at the next position. It is accepted if and only if it is
the token that the row before it samples anyway; so speculation changes no token, at any
temperature (sampling depends on seed and position alone). The host plans a step before it knows how
many drafts of the last one were accepted; the rows read that number from here.

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

#: Number of newest tokens of each seat in which drafts are looked up.
_RECENT = 4096
#: A number above any position.
_FAR = 1 << 28


class DraftRows(NamedTuple):
    """The drafts that logit rows read, int32 [S] each; arrays or their shapes."""

    numbers: Any  #: number of the draft that a row reads, from 1; 0: none
    tokens: Any  #: the token that a row reads; -1: no such draft

    def count(self, counts: Array) -> Array:
        """The counts of output tokens for each row, int32 [S, V], including the drafts that it and
        the rows before it read.
        """
        rows = jnp.arange(len(self.tokens))
        own = (rows <= rows[:, None]) & (rows > (rows - self.numbers)[:, None])
        return counts.at[rows[:, None], self.tokens].add(own)


class Taken(NamedTuple):
    """The seats' tokens after sampling, and the results for the host."""

    seat_tokens: SeatTokens
    tokens: Array  #: int32 [S]; REJECTED for rows whose draft was rejected
    guessed: Array | None = None  #: bool [S]: whether the draft of the next token was right
    drafts: Array | None = None  #: int32 [S, K]: drafts after each row's token; -1: none


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SeatTokens:
    """The token sampled last in each seat; donated to every step."""

    last: Any  #: int32 [M], or its shape

    def fill(self, inputs: Any) -> tuple[Any, DraftRows | None]:
        """Fill in the tokens that the host did not know. -> (the step's upload, the drafts of its
        logit rows).
        """
        sampled = jnp.maximum(self.last[inputs.token_seats], 0)
        return inputs._replace(tokens=jnp.where(inputs.tokens >= 0, inputs.tokens, sampled)), None

    def take(
        self, seats: Array, positions: Array, drafts: DraftRows | None, tokens: Array
    ) -> Taken:
        """Store the tokens int32 [S] that rows sampled. seats: int32 [S], M or more: no seat.
        positions: int32 [S], of the rows.
        """
        return Taken(replace(self, last=self.last.at[seats].set(tokens, mode="drop")), tokens)

    def draft_rows(self, numbers: Any, tokens: Any) -> DraftRows | None:
        """`DraftRows` of these arrays; None in an engine without speculation."""
        return None


class _Drafter(Protocol):
    """Drafts the next tokens of sequences. Hashable, because programs depend on it."""

    def drafts(self, recent: Array, newest: Array, count: int) -> Array:
        """Draft `count` tokens. recent: int32 [S, N], the newest tokens, each at the index of its
        position modulo N. newest: int32 [S], position of the last one. -> int32 [S, count]; -1: no
        draft.
        """
        ...


@dataclass(frozen=True)
class PromptLookup:
    """Drafts the tokens that followed an earlier occurrence of the last tokens, in prompt or
    output: the occurrence with the most equal tokens (from `least` to `most`), and of several the
    newest (prompt lookup decoding, Saxena 2023; vLLM's method "ngram").
    """

    least: int = 1
    most: int = 3

    def drafts(self, recent: Array, newest: Array, count: int) -> Array:
        """See `_Drafter.drafts`. A repetition with a short period is continued."""
        size = recent.shape[1]
        behind = (newest[:, None] - jnp.arange(size)) % size
        positions = newest[:, None] - behind
        same = behind > 0
        length = jnp.zeros_like(recent)
        for distance in range(self.most):
            tail_token = jnp.take_along_axis(recent, ((newest - distance) % size)[:, None], 1)
            same &= (jnp.roll(recent, distance, axis=1) == tail_token) & (positions >= distance)
            length += same
        rank = jnp.where(length >= self.least, length * _FAR + positions, -1)
        best = jnp.argmax(rank, axis=1)
        is_match = jnp.take_along_axis(rank, best[:, None], 1) >= 0
        period = jnp.take_along_axis(behind, best[:, None], 1)
        steps = jnp.arange(count) % jnp.maximum(period, 1)
        places = (best[:, None] + 1 + steps) % size
        return jnp.where(is_match, jnp.take_along_axis(recent, places, 1), -1)


@dataclass(frozen=True)
class Drafting:
    """The method of drafting tokens."""

    #: Drafts inside the step; None: separate programs draft (`engine.core.executor.draft_model`).
    drafter: _Drafter | None
    count: int  #: K: the most drafts of a sequence in a step
    #: Simulated probability that a draft counts as right; 0: compare real tokens.
    chance: float = 0.0

    def empty(self, seats: int, context: int, page_size: int) -> DraftedTokens:
        """The tokens of free seats. context: the most tokens of a sequence."""
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
    """Seat tokens of an engine that speculates."""

    accepted: Any  #: int32 [M]: number of accepted drafts among the seat's last rows
    drafts: Any  #: int32 [M, K]: drafts that its next rows may read; -1: none
    page_size: int = field(metadata={"static": True})
    chance: float = field(metadata={"static": True})  #: see `Drafting`

    def fill(self, inputs: Any) -> tuple[Any, DraftRows | None]:
        """See `SeatTokens.fill`. Rows whose tokens the host did not know also move to the position
        after the accepted drafts, which it did not know either.
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
        """Replace the KV rows of rows that moved, bool [T]. These are decode rows, so they are the
        first rows and each has a page table of its own; rows after its last page go to the trash
        page.
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
        assert drafts is not None  # in an engine that speculates every program has them
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
        updated = replace(
            self,
            last=self.last.at[last].set(tokens, mode="drop"),
            accepted=self.accepted.at[last].set(numbers, mode="drop"),
        )
        updated, following = updated.draft(seats, owners, last, positions + 1, tokens)
        return Taken(updated, tokens, guessed, following)

    def draft(
        self, seats: Array, owners: Array, last: Array, newest: Array, tokens: Array
    ) -> tuple[DraftedTokens, Array]:
        """Draft the tokens after `tokens` int32 [S], which are at the positions `newest`. seats: of
        all rows. owners: of rows whose token counts, M for others. last: of the last such row of
        each seat, M for others. -> (seat tokens with these drafts, drafts after each row int32
        [S, K]; -1: not known yet).
        """
        return self, jnp.full((len(tokens), self.drafts.shape[1]), -1, jnp.int32)

    def draft_rows(self, numbers: Any, tokens: Any) -> DraftRows:
        return DraftRows(numbers, tokens)

    def with_drafts(self, seats: Array, drafts: Array) -> DraftedTokens:
        """Set the drafts int32 [S, K] of seats int32 [S]; seat M: none."""
        return replace(self, drafts=self.drafts.at[seats].set(drafts, mode="drop"))

    def expect(self, seats: Array, rows: DraftRows, tokens: Array) -> DraftedTokens:
        """Store the tokens int32 [S] that a draft model expects after logit rows, as one more draft
        after those that a sequence's rows read. The drafts that they read stay the same.
        """
        none = len(self.last)
        own = jnp.where(seats > none, seats - none - 1, seats)  # tokens chosen after the step
        followed = jnp.append(rows.numbers[1:], 0) > rows.numbers
        owners = jnp.where(followed, none, own)
        return replace(self, drafts=self.drafts.at[owners, rows.numbers].set(tokens, mode="drop"))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LookedUpTokens(DraftedTokens):
    """Drafted tokens with each seat's recent tokens, from which every step makes drafts."""

    recent: Any  #: int32 [M, N]: see `_Drafter.drafts`
    drafter: _Drafter = field(metadata={"static": True})

    def draft(
        self, seats: Array, owners: Array, last: Array, newest: Array, tokens: Array
    ) -> tuple[LookedUpTokens, Array]:
        recent = self.recent.at[owners, newest % self.recent.shape[1]].set(tokens, mode="drop")
        count = self.drafts.shape[1]
        following = self.drafter.drafts(recent.at[seats].get(mode="clip"), newest, count)
        drafts = self.drafts.at[last].set(following, mode="drop")
        return replace(self, drafts=drafts, recent=recent), following

    def board(self, seat: Array, row: Array) -> LookedUpTokens:
        """Set the recent tokens of a boarding sequence's seat. row: int32 [N], see `row_of`."""
        return replace(self, recent=self.recent.at[seat].set(row))

    def row_of(self, tokens: list[int]) -> np.ndarray:
        """A seat's row of `recent` for the tokens of a sequence."""
        size = self.recent.shape[1]
        row = np.zeros(size, np.int32)
        first = max(0, len(tokens) - size)
        row[np.arange(first, len(tokens)) % size] = tokens[first:]
        return row


def _accepted(numbers: Array, right: Array) -> Array:
    """bool [S]: whether a row and those before it in its sequence read only right drafts. right:
    bool [S], for the draft that each row reads. A sequence's rows are adjacent, in the order of
    their draft numbers.
    """
    rows = jnp.arange(len(numbers))
    last_wrong = jax.lax.cummax(jnp.where((numbers == 0) | right, -1, rows))
    return last_wrong < rows - numbers + 1


def _drawn(chance: float, seats: Array, positions: Array) -> Array:
    """bool [S]: true with this probability; always the same for a seat and a position."""
    first, second, third = map(jnp.uint32, (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D))
    mixed = seats.astype(jnp.uint32) * first + positions.astype(jnp.uint32) * second
    mixed = (mixed ^ (mixed >> 15)) * third
    return (mixed >> 8) < jnp.uint32(chance * (1 << 24))
