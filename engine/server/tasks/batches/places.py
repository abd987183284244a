"""Places for the requests that we send ourselves, so that they do not crowd out everybody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from jitney.engine.server.tasks.batches.host import RequestHost

#: Seconds between two looks at whether an engine is there.
_LOOK_S = 0.5
#: Places of a key where keys have no limit: as many as there are.
_ALL = 1 << 30


class Places:
    """As many requests in flight as there are seats, and of one key at most half of what it may
    have open, so that its other requests find room.
    """

    def __init__(self, host: RequestHost):
        self._host = host
        self._count = 0
        self._all = asyncio.Semaphore(0)
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
        while not self._grow():
            await asyncio.sleep(_LOOK_S)
        own = self._of(owner)
        await own.acquire()
        try:
            await self._all.acquire()
        except BaseException:
            own.release()
            raise

    def release(self, owner: str) -> None:
        """Give a place back."""
        self._all.release()
        self._of_key[owner].release()
        self._grow()

    def _grow(self) -> bool:
        """Have as many places as there are seats now; False while nobody can answer. Where seats
        have gone, those that are left say that they are full, and requests try again.
        """
        if self._host.unready() is not None:
            return False
        while self._count < self._host.own_places:
            self._count += 1
            self._all.release()
        return True

    def _of(self, owner: str) -> asyncio.Semaphore:
        if owner not in self._of_key:
            allowed = self._host.most_of_key
            self._of_key[owner] = asyncio.Semaphore(max(1, allowed // 2) if allowed else _ALL)
        return self._of_key[owner]
