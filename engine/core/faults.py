"""Isolates the sequence that makes a step fail."""

from __future__ import annotations

from collections import deque

from jitney.engine.core.scheduler.plan import Plan
from jitney.engine.core.scheduler.sequence import Sequence


class StepBlame:
    """The sequences of a failed step, until it is known which of them made it fail.

    Each is computed alone: all its tokens again in prompt steps, then one decode row. If that fails
    too, the sequence is to blame and the others are cleared; otherwise the next one is tried.
    """

    def __init__(self) -> None:
        self._waiting: deque[Sequence] = deque()

    def __bool__(self) -> bool:
        return self.first is not None

    @property
    def first(self) -> Sequence | None:
        """The sequence that is tried next; None without suspects. Ended sequences are dropped."""
        waiting = self._waiting
        while waiting and waiting[0].finish is not None:
            waiting.popleft()
        return waiting[0] if waiting else None

    def accuse(self, plan: Plan) -> None:
        """Suspect all sequences of a failed step, the last to board first."""
        open_ones = [chunk.seq for chunk in plan.chunks if chunk.seq.finish is None]
        members = list(dict.fromkeys(open_ones))  # drafts have rows of their own
        members.sort(key=lambda seq: seq.sat_at)
        self._waiting = deque(reversed(members))

    def on_trial(self, plan: Plan) -> Sequence | None:
        """The suspected sequence that was computed alone in this step."""
        if self._waiting and plan.chunks[0].seq is self._waiting[0]:
            return self._waiting[0]
        return None

    def acquit(self) -> None:
        """Drop the first suspect, which was computed without a failure."""
        self._waiting.popleft()

    def clear(self) -> None:
        """Drop all suspects: the sequence to blame is found."""
        self._waiting.clear()
