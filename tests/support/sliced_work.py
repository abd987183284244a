"""Work that is made in slices, run in one go."""

from __future__ import annotations

from jitney.engine.server.http.slices import Work


def at_once[T](work: Work[T]) -> T:
    """Run `work` to its end, where nobody is kept waiting."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value
