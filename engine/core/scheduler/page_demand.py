"""Whether the pages would last to the end of all seated sequences if more board.

Method: that of Past-Future scheduling (Gong et al., ASPLOS 2025, arXiv 2507.10150): board what the
pool can hold to the end, not what it can hold now. There lengths are drawn at random; here the
demand at each time to come is a sum of independent chances, of which mean and variance are known,
so that the same state always gives the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jitney.engine.core.scheduler.open_sequences import OpenSequences
from jitney.engine.core.scheduler.sequence import Sequence
from jitney.engine.core.scheduler.step_times import StepTimeEstimate

#: Standard deviations of the demand that are kept free beside its mean.
_MARGIN = 1.2
#: Times looked at, in steps from now: so many spread evenly in their logarithm, and so many at
#: which a sequence must end.
_TIMES, _ENDS = 16, 32


class PageDemand:
    """Predicts the pages that seated sequences and newcomers will hold."""

    def __init__(self, sequences: OpenSequences, step_times: StepTimeEstimate):
        self._sequences = sequences
        self._pages = sequences.pages
        self._lengths = sequences.lengths
        self._step_times = step_times
        # The sequence that was refused last, after how many departures.
        self._refused: tuple[Sequence | None, int] = (None, 0)

    def lasts(self, seq: Sequence, fresh: int) -> bool:
        """Whether the pool should last to the end of all seated sequences if one that needs so many
        fresh pages boards, too.

        Certainly if it lasts though all get as long as they may, or if no other is seated. Where it
        takes several to fill a larger bucket, only if it lasts for all of these. A sequence that
        was refused is judged again only after a departure: those seated only come to need more.
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
        """Whether so many have seats, and the pool should last beside those seated: the sequence,
        and those behind it. The background gives way to a live one.
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
        """Whether the pool should last if the newcomers board. newcomers: each with the pages that
        it needs now. yielding: seated, too, and gives way to all of these.

        Costs O(seated); to be asked only where the pages would not last if all got as long as they
        may.
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
        """[positions, pages of its own, positions still to come at most, pages of others, mean
        tokens of its answer] once its known tokens are computed.
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
        """(probability that it still runs, pages of its own then) of each row at each time, both
        f8 [rows, times].
        """
        positions, held, left, shared, mean = (rows[:, column : column + 1] for column in range(5))
        alive = np.where(times <= left, np.exp(-times / mean), 0.0)
        pages = np.ceil((positions + times) / self._pages.pool.page_size) - shared
        return alive, np.maximum(np.minimum(pages, self._pages.most_each), held)


def _own_pages(seq: Sequence) -> int:
    """Pages that a seated sequence shares with no other."""
    return len(seq.pages) - max(seq.shared, seq.dropped)


def _times_ahead(left: np.ndarray) -> np.ndarray:
    """Steps from now at which to look, ascending: now, then sparser and sparser, and when a
    sequence is at its limit.

    left: f8 [sequences]: steps until each one's limit.
    """
    longest = max(1.0, float(left.max()))
    ends = np.sort(left)
    chosen = np.unique(np.linspace(0, len(ends) - 1, min(_ENDS, len(ends))).astype(np.int64))
    spread = np.floor(np.geomspace(1.0, longest, _TIMES))
    return np.unique(np.concatenate(([0.0], spread, ends[chosen])))
