"""Tasks that run beside other work, and end with it; work that is cancelled when something ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def beside(*works: Coroutine[Any, Any, object]) -> AsyncIterator[list[asyncio.Task[object]]]:
    """The tasks of some work, which is cancelled when the context is left. Its errors are lost."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(end: Coroutine[Any, Any, object], work: Coroutine[Any, Any, object]) -> bool:
    """Run `work`, cancelling it if `end` comes first (True). Raises the errors of `work`."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(end)
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return True
        task.result()
        return False
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
        del task  # its error, on the way up, holds this frame
