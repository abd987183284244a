"""The work on one job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from jitney.engine.server.http.routing import RouteTable
from jitney.engine.server.tasks import job_rows
from jitney.engine.server.tasks.concurrency import ConcurrencyLimit
from jitney.engine.server.tasks.execution import LineExecutor, Reply
from jitney.engine.server.tasks.keeper import StoreKeeper
from jitney.engine.server.tasks.lines import LineRequest
from jitney.engine.server.tasks.records import Job
from jitney.engine.server.tasks.server_context import ServerContext
from jitney.engine.server.tasks.store import StorageFull


class JobWork:
    """Answers jobs, each try in a slot of the `ConcurrencyLimit`. A job that is refused for the
    moment waits without one: at a fleet, others may be for another model.
    """

    def __init__(
        self,
        context: ServerContext,
        table: RouteTable,
        keeper: StoreKeeper,
        on_change: Callable[[str], None],
    ):
        """on_change is called with the id of a job that begins."""
        self._keeper = keeper
        self._on_change = on_change
        self._executor = LineExecutor(context, table, background=False)
        self._limit = ConcurrencyLimit(context)
        #: Bytes that one key may have.
        self._most_bytes = context.settings.server.key_file_bytes

    async def run(self, job: Job) -> None:
        """One job to its end."""
        status, reply = "expired", None
        try:
            async with asyncio.timeout(max(0.0, job.expires_at - time.time())):
                read, slot = partial(self._begin, job), partial(self._limit.slot, job.owner)
                reply = await self._executor.answer(read, job.owner, job.endpoint, slot)
                status = "completed" if reply.status == 200 else "failed"
        except TimeoutError:
            pass
        answer = None if reply is None else reply.text()
        try:
            await self._finish(job, status, answer, self._most_bytes)
        except StorageFull as full:
            assert reply is not None  # what has no answer has room
            refused = Reply.of_error(full, reply.request_id, job.endpoint)
            await self._finish(job, "failed", refused.text(), None)

    async def _begin(self, job: Job) -> LineRequest:
        """The request of a job whose turn it is, again perhaps."""
        now = int(time.time())
        body = await self._keeper.do(job_rows.begin, job.id, now, self._most_bytes)
        if body is None:
            raise asyncio.CancelledError  # it was cancelled while it waited
        self._on_change(job.id)
        return LineRequest(job.endpoint, body)

    async def _finish(
        self, job: Job, status: str, answer: bytes | None, most_bytes: int | None
    ) -> None:
        now = int(time.time())
        await self._keeper.do(job_rows.finish, job.id, status, answer, now, most_bytes)
