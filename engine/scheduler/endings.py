"""When the seats that are taken should come free: how many of their answers still run after so many
steps, by the life tables of their classes.

The answer that ends first of 32 is not the one with the shortest mean rest: lengths scatter, so
some answer ends soon even if each is expected to run on for long, and one that is past what was
expected of it is not about to end for that reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from jitney.engine.scheduler.estimates import EDGES, OutputLengths
from jitney.engine.scheduler.sequence import Sequence

#: Below this share of a class, nothing is known about those who got so far: they end at once.
_LEAST_ALIVE = 1e-12


class Endings:
    """What is foreseen of some running answers, each one token further with each step.

    Takes some microseconds for each class among them, and less for each answer.
    """

    def __init__(self, running: Iterable[Sequence], lengths: OutputLengths):
        by_kind = defaultdict[object, list[Sequence]](list)
        for seq in running:
            by_kind[seq.kind].append(seq)
        #: Answers that run now.
        self.n = sum(map(len, by_kind.values()))
        longest = max((_most_left(seq) for same in by_kind.values() for seq in same), default=1)
        #: Steps from now, rising from 0 to where the last one ends by length, f8 [T].
        self._steps = np.append(
            EDGES[: np.searchsorted(EDGES, longest - 1)], (longest - 1, longest)
        )
        #: How many should still run then, falling from n to 0, f8 [T].
        self._running = np.zeros(len(self._steps))
        for same in by_kind.values():
            self._add(same, lengths)

    def _add(self, same: list[Sequence], lengths: OutputLengths) -> None:
        """Count answers of one class."""
        outlook = lengths.likely(same[0].kind)
        so_far = np.array([seq.n_output for seq in same], np.float64)
        most_left = np.array([_most_left(seq) for seq in same], np.float64)
        steps = self._steps[:, None]
        share = outlook.reaches(so_far + steps) / np.maximum(outlook.reaches(so_far), _LEAST_ALIVE)
        self._running += np.where(steps < most_left, share, 0.0).sum(axis=1)

    def steps_until(self, n: int) -> float:
        """Steps until so many of them, 1 to all, should have ended; at least 1.

        Were lengths memoryless, the n-th of N would end on average when about n - n/2N are expected
        to have ended; that is taken for all.
        """
        ended = n * (1 - 0.5 / self.n)
        # A rising x for the interpolation: from the end to now.
        steps = np.interp(self.n - ended, self._running[::-1], self._steps[::-1])
        return max(1.0, float(steps))

    @property
    def tokens(self) -> float:
        """Tokens that all of them together should still generate."""
        return float(np.trapezoid(self._running, self._steps))


def _most_left(seq: Sequence) -> int:
    """Tokens after which it ends by length, at least 1."""
    return max(1, seq.limit - seq.n_prompt - seq.n_output)
