"""A count of open requests: bounds how many are read, and tells a drain when none is left."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class OpenRequests:
    """Counts requests. Lives on one event loop."""

    def __init__(self) -> None:
        self._count = 0
        self._by_tenant = Counter[str]()
        self._idle = asyncio.Event()
        self._idle.set()

    async def until_idle(self) -> None:
        """Returns when no request is open."""
        await self._idle.wait()

    def are_too_many(self, tenant: str, most: int) -> bool:
        """Whether a tenant's next request is refused unread. most: requests that fill seats and
        queue. Tenants below an equal share of the open requests are refused from twice `most` on.
        """
        if self._count < most:
            return False
        share = self._count / len(self._by_tenant.keys() | {tenant})
        return self._count >= 2 * most or self._by_tenant[tenant] >= share

    @contextmanager
    def one(self, tenant: str = "") -> Iterator[None]:
        """Count one more request of a tenant within the context."""
        self._count += 1
        self._by_tenant[tenant] += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            self._by_tenant[tenant] -= 1
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]
            if not self._count:
                self._idle.set()
