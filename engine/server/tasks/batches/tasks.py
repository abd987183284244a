"""Work that goes on until it is done: a task for each batch or job that is not over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from jitney.engine.server.tasks.batches.store import StoreUnavailable

_log = logging.getLogger("jitney.api")

#: Seconds before what could not be worked on is taken up again.
_AGAIN_S = 10.0


class Tasks:
    """Tasks by the id of what they work on. All live on one event loop."""

    def __init__(self, on_left: Callable[[str], None]):
        """on_left is called with an id whose task runs no more, for whatever reason."""
        self._on_left = on_left
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.is_stopped = False

    def __contains__(self, id: str) -> bool:
        return id in self._tasks

    def begin(self, id: str, work: Callable[[], Awaitable[None]]) -> None:
        """Work on it, unless that is being done. What cannot be done now, a full disk perhaps, is
        tried again.
        """
        if self.is_stopped or id in self._tasks:
            return
        task = asyncio.create_task(_until_done(id, work))
        self._tasks[id] = task
        # Not a `finally` in the task: one that is cancelled before its first turn never enters it.
        task.add_done_callback(lambda _: self._left(id))

    def cancel(self, id: str) -> None:
        """Give up work on it, if there is any."""
        task = self._tasks.get(id)
        if task is not None:
            task.cancel()

    def stop(self) -> None:
        """Give up all of it; nothing new is begun."""
        self.is_stopped = True
        for task in self._tasks.values():
            task.cancel()

    async def stopped(self) -> None:
        """Wait until nothing runs any more, after `stop`."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _left(self, id: str) -> None:
        del self._tasks[id]
        self._on_left(id)


async def _until_done(id: str, work: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            return await work()
        except* StoreUnavailable:
            pass  # has been logged
        except* Exception:
            _log.exception("%s could not be worked on; it is tried again", id)
        await asyncio.sleep(_AGAIN_S)
