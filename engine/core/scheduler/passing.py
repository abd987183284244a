"""Which prompts may be computed before longer ones that came first.

Prompts are computed in boarding order, one after another. A short one may pass those before it:
its rows fit one step and are few beside theirs. Passing is paid for, in rows, out of a budget that
grows by `_SHARE` of all prompt rows computed while some prompt waits, and that holds one step at
most: the rows that pass, and what a step costs that is kept brief for them. So over any stretch of
steps longer prompts keep the rest of the rows, less one step's; a short prompt that finds too
little saved keeps its place by arrival. Neither kind starves.

Shortest remaining first is Schrage, A Proof of the Optimality of the Shortest Remaining Processing
Time Discipline, 1968; the bounded budget is a token bucket.
"""

from __future__ import annotations

import math

#: A prompt is short beside those before it if it has at most so large a share of their rows.
_MUCH_SHORTER = 0.25
#: Of the rows computed while some prompt waits, those that short ones may take before longer ones.
_SHARE = 0.15
#: Of the token budget: the prompt rows of a step in which short prompts pass, or twice theirs if
#: that is more. The step is brief, so that their first tokens do not wait for a long one's rows.
_BRIEF = 0.25
#: Rows that a brief step costs for each one that it leaves to later steps: what a step takes
#: whatever its rows comes once more. A CPU's takes 21 ms and 0.32 ms for each of 512 rows.
_PRICE = 0.25


class Passing:
    """Counts the rows that short prompts may still take before longer ones."""

    def __init__(self, token_budget: int):
        """token_budget: the most rows of one step."""
        self._token_budget = token_budget
        self._brief = int(_BRIEF * token_budget)
        # Rows that may be taken, at most the token budget.
        self._saved = float(token_budget)

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
        longer ones may have: all, or where that can be paid for too, as many as the short ones took
        or as keep the step brief.
        """
        self._saved -= rows
        brief = max(rows, self._brief - rows)
        price = _PRICE * (left - brief)
        if not 0 < price <= self._saved:
            return left
        self._saved -= price
        return brief

    def save(self, rows: int) -> None:
        """A step with so many prompt rows is planned in which some prompt has to wait."""
        self._saved = min(float(self._token_budget), self._saved + _SHARE * rows)
