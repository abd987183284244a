"""Tasks that run beside other work, and end with it."""

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
