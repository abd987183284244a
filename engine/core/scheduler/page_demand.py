"""Whether the pages last until all seated sequences have ended if more board.

Method: that of Past-Future scheduling (Gong et al., ASPLOS 2025, arXiv 2507.10150): board whom the
pool can take to the end, not whom it can take now. There lengths are drawn at random; here the
demand at each time to come is a sum of independent chances, of which mean and variance are known,
so that the same state always gives the same answer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import numpy as np

from jitney.engine.core.scheduler.kv_pages import PagePool
from jitney.engine.core.scheduler.lengths import LengthEstimate
from jitney.engine.core.scheduler.sequence import Sequence

#: Standard deviations of the demand that are kept free beside its mean.
_MARGIN = 1.2
#: Times looked at, in steps from now: so many spread evenly in their logarithm, and so many at
#: which somebody must end.
_TIMES, _ENDS = 16, 32


class PageDemand:
    """Answers `fits`. lengths: what is known about answers. most_each: pages of one at most while
    it decodes.
    """

    def __init__(self, pool: PagePool, lengths: LengthEstimate, most_each: int = sys.maxsize):
        self.pool, self.lengths, self.most_each = pool, lengths, most_each

    def fits(
        self,
        riders: Iterable[Sequence],
        newcomers: Iterable[tuple[Sequence, int]],
        yielding: Iterable[Sequence] = (),
    ) -> bool:
        """Whether the pool should last if the newcomers ride with the riders. newcomers: each with
        the pages that it needs now. yielding: who rides too, and gives way to all of these.

        Costs O(riders); to be asked only where the pages would not last if everybody took all that
        it may.
        """
        own = 0
        found: list[list[float]] = []
        for seq in riders:
            held = _own_pages(seq)
            own += held
            found.append(self._row(seq, held))
        own += sum(map(_own_pages, yielding))
        found += [self._row(newcomer, fresh) for newcomer, fresh in newcomers]
        room = self.pool.capacity - (self.pool.used - own)
        rows = np.array(found, np.float64)
        times = _times_ahead(rows[:, 2])
        alive, pages = self._ahead(rows, times)
        mean = (alive * pages).sum(axis=0)
        variance = (alive * (1 - alive) * pages * pages).sum(axis=0)
        return bool((mean + _MARGIN * np.sqrt(variance) <= room).all())

    def _row(self, seq: Sequence, held: int) -> list[float]:
        """[positions, pages of its own, positions still to come at most, pages of others, mean
        tokens of its answer] once its known tokens are computed.
        """
        seq.counted = self.lengths.progress(seq.kind, seq.counted, seq.n_output)
        positions = max(seq.scheduled, len(seq.tokens))
        shared = self.pool.pages_for(len(seq.tokens)) - held if not seq.seated else seq.shared
        return [
            positions,
            held,
            max(0, seq.limit - 1 - positions),
            shared,
            self.lengths.careful(seq.kind),
        ]

    def _ahead(self, rows: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(probability that it still runs, pages of its own then) of each row at each time, both
        f8 [rows, times].
        """
        positions, held, left, shared, mean = (rows[:, column : column + 1] for column in range(5))
        alive = np.where(times <= left, np.exp(-times / mean), 0.0)
        pages = np.ceil((positions + times) / self.pool.page_size) - shared
        return alive, np.maximum(np.minimum(pages, self.most_each), held)


def _own_pages(seq: Sequence) -> int:
    """Pages of a seated sequence that are nobody else's."""
    return len(seq.pages) - max(seq.shared, seq.dropped)


def _times_ahead(left: np.ndarray) -> np.ndarray:
    """Steps from now at which to look, ascending: now, then sparser and sparser, and when somebody
    is at its limit.

    left: f8 [riders]: steps until each one's limit.
    """
    longest = max(1.0, float(left.max()))
    ends = np.sort(left)
    chosen = np.unique(np.linspace(0, len(ends) - 1, min(_ENDS, len(ends))).astype(np.int64))
    spread = np.floor(np.geomspace(1.0, longest, _TIMES))
    return np.unique(np.concatenate(([0.0], spread, ends[chosen])))
