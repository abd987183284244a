"""Measures how long an event loop is blocked by computation."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

#: Seconds between two checks.
_EVERY_S = 0.001


@dataclass
class Lag:
    """The lag of a loop. longest: most CPU seconds of the loop's thread between two checks, so that
    other work on the machine does not count.
    """

    longest: float = 0.0


@contextlib.asynccontextmanager
async def lag_of_loop() -> AsyncIterator[Lag]:
    """Measure the lag while the block runs. Earlier objects are frozen for the garbage collector,
    as in a server.
    """
    lag = Lag()

    async def watch() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(_EVERY_S)
            lag.longest = max(lag.longest, time.thread_time() - before)

    gc.collect()
    gc.freeze()
    watching = asyncio.create_task(watch())
    await asyncio.sleep(2 * _EVERY_S)
    try:
        yield lag
        await asyncio.sleep(2 * _EVERY_S)
    finally:
        watching.cancel()
        gc.unfreeze()
