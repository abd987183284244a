"""Work that is cancelled when its client leaves or the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import Receive


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`, cancelling it if the client leaves first (True). Raises its errors. Starlette
    notices that only in some responses, and never while a request waits.
    """
    return await until(_disconnected(receive), work)


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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
