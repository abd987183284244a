"""A limit of concurrent internal requests, which leaves room for those of clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from jitney.engine.server.http.server_context import ServerContext

#: Seconds between two checks whether an engine is ready.
_POLL_S = 0.5
#: Most requests of a key if keys have no limit.
_UNLIMITED = 1 << 30


class ConcurrencyLimit:
    """At most one request per seat at a time, and half of a key's limit of open sequences."""

    def __init__(self, context: ServerContext):
        self._context = context
        self._size = 0
        self._all = asyncio.Semaphore(0)
        self._of_key: dict[str, asyncio.Semaphore] = {}

    @asynccontextmanager
    async def slot(self, owner: str) -> AsyncIterator[None]:
        """Context of one request of a key."""
        await self.acquire(owner)
        try:
            yield
        finally:
            self.release(owner)

    async def acquire(self, owner: str) -> None:
        """Wait for a slot, to be given back by `release`."""
        while not self._grow():
            await asyncio.sleep(_POLL_S)
        of_key = self._semaphore(owner)
        await of_key.acquire()
        try:
            await self._all.acquire()
        except BaseException:
            of_key.release()
            raise

    def release(self, owner: str) -> None:
        self._all.release()
        self._of_key[owner].release()
        self._grow()

    def _grow(self) -> bool:
        """Adapt the number of slots to the seats; False while no engine is ready."""
        if self._context.unready() is not None:
            return False
        while self._size < self._context.internal_seats:
            self._size += 1
            self._all.release()
        return True

    def _semaphore(self, owner: str) -> asyncio.Semaphore:
        if owner not in self._of_key:
            allowed = self._context.most_of_key
            most = max(1, allowed // 2) if allowed else _UNLIMITED
            self._of_key[owner] = asyncio.Semaphore(most)
        return self._of_key[owner]
