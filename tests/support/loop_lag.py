"""How long an event loop computes without coming round."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

#: Seconds between two looks.
_EVERY_S = 0.001


@dataclass
class Lag:
    """longest: seconds of its own thread's CPU between two looks, so that what else runs on the
    machine does not count.
    """

    longest: float = 0.0


@contextlib.asynccontextmanager
async def lag_of_loop() -> AsyncIterator[Lag]:
    """Measures while the block runs. What was there before is put aside for the collector, as a
    server does.
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
