"""Preemption: takes seats from sequences for live requests, for lack of pages, for stalled
sequences, and for tenants with less than their share.
"""

from __future__ import annotations

from jitney.engine.core.scheduler.open_sequences import OpenSequences
from jitney.engine.core.scheduler.sequence import Sequence

#: Seconds after which a sequence that was preempted for lack of pages may take another's seat.
_STALL_S = 1.2
#: Seconds and tokens for which a sequence keeps its seat before a stalled one may take it, so that
#: each turn makes progress.
_TURN_S, _TURN_TOKENS = 1.0, 16


class Preemption:
    """Preempts sequences, which then wait at the front of the queue and recompute their KV. Each
    method returns the sequences that it preempted.
    """

    def __init__(self, sequences: OpenSequences):
        self._sequences = sequences
        self._seats = sequences.seats
        self._pages = sequences.pages
        self._queue = sequences.live.queue

    def for_pages(self, needy: list[Sequence], now: float) -> list[Sequence]:
        """Preempt sequences until there is a page for each decoding sequence that needs one.

        The first sequence by `_keeping_order` never loses its seat, and alone it fits the pool
        (checked at admission), so it always makes progress. Preempted sequences board before new
        ones, so that all are computed in the end.
        """
        preempted: list[Sequence] = []
        pool = self._pages.pool
        if len(needy) <= pool.available:
            return preempted
        ranked = sorted(self._seats.taken, key=_keeping_order)
        while sum(seq.seated for seq in needy) > pool.available:
            seq = ranked.pop()
            self._sequences.preempt(seq, now)
            preempted.append(seq)
        return preempted

    def for_live(self, now: float) -> list[Sequence]:
        """Preempt background sequences until all waiting live sequences have a free seat and the
        first of them has enough pages.
        """
        head = self._queue.head()
        preempted: list[Sequence] = []
        if head is None:
            return preempted
        ranked = sorted((seq for seq in self._seats.taken if seq.background), key=_keeping_order)
        while ranked and self._lacks_room(head):
            seq = ranked.pop()
            self._sequences.preempt(seq, now)
            preempted.append(seq)
        return preempted

    def _lacks_room(self, head: Sequence) -> bool:
        """Whether waiting sequences have too few seats, or the first of them too few pages."""
        return len(self._seats.free) < len(self._queue.waiting) or self._missing_pages(head) > 0

    @staticmethod
    def too_long_stalled(seq: Sequence, now: float) -> bool:
        """Whether a preempted sequence has waited for at least _STALL_S seconds."""
        return seq.preemptions > 0 and now - seq.unseated_at >= _STALL_S

    def for_stalled(self, now: float) -> list[Sequence]:
        """Preempt a sequence for the one that lost its seat longest ago, if that one has stalled.

        In a pool full of long answers none may end for seconds: then the sequences take turns.
        """
        head = self._queue.head()
        if head is None or not self.too_long_stalled(head, now):
            return []
        missing = self._missing_pages(head)
        if missing <= 0:
            return []
        ready = [
            seq
            for seq in self._seats.taken
            if _had_its_turn(seq, now) and seq.n_pages >= missing and seq.rank[0] >= head.rank[0]
        ]
        if not ready:
            return []
        seq = min(ready, key=lambda seq: seq.n_pages)
        self._sequences.preempt(seq, now)
        return [seq]

    def for_claimant(self, claimant: Sequence, now: float) -> list[Sequence]:
        """Preempt a sequence of a tenant with more than its share of the seats, for a claimant.

        Each sequence gives way at most once, and boards again before new ones.
        """
        missing = self._missing_pages(claimant)
        crowding = self._queue.crowding(self._seats.count)
        ready = [
            seq
            for seq in self._seats.taken
            if seq.request.account in crowding
            and not seq.background
            and not seq.preemptions
            and seq.n_pages >= missing
        ]
        if not ready:
            return []
        seq = max(ready, key=_keeping_order)
        self._sequences.preempt(seq, now)
        return [seq]

    def _missing_pages(self, seq: Sequence) -> int:
        return self._pages.missing(seq, self._seats.n_taken)


def _had_its_turn(seq: Sequence, now: float) -> bool:
    """Whether a seated sequence has had its seat long enough to give way to a stalled one."""
    return now - seq.sat_at >= _TURN_S and len(seq.tokens) - seq.sat_with >= _TURN_TOKENS


#: (background, class, no token yet, negative number of computed rows, request, index).
type _Place = tuple[bool, float, bool, int, int, int]


def _keeping_order(seq: Sequence) -> _Place:
    """Sort key of seated sequences; the last one in this order loses its seat first.

    Live sequences come before background ones; then lower classes first; then sequences that have
    sent a token before those that have not, whose clients see no stall; then those with most rows
    to recompute; then the oldest.
    """
    group, number, index = seq.rank
    return seq.background, group, seq.first_token_at is None, -seq.scheduled, number, index
