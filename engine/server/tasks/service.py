"""The batches and jobs of one server: store, runner, webhooks. Opened at the first use, or at the
start if the folder has some.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request

from jitney.engine.common.database import StoreUnavailable
from jitney.engine.common.errors import ConfigError, RequestError
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.errors import HttpError
from jitney.engine.server.http.quotas import Shares
from jitney.engine.server.http.routing import RouteTable
from jitney.engine.server.http.server_context import ServerContext
from jitney.engine.server.tasks.execution import generating_route
from jitney.engine.server.tasks.keeper import StoreKeeper
from jitney.engine.server.tasks.records import Batch, Job, StoredFile, Task
from jitney.engine.server.tasks.store import Record, TaskStore

if TYPE_CHECKING:
    from jitney.engine.server.tasks.runner import TaskRunner

_log = logging.getLogger("jitney.api")

#: Most concurrent uploads of all clients, and of one.
_MOST_UPLOADS, _MOST_OF_CLIENT = 32, 8


@dataclass(frozen=True, slots=True)
class _Open:
    """Parts that exist while the folder is open."""

    keeper: StoreKeeper
    runner: TaskRunner
    sending: asyncio.Task[None]


class InternalRequests:
    """Batches and jobs, whose requests the server sends itself. table: the routes that answer
    them.
    """

    def __init__(self, context: ServerContext, table: RouteTable):
        self._context = context
        self._table = table
        self._opening = asyncio.Lock()
        self._open: _Open | None = None
        self._stopped = False
        self._uploads = 0
        self._shares = Shares(_MOST_OF_CLIENT, "uploads", "rate_limit")

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Context of the server's life: continues stored tasks at first, and stops them at the
        end.
        """
        folder = self._context.settings.data_dir
        if folder is not None and await asyncio.to_thread(StoreKeeper.has_kept, folder):
            try:
                await self._opened()
            except (HttpError, StoreUnavailable) as error:
                _log.warning("batches and jobs of an earlier server do not go on: %s", error)
        yield
        await self.close()

    @classmethod
    def of(cls, context: ServerContext) -> InternalRequests:
        """The internal requests of a server with an application."""
        assert context.internal_requests is not None
        return context.internal_requests

    async def keeper(self) -> StoreKeeper:
        """The store. Raises HttpError 503."""
        return (await self._opened()).keeper

    async def runner(self) -> TaskRunner:
        """Raises HttpError 503."""
        return (await self._opened()).runner

    def check_endpoint(self, path: str) -> None:
        """Raise RequestError unless batches and jobs may use this route."""
        generating_route(self._table, path, "endpoint")

    async def find_or_404[R: Record](self, request: Request, kind: type[R]) -> R:
        """The record `{kind}_id` of a path. Raises HttpError 404 if absent or another key's."""
        id = request.path_params[f"{kind.KIND}_id"]
        return await self._find(kind, id, Context.of(request).tenant)

    async def _find[R: Record](self, kind: type[R], id: str, owner: str | None) -> R:
        """The record of an owner (None: of any). Raises HttpError 404."""
        keeper = await self.keeper()
        record = await keeper.do(TaskStore.find, kind, id, owner)
        if record is None:
            param = f"{kind.KIND}_id"
            raise HttpError.missing(kind.KIND, id, param=param)
        return record

    async def cancelled(self, task: Task) -> Task:
        """Cancel a batch or job; returns its new state. Raises HttpError 400 if it had ended."""
        runner = await self.runner()
        await runner.cancel(task)
        kind = Batch if isinstance(task, Batch) else Job
        task = await self._find(kind, task.id, task.owner)
        if task.status not in ("cancelling", "cancelled"):
            message = f"{task.KIND} {task.id} is {task.status} and cannot be cancelled"
            raise HttpError(400, message, code=f"{task.KIND}_ended")
        return task

    async def cancel_by_id(self, id: str, owner: str | None) -> None:
        """Cancel a batch or job of an owner (None: any). Raises HttpError 404, 400 if over."""
        kind = Batch if id.startswith(Batch.ID_PREFIX) else Job
        await self.cancelled(await self._find(kind, id, owner))

    async def newest(self, owner: str | None, limit: int) -> dict[str, list[Record]]:
        """The newest batches, jobs and files of an owner (None: of all), by table; empty without a
        store. Raises StoreUnavailable.
        """
        kinds: tuple[type[Record], ...] = (Batch, Job, StoredFile)
        records: dict[str, list[Record]] = {kind.TABLE: [] for kind in kinds}
        if self._open is not None:
            for kind in kinds:
                page = await self._open.keeper.do(TaskStore.page, kind, owner, limit=limit)
                records[kind.TABLE] = page[0]
        return records

    async def cancel_of(self, owners: Collection[str]) -> tuple[int, int]:
        """Cancel the tasks of removed keys. Returns (jobs, batches). Raises HttpError 503."""
        if not owners or self._open is None:
            return 0, 0
        cancelled = await self._open.runner.cancel_of(owners)
        return cancelled[Job], cancelled[Batch]

    def stop(self) -> None:
        """Stop all work; the next start continues it."""
        self._stopped = True
        if self._open is not None:
            self._open.runner.stop()

    async def close(self) -> None:
        """Stop, and close the store."""
        self.stop()
        async with self._opening:
            parts, self._open = self._open, None
        if parts is not None:
            parts.sending.cancel()
            await asyncio.gather(parts.runner.stopped(), parts.sending, return_exceptions=True)
            await parts.keeper.close()

    @asynccontextmanager
    async def uploading(self, client: str) -> AsyncIterator[None]:
        """Context of an upload. Raises RequestError busy (server), HttpError 429 (this client)."""
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
            if self._open is None:
                folder = self._context.settings.data_dir
                if folder is None or self._stopped:
                    raise _unavailable("this server keeps no files")
                keeper = await self._open_folder(folder)
                try:
                    self._open = await self._begun(keeper)
                except BaseException:
                    await keeper.close()
                    raise
            return self._open

    async def _open_folder(self, folder: Path) -> StoreKeeper:
        try:
            return await StoreKeeper.open(folder, partial(self._context.trouble, "store"))
        except ConfigError as error:
            _log.warning("files cannot be kept: %s", error)
            raise _unavailable("files cannot be kept now; the server's log says why") from None
        except OSError as error:
            _log.warning("files cannot be kept in %s: %s", folder, error)
            raise StoreUnavailable from None

    async def _begun(self, keeper: StoreKeeper) -> _Open:
        """Continue the tasks of the folder."""
        # Imported here: only servers with files, batches or jobs need it.
        from jitney.engine.server.tasks.runner import TaskRunner
        from jitney.engine.server.tasks.webhooks import Webhooks

        webhooks = Webhooks(keeper, self._context)
        runner = TaskRunner(self._context, self._table, keeper, webhooks.wake)
        await runner.start()
        return _Open(keeper, runner, asyncio.create_task(webhooks.run()))


def _unavailable(message: str) -> HttpError:
    return HttpError(503, message, code="no_store")
