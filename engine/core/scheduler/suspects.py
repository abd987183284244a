"""After a step has failed: whose fault was it?"""

from __future__ import annotations

from collections import deque

from jitney.engine.core.scheduler.plan import Plan
from jitney.engine.core.scheduler.sequence import Sequence


class Suspects:
    """The sequences of a step that failed, until it is known which of them made it fail.

    Each is computed alone: all its tokens again in prompt steps, and then one decode row. If that
    fails too it is guilty, and nobody else is suspected any more; who passes waits for the others'
    trials.
    """

    def __init__(self) -> None:
        self._waiting: deque[Sequence] = deque()

    def __bool__(self) -> bool:
        return self.first is not None

    @property
    def first(self) -> Sequence | None:
        """Whose trial it is; None if nobody is suspected. Who has ended meanwhile is passed
        over.
        """
        waiting = self._waiting
        while waiting and waiting[0].finish is not None:
            waiting.popleft()
        return waiting[0] if waiting else None

    def accuse(self, plan: Plan) -> None:
        """All sequences of a step that failed, whoever boarded last first."""
        members = [chunk.seq for chunk in plan.chunks if chunk.seq.finish is None]
        members.sort(key=_sat_at)
        self._waiting = deque(reversed(members))

    def on_trial(self, plan: Plan) -> Sequence | None:
        """Whose trial this step was part of."""
        if self._waiting and plan.chunks[0].seq is self._waiting[0]:
            return self._waiting[0]
        return None

    def acquit(self) -> None:
        """The first one has passed."""
        self._waiting.popleft()

    def clear(self) -> None:
        """The guilty one is found."""
        self._waiting.clear()


def _sat_at(seq: Sequence) -> float:
    return seq.sat_at
