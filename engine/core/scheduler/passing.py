"""Passing: lets short prompts be computed before longer ones that arrived first.

Prompts are computed in boarding order, one after another. A short prompt may pass the ones before
it if its rows are few compared with theirs. A budget of rows pays for this: for the rows that pass,
and for the fixed cost of a step that has no other prompt rows. The budget grows by `_SHARE` of all
prompt rows computed while some prompt waits, and holds at most one step's rows. A prompt for which
it is too small passes if no rows are owed; it then owes all its rows, which `_LONGER_SHARE` of the
rows computed later make up for. So over any series of steps longer prompts get all other rows, less
one step's and those owed; a short prompt that cannot pass keeps its place by arrival. Neither kind
starves.

Shortest remaining first is Schrage, A Proof of the Optimality of the Shortest Remaining Processing
Time Discipline, 1968; the bounded budget is a token bucket.
"""

from __future__ import annotations

import math

#: A prompt is short if it has at most this share of the rows of the prompts before it.
_MUCH_SHORTER = 0.25
#: Share of the rows computed while some prompt waits that short prompts may take.
_SHARE = 0.15
#: The same for prompts that pass with more rows than are saved.
_LONGER_SHARE = 0.1
#: Price of a step with only short prompts, as a share of the token budget: the rows that could be
#: computed in the fixed time of a step, which is spent once more. A full step takes 10 to 20 times
#: that fixed time on a CPU, 14 times on an H100.
_PRICE = 0.125
#: After a prompt of at most this share of the token budget, more short prompts are expected for
#: this many seconds.
_SHORT, _EXPECTED_S = 0.25, 10.0


class Passing:
    """The budget of rows that short prompts may still take before longer ones."""

    def __init__(self, token_budget: int):
        """token_budget: the most rows of one step."""
        self._token_budget = token_budget
        # Rows that short prompts may take, at most the token budget.
        self._saved = float(token_budget)
        # Rows owed: those of prompts that passed with more rows than were saved.
        self._owed = 0.0
        # Clock seconds until which short prompts are expected.
        self._expected_until = -math.inf

    def longest(self, rows_first: int) -> int:
        """The most rows of a prompt that may pass now. rows_first: rows of the prompts before it;
        if these fit one step no prompt passes them, and the result is 0.
        """
        if rows_first <= self._token_budget:
            return 0
        most = _MUCH_SHORTER * rows_first
        return int(min(self._saved, most) if self._owed else most)

    def rows_until(self, rows: int, rows_first: int, shorter: int) -> float:
        """Rows that are computed before a prompt of `rows` rows passes `rows_first` rows; inf if it
        is not short. shorter: rows of the prompts that pass before it.
        """
        if rows_first <= self._token_budget or rows > _MUCH_SHORTER * rows_first:
            return math.inf
        until = (self._owed + max(0.0, shorter - self._saved)) / _LONGER_SHARE
        if rows <= self._token_budget:
            until = min(until, max(0.0, rows + shorter - self._saved) / _SHARE)
        return shorter + until

    def pay(self, rows: int) -> None:
        """Pay for all `rows` rows of a prompt that passes."""
        if rows <= self._saved:
            self._saved -= rows
        else:
            self._owed += rows

    def left_to_others(self, left: int) -> int:
        """How many of the `left` rows that still fit a step with short prompts longer ones may
        have: none if the budget can pay for a step with only short prompts, whose first tokens then
        do not wait for a long prompt's rows; else all.
        """
        price = _PRICE * self._token_budget
        if not left or price > self._saved:
            return left
        self._saved -= price
        return 0

    def longest_between(self, rows_first: int) -> int:
        """The most rows of the prompts of a step between two segments of a running one. rows_first:
        rows of the prompts that this step delays.
        """
        affordable = self._saved - _PRICE * self._token_budget
        return max(0, int(min(affordable, _MUCH_SHORTER * rows_first)))

    def spend_between(self, rows: int) -> None:
        """Take the price of a step between two segments from the budget, and its `rows` rows."""
        self._saved -= rows + _PRICE * self._token_budget

    def save(self, rows: int) -> None:
        """Grow the budget: a step with `rows` prompt rows is planned while some prompt waits."""
        self._saved = min(float(self._token_budget), self._saved + _SHARE * rows)
        self._owed = max(0.0, self._owed - _LONGER_SHARE * rows)

    def board(self, rows: int, now: float) -> None:
        """Note that a prompt with `rows` rows to compute takes a seat."""
        if rows <= _SHORT * self._token_budget:
            self._expected_until = now + _EXPECTED_S

    def expects(self, rows: int, now: float) -> bool:
        """Whether steps should be brief while a prompt of `rows` rows is computed, because short
        prompts have arrived recently.
        """
        return rows > self._token_budget and now < self._expected_until
