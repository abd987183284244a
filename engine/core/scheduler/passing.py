"""Which prompts may be computed before longer ones that came first.

Prompts are computed in boarding order, one after another. A short one may pass those before it:
its rows fit one step and are few beside theirs. Passing is paid for, in rows, out of a budget that
grows by `_SHARE` of all prompt rows computed while some prompt waits, and that holds one step at
most: the rows that pass, and the cost of a step that has no others. So over any stretch of steps
longer prompts keep the rest of the rows, less one step's; a short prompt that finds too little
saved keeps its place by arrival. Neither kind starves.

Shortest remaining first is Schrage, A Proof of the Optimality of the Shortest Remaining Processing
Time Discipline, 1968; the bounded budget is a token bucket.
"""

from __future__ import annotations

import math

#: A prompt is short beside those before it if it has at most so large a share of their rows.
_MUCH_SHORTER = 0.25
#: Of the rows computed while some prompt waits, those that short ones may take before longer ones.
_SHARE = 0.15
#: Of the token budget: the rows that could be computed in the time that a step takes whatever its
#: rows, which comes once more where short prompts have a step of their own. A full step takes 10 to
#: 20 times as long on a CPU, 14 times on an H100.
_PRICE = 0.125
#: A prompt of at most this share of the token budget lets others like it be expected, for so many
#: seconds.
_SHORT, _EXPECTED_S = 0.25, 10.0


class Passing:
    """Counts the rows that short prompts may still take before longer ones."""

    def __init__(self, token_budget: int):
        """token_budget: the most rows of one step."""
        self._token_budget = token_budget
        # Rows that may be taken, at most the token budget.
        self._saved = float(token_budget)
        # Until when short prompts are expected, clock seconds.
        self._expected_until = -math.inf

    def longest(self, rows_first: int) -> int:
        """The most rows of a prompt that may pass so many rows of those before it now; 0 where
        these are computed in one step anyhow.
        """
        if rows_first <= self._token_budget:
            return 0
        return int(min(self._saved, _MUCH_SHORTER * rows_first))

    def rows_until(self, rows: int, rows_first: int, shorter: int) -> float:
        """Rows computed before a prompt of so many passes `rows_first` rows, behind `shorter` ones
        that pass before it; inf if it is not short.
        """
        if rows_first <= self._token_budget:
            return math.inf
        if rows > min(self._token_budget, _MUCH_SHORTER * rows_first):
            return math.inf
        return shorter + max(0.0, rows + shorter - self._saved) / _SHARE

    def spend(self, rows: int, left: int) -> int:
        """Short prompts take so many rows of a step, which leaves others. -> how many of these
        longer ones may have: none where a step of their own can be paid for, so that their first
        tokens do not wait for a long one's rows; else all.
        """
        self._saved -= rows
        price = _PRICE * self._token_budget
        if not left or price > self._saved:
            return left
        self._saved -= price
        return 0

    def save(self, rows: int) -> None:
        """A step with so many prompt rows is planned in which some prompt has to wait."""
        self._saved = min(float(self._token_budget), self._saved + _SHARE * rows)

    def board(self, rows: int, now: float) -> None:
        """A prompt with so many rows to compute takes a seat."""
        if rows <= _SHORT * self._token_budget:
            self._expected_until = now + _EXPECTED_S

    def expects(self, rows: int, now: float) -> bool:
        """Whether steps are to be brief while a prompt of so many rows is computed, since short
        prompts have come of late.
        """
        return rows > self._token_budget and now < self._expected_until
