"""Jobs as the routes and the server use them. They lie in the store of batches."""

from __future__ import annotations

import asyncio

from jitney.engine.api.batches.execution import LineExecutor
from jitney.engine.api.batches.host import RequestHost
from jitney.engine.api.batches.keeper import StoreKeeper
from jitney.engine.api.batches.service import Batches
from jitney.engine.api.jobs.runner import JobRunner
from jitney.engine.api.routing import RouteTable


class Jobs:
    """One server's jobs."""

    def __init__(self, host: RequestHost, table: RouteTable, batches: Batches):
        self._host = host
        self._batches = batches
        self.executor = LineExecutor(host, table, background=False)
        self._opening = asyncio.Lock()
        self._runner: JobRunner | None = None

    async def start(self) -> None:
        """Go on with what an earlier server has left. After the start of batches."""
        if self._batches.is_open:
            await self.runner()

    async def keeper(self) -> StoreKeeper:
        """What is known of jobs. Raises HttpError 503."""
        return await self._batches.keeper()

    async def runner(self) -> JobRunner:
        """Works on jobs. Raises HttpError 503."""
        async with self._opening:
            if self._runner is None:
                keeper, webhooks = await self._batches.keeper(), await self._batches.webhooks()
                runner = JobRunner(self._host, keeper, self.executor, webhooks.wake)
                await runner.start()
                self._runner = runner
            return self._runner

    def stop(self) -> None:
        """The server is about to stop: what is being computed is given up, and is taken up again at
        its next start.
        """
        if self._runner is not None:
            self._runner.stop()

    async def close(self) -> None:
        """Before batches are closed."""
        self.stop()
        if self._runner is not None:
            await self._runner.stopped()
