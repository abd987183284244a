"""Works on batches and jobs until they are over, also after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial

from jitney.engine.common.database import StoreUnavailable
from jitney.engine.server.http.routing import RouteTable
from jitney.engine.server.http.server_context import ServerContext
from jitney.engine.server.tasks import batch_rows, job_rows
from jitney.engine.server.tasks.batch_work import BatchWork
from jitney.engine.server.tasks.concurrency import ConcurrencyLimit
from jitney.engine.server.tasks.execution import LineExecutor, Reply
from jitney.engine.server.tasks.keeper import StoreKeeper
from jitney.engine.server.tasks.lines import LineRequest
from jitney.engine.server.tasks.records import Batch, Job, Task
from jitney.engine.server.tasks.store import StorageFull, TaskStore

_log = logging.getLogger("jitney.api")

#: Seconds until failed work (a full disk, for example) is retried.
_RETRY_S = 10.0
#: States in which a batch can be cancelled.
_CANCELLABLE = ("validating", "in_progress")


class TaskRunner:
    """Runs an asyncio task for each open batch and job. Attempts of jobs share one
    `ConcurrencyLimit`, attempts of lines another; temporarily refused requests hold no slot.
    """

    def __init__(
        self,
        context: ServerContext,
        table: RouteTable,
        keeper: StoreKeeper,
        on_end: Callable[[], None],
    ):
        """on_end is called when a batch or job may be over."""
        self._context = context
        self._keeper = keeper
        self._on_end = on_end
        self._batches = BatchWork(context, table, keeper)
        self._executor = LineExecutor(context, table, background=False)
        self._limit = ConcurrencyLimit(context)
        self._running: dict[str, asyncio.Task[None]] = {}
        #: Events that are set, and removed, at a task's next change.
        self._changes: dict[str, asyncio.Event] = {}
        self.is_stopped = False

    async def start(self) -> None:
        """Continue the open tasks of an earlier process."""
        for task in await self._keeper.do(TaskStore.unfinished):
            self.begin(task)

    def begin(self, task: Task) -> None:
        """Work on a batch or job, unless a task does already."""
        if self.is_stopped or task.id in self._running:
            return
        running = self._running[task.id] = asyncio.create_task(self._work(task))
        # Not a `finally` in the task: a task cancelled before it starts never enters it.
        running.add_done_callback(lambda _: self._ended(task, running))

    async def cancel(self, task: Task) -> bool:
        """Cancel open requests of a task; a batch still writes its files. False: it was over."""
        if isinstance(task, Batch):
            now = int(time.time())
            done = await self._keeper.do(batch_rows.move, task.id, _CANCELLABLE, "cancelling", now)
        else:
            done = await self._finish_job(task.id, "cancelled", None)
        if done and task.id in self._running:
            self._running[task.id].cancel()
        return done

    async def cancel_of(self, owners: Collection[str]) -> Counter[type[Task]]:
        """Cancel the batches and jobs of these keys; returns the number of each."""
        tasks = await self._keeper.do(TaskStore.unfinished)
        return Counter(
            [type(task) for task in tasks if task.owner in owners and await self.cancel(task)]
        )

    def changed(self, id: str) -> asyncio.Event:
        """An event that is set at the job's next change; already set if no task works on it."""
        event = asyncio.Event()
        if id in self._running:
            return self._changes.setdefault(id, event)
        event.set()
        return event

    def stop(self) -> None:
        """Cancel running work, which the next start continues; start no new work."""
        self.is_stopped = True
        for running in self._running.values():
            running.cancel()

    async def stopped(self) -> None:
        """Wait until all work has ended, after `stop`."""
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _work(self, task: Task) -> None:
        while not self.is_stopped:
            try:
                if isinstance(task, Job):
                    return await self._run_job(task)
                return await self._batches.run(task.id)
            except* StoreUnavailable:
                pass  # already logged
            except* Exception:
                _log.exception("%s could not be worked on; it is tried again", task.id)
            await asyncio.sleep(_RETRY_S)

    @property
    def _most_bytes(self) -> int:
        """Most bytes per key, which may change while the server runs."""
        return self._context.settings.server.key_file_bytes

    async def _run_job(self, job: Job) -> None:
        """Process one job to its end."""
        status, answer = "expired", None
        read, slot = partial(self._begin_job, job), partial(self._limit.slot, job.owner)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, job.expires_at - time.time())):
                reply = await self._executor.answer(read, job.owner, job.endpoint, slot)
                status = "completed" if reply.status == 200 else "failed"
                answer = reply.text()
        try:
            await self._finish_job(job.id, status, answer, self._most_bytes)
        except StorageFull as full:
            refused = Reply.of_error(full, uuid.uuid4().hex, job.endpoint)
            await self._finish_job(job.id, "failed", refused.text())

    async def _begin_job(self, job: Job) -> LineRequest:
        """The request of a job, at each attempt."""
        now = int(time.time())
        body = await self._keeper.do(job_rows.begin, job.id, now, self._most_bytes)
        if body is None:
            raise asyncio.CancelledError  # cancelled while it waited
        self._changed(job.id)
        return LineRequest(job.endpoint, body)

    async def _finish_job(
        self, id: str, status: str, answer: bytes | None, most_bytes: int | None = None
    ) -> bool:
        now = int(time.time())
        return await self._keeper.do(job_rows.finish, id, status, answer, now, most_bytes)

    def _ended(self, task: Task, running: asyncio.Task[None]) -> None:
        del self._running[task.id]
        if running.cancelled() and isinstance(task, Batch):
            self.begin(task)  # to write its files
        self._changed(task.id)
        self._on_end()

    def _changed(self, id: str) -> None:
        event = self._changes.pop(id, None)
        if event is not None:
            event.set()
