"""Which sequence loses its seat: to a live request, to a lack of pages, to a stream that stands
still, to a tenant's share.
"""

from __future__ import annotations

from jitney.engine.core.scheduler.open_sequences import OpenSequences
from jitney.engine.core.scheduler.sequence import Sequence

#: Seconds after which a sequence that lost its seat to a lack of pages takes another's.
_STALL_S = 1.2
#: Seconds and tokens that a seat is good for before it can be taken so: no turn passes without
#: progress.
_TURN_S, _TURN_TOKENS = 1.0, 16


class Preemption:
    """Takes seats of sequences, which then wait at the front of the queue and compute again what
    they had. Each method returns those that lost their seat.
    """

    def __init__(self, sequences: OpenSequences):
        self._sequences = sequences
        self._seats = sequences.seats
        self._pages = sequences.pages
        self._queue = sequences.live.queue

    def for_pages(self, needy: list[Sequence], now: float) -> list[Sequence]:
        """Until there is a page for each decoding sequence that needs one.

        The first by `_keeping_order` never loses its seat, and alone it fits the pool (checked
        at admission): so it always goes on. Preempted sequences board before new ones, so that
        all are computed in the end.
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
        """Background sequences to preempt: as many as live ones lack seats, and the first of these
        pages.
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
        """Whether a waiting sequence lost its seat longer ago than a stream should stand still."""
        return seq.preemptions > 0 and now - seq.unseated_at >= _STALL_S

    def for_stalled(self, now: float) -> list[Sequence]:
        """For the sequence that lost its seat longest ago, if that is too long ago.

        In a pool full of answers that all have far to go none may end for seconds: then they take
        turns.
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
        """One of a tenant that has more than its share of the seats, which no seat is free for.

        Each sequence gives way once at most, and boards again before new ones.
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
    """Whether a seated sequence may give way to one that has stood still for too long."""
    return now - seq.sat_at >= _TURN_S and len(seq.tokens) - seq.sat_with >= _TURN_TOKENS


#: Background, class, no token yet, rows computed (negative), request, index.
type _Place = tuple[bool, float, bool, int, int, int]


def _keeping_order(seq: Sequence) -> _Place:
    """The order in which seated sequences keep their seats, the last one loses it first.

    Live sequences before those in the background; among these the first class before the last;
    streams that began before those that did not, whose clients see no stall; then those with most
    rows to compute again; then the oldest.
    """
    group, number, index = seq.rank
    return seq.background, group, seq.first_token_at is None, -seq.scheduled, number, index
