"""Places for the requests that we send ourselves, so that they do not crowd out everybody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from jitney.engine.api.service import Service

#: Seconds between two looks at whether the engine is there.
_LOOK_S = 0.5


class Places:
    """As many requests in flight as the engine has seats, and of one key at most half of what it
    may have open, so that its other requests find room.
    """

    def __init__(self, service: Service):
        self._service = service
        self._seats = 0
        self._all: asyncio.Semaphore | None = None
        self._of_key: dict[str, asyncio.Semaphore] = {}

    @asynccontextmanager
    async def taken(self, owner: str) -> AsyncIterator[None]:
        """Wait for a place of this key's, and keep it."""
        await self.acquire(owner)
        try:
            yield
        finally:
            self.release(owner)

    async def acquire(self, owner: str) -> None:
        """Wait for a place, which is to be given back with `release`."""
        places = await self._of_all()
        own = self._of(owner)
        await own.acquire()
        try:
            await places.acquire()
        except BaseException:
            own.release()
            raise

    def release(self, owner: str) -> None:
        """Give a place back."""
        assert self._all is not None
        self._all.release()
        self._of_key[owner].release()

    async def _of_all(self) -> asyncio.Semaphore:
        """Known once the engine is."""
        while self._service.unready() is not None:
            await asyncio.sleep(_LOOK_S)
        if self._all is None:
            info, _ = self._service.ready()
            self._seats = info.seats
            self._all = asyncio.Semaphore(info.seats)
        return self._all

    def _of(self, owner: str) -> asyncio.Semaphore:
        if owner not in self._of_key:
            allowed = self._service.quotas.max_concurrent
            most = max(1, allowed // 2) if allowed else self._seats
            self._of_key[owner] = asyncio.Semaphore(most)
        return self._of_key[owner]
