"""Files and batches as the routes and the server use them: opened when they are first asked for, or
at the start if an earlier server has left some.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from jitney.engine.common.errors import ConfigError, RequestError
from jitney.engine.server.http.errors import HttpError
from jitney.engine.server.http.quotas import Shares
from jitney.engine.server.http.routing import RouteTable
from jitney.engine.server.tasks.batches.execution import LineExecutor
from jitney.engine.server.tasks.batches.host import RequestHost
from jitney.engine.server.tasks.batches.keeper import StoreKeeper
from jitney.engine.server.tasks.batches.runner import BatchRunner
from jitney.engine.server.tasks.batches.store import StoreUnavailable
from jitney.engine.server.tasks.batches.webhooks import Deliveries, Webhooks

_log = logging.getLogger("jitney.api")

#: Uploads at a time, of all clients and of one.
_MOST_UPLOADS, _MOST_OF_CLIENT = 32, 8
_BATCH_ENDS = Deliveries("batches")


@dataclass(frozen=True, slots=True)
class _Open:
    """What there is once the folder is open."""

    keeper: StoreKeeper
    runner: BatchRunner
    webhooks: Webhooks
    delivering: asyncio.Task[None]


class Batches:
    """One server's files and batches."""

    def __init__(self, host: RequestHost, table: RouteTable, others: Sequence[Deliveries] = ()):
        """others: what is told to URLs beside the ends of batches."""
        self._host = host
        self._queues = (_BATCH_ENDS, *others)
        self.executor = LineExecutor(host, table, background=True)
        self._opening = asyncio.Lock()
        self._parts: _Open | None = None
        self._stopped = False
        self._uploads = 0
        self._shares = Shares(_MOST_OF_CLIENT, "uploads", "rate_limit")

    async def start(self) -> None:
        """Go on with what an earlier server has left; what is wrong with its folder is logged."""
        folder = self._host.settings.data_dir
        if folder is None or not await asyncio.to_thread(StoreKeeper.has_kept, folder):
            return
        try:
            await self._opened()
        except HttpError as error:
            _log.warning("BATCHES DO NOT GO ON: %s", error)

    async def keeper(self) -> StoreKeeper:
        """The files, and what is known of batches. Raises HttpError 503."""
        return (await self._opened()).keeper

    async def runner(self) -> BatchRunner:
        return (await self._opened()).runner

    async def webhooks(self) -> Webhooks:
        return (await self._opened()).webhooks

    @property
    def is_open(self) -> bool:
        """An earlier server has left something, or somebody has asked for it since."""
        return self._parts is not None

    def stop(self) -> None:
        """The server is about to stop: the lines in flight are given up, and are taken up again at
        its next start.
        """
        self._stopped = True
        if self._parts is not None:
            self._parts.runner.stop()

    async def close(self) -> None:
        self.stop()
        async with self._opening:
            parts, self._parts = self._parts, None
        if parts is not None:
            parts.delivering.cancel()
            await asyncio.gather(parts.runner.stopped(), parts.delivering, return_exceptions=True)
            await parts.keeper.close()

    @asynccontextmanager
    async def uploading(self, client: str) -> AsyncIterator[None]:
        """Lasts as long as an upload. Raises RequestError busy if too many are under way, and
        HttpError 429 if too many are this client's.
        """
        if self._uploads >= _MOST_UPLOADS:
            raise RequestError(f"{_MOST_UPLOADS} uploads are under way already", code="busy")
        self._uploads += 1
        try:
            with self._shares.one_of(client):
                yield
        finally:
            self._uploads -= 1

    async def _opened(self) -> _Open:
        async with self._opening:
            if self._parts is None:
                self._parts = await self._open()
            return self._parts

    async def _open(self) -> _Open:
        folder = self._host.settings.data_dir
        if folder is None or self._stopped:
            raise _unavailable("this server keeps no files")
        keeper = await _open_folder(folder)
        try:
            return await self._begun(keeper)
        except BaseException:
            await keeper.close()
            raise

    async def _begun(self, keeper: StoreKeeper) -> _Open:
        """Go on with what the folder has."""
        webhooks = Webhooks(keeper, lambda: self._host.settings, self._queues)
        runner = BatchRunner(self._host, keeper, self.executor, webhooks.wake)
        await runner.start()
        return _Open(keeper, runner, webhooks, asyncio.create_task(webhooks.run()))


async def _open_folder(folder: Path) -> StoreKeeper:
    try:
        return await StoreKeeper.open(folder)
    except ConfigError as error:
        _log.warning("files cannot be kept: %s", error)
        raise _unavailable("files cannot be kept now; the server's log says why") from None
    except OSError as error:
        _log.warning("files cannot be kept in %s: %s", folder, error)
        raise StoreUnavailable from None


def _unavailable(message: str) -> HttpError:
    return HttpError(503, message, code="no_store")
