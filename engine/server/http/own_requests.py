"""The requests that a server sends itself: lines of batches, and jobs. They begin and end with it,
and lie in one store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from jitney.engine.server.http.routing import RouteTable
from jitney.engine.server.tasks.batches.host import RequestHost
from jitney.engine.server.tasks.batches.service import Batches
from jitney.engine.server.tasks.jobs.service import Jobs
from jitney.engine.server.tasks.jobs.table import JOBS


class OwnRequests:
    """Those of one server. table: the routes that answer them."""

    def __init__(self, host: RequestHost, table: RouteTable):
        self.batches = Batches(host, table, [JOBS])
        self.jobs = Jobs(host, table, self.batches)

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """The server's time: what an earlier one has left goes on, and all is let go at the end."""
        await self.batches.start()
        await self.jobs.start()
        yield
        await self.jobs.close()
        await self.batches.close()

    async def cancel_of(self, owners: Collection[str]) -> tuple[int, int]:
        """Cancel what was left by keys, by digest, that are not accepted any more. -> (jobs,
        batches). Raises HttpError 503.
        """
        if not owners or not self.batches.is_open:
            return 0, 0
        jobs, batches = await self.jobs.runner(), await self.batches.runner()
        return await jobs.cancel_of(owners), await batches.cancel_of(owners)

    def stop(self) -> None:
        """The server is about to stop: what is being computed is given up, and is taken up again at
        its next start.
        """
        self.jobs.stop()
        self.batches.stop()
