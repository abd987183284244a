"""Page demand: predicts whether the pages last to the end of all seated sequences if more board.

The method is that of Past-Future scheduling (Gong et al., ASPLOS 2025, arXiv 2507.10150): board the
sequences that the pool can hold to their end, not those that it can hold now. The paper draws
lengths at random; here the demand at each future time is a sum of independent random variables with
known mean and variance, so that the same state always gives the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jitney.engine.core.scheduler.open_sequences import OpenSequences
from jitney.engine.core.scheduler.sequence import Sequence
from jitney.engine.core.scheduler.step_times import StepTimeEstimate

#: Pages kept free above the mean demand, in standard deviations of the demand.
_MARGIN = 1.2
#: Number of future times to check: this many spread evenly on a log scale, and this many at which a
#: sequence must end.
_TIMES, _ENDS = 16, 32


class PageDemand:
    """Predicts the pages that seated sequences and newcomers will hold."""

    def __init__(self, sequences: OpenSequences, step_times: StepTimeEstimate):
        self._sequences = sequences
        self._pages = sequences.pages
        self._lengths = sequences.lengths
        self._step_times = step_times
        # The sequence that was refused last, and the number of departures then.
        self._refused: tuple[Sequence | None, int] = (None, 0)

    def lasts(self, seq: Sequence, fresh: int) -> bool:
        """Whether the pool should last to the end of all seated sequences if `seq` boards too.
        fresh: number of new pages that it needs.

        This is certain if the pool lasts with all at their full lengths, or if no other sequence is
        seated. If several sequences must join to fill a larger bucket, the pool must last for all
        of them. A refused sequence is judged again only after a departure, because until then the
        seated ones only need more.
        """
        seats, most_held = self._sequences.seats, self._pages.most_held
        n_seated, most = seats.n_live, most_held[False]
        if seq.background:
            n_seated += seats.n_background
            most += most_held[True]
        if not n_seated or most + self._pages.most_of(seq) <= self._pages.pool.capacity:
            return True
        if self._refused == (seq, seats.departures):
            return False
        needed = self._step_times.needed_to_pay(n_seated)
        if needed is not None and self._last_for(seq, fresh, needed):
            return True
        self._refused = seq, seats.departures
        return False

    def _last_for(self, seq: Sequence, fresh: int, count: int) -> bool:
        """Whether there are seats for `count` sequences, `seq` and those behind it in the queue,
        and the pool should last if they board. Background sequences give way to a live one.
        """
        seats = self._sequences.seats
        queue = self._sequences.class_of(seq).queue
        others = queue.following(seq, count - 1) if count > 1 else []
        if len(others) < count - 1 or count > len(seats.free):
            return False
        newcomers = [(seq, fresh)]
        pages_for = self._pages.pool.pages_for
        newcomers += [(other, pages_for(len(other.tokens))) for other in others]
        seated, yielding = seats.taken, list[Sequence]()
        if not seq.background and seats.n_background:
            yielding = [other for other in seated if other.background]
            seated = [other for other in seated if not other.background]
        return self.fits(seated, newcomers, yielding)

    def fits(
        self,
        seated: Iterable[Sequence],
        newcomers: Iterable[tuple[Sequence, int]],
        yielding: Iterable[Sequence] = (),
    ) -> bool:
        """Whether the pool should last if the newcomers board. newcomers: each with the number of
        pages that it needs now. yielding: seated sequences that give way to all others.

        Costs O(seated); call it only if the pages would not last with all at their full lengths.
        """
        own = 0
        figures: list[list[float]] = []
        for seq in seated:
            held = _own_pages(seq)
            own += held
            figures.append(self._row(seq, held))
        own += sum(map(_own_pages, yielding))
        figures += [self._row(newcomer, fresh) for newcomer, fresh in newcomers]
        room = self._pages.pool.capacity - (self._pages.pool.used - own)
        rows = np.array(figures, np.float64)
        times = _times_ahead(rows[:, 2])
        alive, pages = self._ahead(rows, times)
        mean = (alive * pages).sum(axis=0)
        variance = (alive * (1 - alive) * pages * pages).sum(axis=0)
        return bool((mean + _MARGIN * np.sqrt(variance) <= room).all())

    def _row(self, seq: Sequence, held: int) -> list[float]:
        """[positions, own pages, most further positions, pages shared with others, expected tokens
        of its answer] of a sequence once its known tokens are computed.
        """
        seq.counted = self._lengths.progress(seq.kind, seq.counted, seq.n_output)
        positions = max(seq.scheduled, len(seq.tokens))
        shared = (
            self._pages.pool.pages_for(len(seq.tokens)) - held if not seq.seated else seq.shared
        )
        return [
            positions,
            held,
            max(0, seq.limit - 1 - positions),
            shared,
            self._lengths.careful(seq.kind),
        ]

    def _ahead(self, rows: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(probability that the sequence still runs, its own pages then) for each row and time,
        both float64 [rows, times].
        """
        positions, held, left, shared, mean = (rows[:, column : column + 1] for column in range(5))
        alive = np.where(times <= left, np.exp(-times / mean), 0.0)
        pages = np.ceil((positions + times) / self._pages.pool.page_size) - shared
        return alive, np.maximum(np.minimum(pages, self._pages.most_each), held)


def _own_pages(seq: Sequence) -> int:
    """Number of pages that a seated sequence shares with no other."""
    return len(seq.pages) - max(seq.shared, seq.dropped)


def _times_ahead(left: np.ndarray) -> np.ndarray:
    """The future times to check, in steps from now, ascending: now, then at growing distances, and
    when a sequence reaches its limit.

    left: float64 [sequences], steps until each one's limit.
    """
    longest = max(1.0, float(left.max()))
    ends = np.sort(left)
    chosen = np.unique(np.linspace(0, len(ends) - 1, min(_ENDS, len(ends))).astype(np.int64))
    spread = np.floor(np.geomspace(1.0, longest, _TIMES))
    return np.unique(np.concatenate(([0.0], spread, ends[chosen])))
