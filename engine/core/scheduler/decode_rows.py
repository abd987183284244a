"""Decode rows: selects the decoding sequences that get a row in a step."""

from __future__ import annotations

from jitney.engine.core.scheduler.open_sequences import OpenSequences
from jitney.engine.core.scheduler.plan import Draft
from jitney.engine.core.scheduler.preemption import Preemption
from jitney.engine.core.scheduler.sequence import Sequence
from jitney.engine.core.scheduler.step_times import StepTimeEstimate


class DecodeRows:
    """Gives decoding sequences a row and, where they need one, a page."""

    def __init__(
        self, sequences: OpenSequences, preemption: Preemption, step_times: StepTimeEstimate
    ):
        self._sequences = sequences
        self._seats = sequences.seats
        self._pages = sequences.pages
        self._preemption = preemption
        self._step_times = step_times

    def plan(self, draft: Draft, now: float, *, alone: bool = False) -> None:
        """Add a row for each decoding sequence, except those whose last token is in flight. Some
        may be preempted for lack of pages. alone: only one sequence is computed, so background rows
        need not give way to waiting requests.
        """
        rows, needy = self._advancing(self._seats.count if alone else self._background_rows())
        if needy:
            rows = self._feed(rows, needy, draft, now)
        if rows:
            draft.add_decode_rows(rows)

    def _advancing(self, room: int) -> tuple[list[Sequence], list[Sequence]]:
        """(sequences that advance in this step, long contexts first; those of them that need a
        page). Sequences whose last token is in flight leave their seats. room: the most background
        sequences.
        """
        rows: list[Sequence] = []
        needy: list[Sequence] = []
        done: list[Sequence] = []
        page_size = self._pages.pool.page_size
        for seq in self._seats.longest_first():
            start = seq.scheduled
            if start + 1 >= seq.limit:
                done.append(seq)
                continue
            if seq.background:
                room -= 1
                if room < 0:
                    self._seats.reorder()
                    continue
            if seq.matcher is not None and seq.matcher.late:
                self._seats.reorder()
                continue
            rows.append(seq)
            # The next row, with drafts, may not fit the sequence's pages.
            if start + seq.drafting + seq.lookahead >= len(seq.pages) * page_size:
                needy.append(seq)
        for seq in done:
            self._sequences.leave_early(seq)
        return rows, needy

    def _feed(
        self, rows: list[Sequence], needy: list[Sequence], draft: Draft, now: float
    ) -> list[Sequence]:
        """Give each needy sequence one more page. -> the sequences that still have a seat."""
        if self._pages.has_window:
            draft.dropped += [seq for seq in needy if self._pages.drop_behind(seq)]
        preempted = self._preemption.for_pages(needy, now)
        if preempted:
            draft.preempted += preempted
            rows, needy = _seated(rows), _seated(needy)
        self._pages.grow(needy)
        draft.fed = needy
        return rows

    def _background_rows(self) -> int:
        """The most background sequences that decode in this step: none while a live prompt needs
        rows, and beside live sequences only as many as do not slow these down.
        """
        seats = self._seats
        if not seats.n_background or self._sequences.live.queue.waiting or seats.live_prompts:
            return 0
        live = seats.n_decoding_live
        return self._step_times.rows_beside(live) if live else seats.count


def _seated(sequences: list[Sequence]) -> list[Sequence]:
    """The sequences that have a seat."""
    return [seq for seq in sequences if seq.seated]
