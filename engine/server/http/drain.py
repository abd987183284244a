"""Waiting for open requests when the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def drain_status(
    drained: Coroutine[Any, Any, None], signals: asyncio.Queue[int], limit: float
) -> int:
    """Exit status once all are answered (0), `limit` seconds passed (1), or a second signal came
    (128 and its number). New requests are refused meanwhile, and do not count.
    """
    done = asyncio.create_task(drained)
    again = asyncio.create_task(signals.get())
    await asyncio.wait((done, again), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    for task in (done, again):
        task.cancel()
    await asyncio.wait((done, again))
    if not again.cancelled():
        return 128 + again.result()
    return 1 if done.cancelled() else 0
