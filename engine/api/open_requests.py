"""How many requests are open, and when none is: what a drain waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class OpenRequests:
    """Counts requests. Lives on one event loop."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def until_idle(self) -> None:
        """Returns when no request is open."""
        await self._idle.wait()

    @contextmanager
    def one(self) -> Iterator[None]:
        """One more, as long as this lasts."""
        self._count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._idle.set()
