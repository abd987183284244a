"""How many drafts decoding sequences check in a step: as many as should pay, by how often their
drafts were right of late, and by what steps take.

The device drafts tokens (`engine.core.executor.seat_tokens`); a draft that a sequence checks is one
more decode row. The host learns one step late how many were accepted, so a sequence's next row may
stand up to `Sequence.drafting` positions behind `Sequence.scheduled`.
"""

from __future__ import annotations

from jitney.engine.core.scheduler.open_sequences import OpenSequences
from jitney.engine.core.scheduler.plan import REJECTED, Chunk, Draft, Plan, StepResult
from jitney.engine.core.scheduler.sequence import Sequence
from jitney.engine.core.scheduler.step_times import StepTimeEstimate

#: Drafts that a sequence checks in a step.
_WIDTHS = (1, 3, 7)
#: How much each token counts among a sequence's recent ones.
_NEWEST = 0.2
#: Sequences whose drafts are right less often check none.
_LEAST_RIGHT = 0.3
#: A step with drafts must bring so many times the tokens a second.
_PAYS = 1.05


class Speculation:
    """Adds draft rows to steps in which sequences only decode."""

    def __init__(
        self, most: int, seats: int, sequences: OpenSequences, step_times: StepTimeEstimate
    ):
        """most: drafts of a sequence in a step, those in flight not counted. seats: rows that such
        a step has at most.
        """
        # Two steps' drafts never need more than one page beyond the last one begun.
        self._most = min(most, sequences.pages.pool.page_size // 2)
        self._rows = seats
        self._seats = sequences.seats
        self._pool = sequences.pages.pool
        self._step_times = step_times

    def look_ahead(self) -> None:
        """Before a plan: decide for how many drafts each sequence gets pages. None ends with a
        draft, so that no row stands behind the last position that a sequence needs. Drafts take no
        page that others may need.
        """
        spare = self._pool.available > self._seats.n_taken
        for seq in self._seats.decoding:
            seq.lookahead = 0
            if spare and seq.right_drafts >= _LEAST_RIGHT and _may_draft(seq):
                left = seq.limit - 3 - seq.scheduled - seq.drafting
                seq.lookahead = max(0, min(self._most, left))

    def widen(self, draft: Draft) -> None:
        """Add draft rows to a step, if it has decode rows only."""
        if draft.reserved or draft.rows > draft.n_decode:
            return
        room = {chunk.seq: self._room(chunk) for chunk in draft.chunks if chunk.seq.lookahead}
        widths = self._best(draft.rows, room)
        if widths:
            draft.add_drafts(widths)

    def _room(self, chunk: Chunk) -> int:
        """Drafts that a sequence has pages for behind its planned row, wherever that stands."""
        seq = chunk.seq
        if chunk.start < len(seq.tokens):
            return 0  # its token comes from the host, which has no drafts
        held = len(seq.pages) * self._pool.page_size
        return min(seq.lookahead, held - 1 - chunk.start - seq.drafting)

    def _best(self, rows: int, room: dict[Sequence, int]) -> dict[Sequence, int]:
        """The drafts of each sequence that bring the most tokens a second; empty: none do."""
        best: dict[Sequence, int] = {}
        usual = self._step_times.decode(rows)
        if not room or not usual:
            return best
        most = _PAYS * rows / usual
        for width in _WIDTHS:
            widths = {seq: min(width, own) for seq, own in room.items() if own > 0}
            total = rows + sum(widths.values())
            if not widths or total > self._rows:
                break
            # A size that was not seen yet is tried.
            seconds = self._step_times.decode(total) or usual
            tokens = rows + sum([_expected(seq, own) for seq, own in widths.items()])
            if tokens / seconds > most:
                best, most = widths, tokens / seconds
        return best

    def learn(self, plan: Plan, result: StepResult) -> None:
        """Which drafts of a step's sequences were right, checked or not."""
        assert result.guessed is not None  # of every step of an engine that speculates
        for row, chunk in enumerate(plan.chunks[: plan.n_decode]):
            if chunk.draft < self._most and result.tokens[row] != REJECTED:
                seq = chunk.seq
                seq.right_drafts += _NEWEST * (result.guessed[row] - seq.right_drafts)


def _may_draft(seq: Sequence) -> bool:
    """A grammar's masks are made on the host, for one token at a time; tokens that a former core
    sent are compared one by one.
    """
    return seq.matcher is None and seq.replay is None


def _expected(seq: Sequence, drafts: int) -> float:
    """How many of a sequence's drafts should be accepted: each only behind the one before."""
    right = seq.right_drafts
    return sum([right**number for number in range(1, drafts + 1)])
