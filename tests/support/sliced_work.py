"""Runs sliced work to its end at once."""

from __future__ import annotations

from jitney.engine.common.slices import Work


def at_once[T](work: Work[T]) -> T:
    """Run `work` to its end, if no other work waits, and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value
