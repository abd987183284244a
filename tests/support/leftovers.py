"""Counts objects that only a full garbage collection frees."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage(*rooms: str) -> Iterator[Counter[str]]:
    """Yields a counter that is filled at the end of the block with the types of objects left in
    reference cycles since its beginning. rooms: packages whose types count.
    """
    gc.collect()
    gc.disable()
    counts: Counter[str] = Counter()
    try:
        yield counts
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        for thing in gc.garbage:
            if type(thing).__module__.split(".")[0] in rooms:
                counts[type(thing).__qualname__] += 1
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
