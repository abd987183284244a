"""Jobs as the routes and the server use them: each is answered at its turn, and those that are not
over after a restart go on. They lie in the store of batches.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from functools import partial

import orjson

from jitney.engine.server.http.routing import RouteTable
from jitney.engine.server.tasks.batches.execution import LineExecutor, Reply
from jitney.engine.server.tasks.batches.host import RequestHost
from jitney.engine.server.tasks.batches.keeper import StoreKeeper
from jitney.engine.server.tasks.batches.lines import LineRequest
from jitney.engine.server.tasks.batches.places import Places
from jitney.engine.server.tasks.batches.service import Batches
from jitney.engine.server.tasks.batches.store import StorageFull, StoreUnavailable
from jitney.engine.server.tasks.batches.tasks import Tasks
from jitney.engine.server.tasks.jobs.records import Job
from jitney.engine.server.tasks.jobs.table import JOBS


class Jobs:
    """One server's jobs."""

    def __init__(self, host: RequestHost, table: RouteTable, batches: Batches):
        self._host = host
        self._batches = batches
        self.executor = LineExecutor(host, table, background=False)
        self._opening = asyncio.Lock()
        self._runner: _JobRunner | None = None

    async def start(self) -> None:
        """Go on with what an earlier server has left. After the start of batches. What is wrong
        with the store has been logged; whoever asks for it next tries again.
        """
        if self._batches.is_open:
            with suppress(StoreUnavailable):
                await self.runner()

    async def keeper(self) -> StoreKeeper:
        """What is known of jobs. Raises HttpError 503."""
        return await self._batches.keeper()

    async def runner(self) -> _JobRunner:
        """Works on jobs. Raises HttpError 503."""
        async with self._opening:
            if self._runner is None:
                keeper, webhooks = await self._batches.keeper(), await self._batches.webhooks()
                runner = _JobRunner(self._host, keeper, self.executor, webhooks.wake)
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


class _Turns:
    """A job's tries, each in a place; what is refused waits without one, since others may be
    answered meanwhile: jobs for a model none of whose engines is there would keep all others
    waiting. The first place is there before the first try: the job begins in it.
    """

    def __init__(self, places: Places, owner: str):
        self._places = places
        self._owner = owner
        self._has_place = False

    async def acquire(self) -> None:
        await self._places.acquire(self._owner)
        self._has_place = True

    def release(self) -> None:
        """Give the place back, if there is one."""
        if self._has_place:
            self._has_place = False
            self._places.release(self._owner)

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Lasts as long as a try."""
        if not self._has_place:
            await self.acquire()
        try:
            yield
        finally:
            self.release()


class _JobRunner:
    """A task for each job that is not over. All lives on one event loop."""

    def __init__(
        self,
        host: RequestHost,
        keeper: StoreKeeper,
        executor: LineExecutor,
        on_end: Callable[[], None],
    ):
        """on_end is called when a job is over."""
        self._host = host
        self._keeper = keeper
        self._executor = executor
        self._on_end = on_end
        self._places = Places(host)
        self._tasks = Tasks(self._changed)
        #: Set, and forgotten, at a job's next change.
        self._changes: dict[str, asyncio.Event] = {}

    @property
    def is_stopped(self) -> bool:
        return self._tasks.is_stopped

    @property
    def _most_bytes(self) -> int:
        """That one key may have."""
        return self._host.settings.server.key_file_bytes

    async def start(self) -> None:
        """Go on with what an earlier process has left."""
        for job in await self._keeper.do(JOBS.unfinished):
            self.begin(job)

    def begin(self, job: Job) -> None:
        """Work on a job."""
        self._tasks.begin(job.id, partial(self._work, job))

    def changed(self, id: str) -> asyncio.Event:
        """An event that is set when the job changes; at once if it is not worked on."""
        if id in self._tasks:
            return self._changes.setdefault(id, asyncio.Event())
        event = asyncio.Event()
        event.set()
        return event

    async def cancel(self, id: str) -> bool:
        """End a job without an answer; False if it was over."""
        if not await self._finish(id, "cancelled", None):
            return False
        self._tasks.cancel(id)
        self._on_end()
        return True

    async def cancel_of(self, owners: Collection[str]) -> int:
        """Cancel the jobs of these keys. -> how many."""
        jobs = await self._keeper.do(JOBS.unfinished)
        return sum([await self.cancel(job.id) for job in jobs if job.owner in owners])

    def stop(self) -> None:
        """Give up what is being computed; the next start goes on with it."""
        self._tasks.stop()

    async def stopped(self) -> None:
        """Wait until nothing runs any more, after `stop`."""
        await self._tasks.stopped()

    async def _work(self, job: Job) -> None:
        """One job to its end."""
        try:
            status, answer = await self._outcome(job)
            await self._finish(job.id, status, answer, self._most_bytes)
        except StorageFull as full:
            request_id = uuid.uuid4().hex
            reply = Reply.of_error(full, request_id, job.endpoint)
            await self._finish(job.id, "failed", orjson.dumps(reply.shown(request_id)))
        self._on_end()

    async def _finish(
        self, id: str, status: str, answer: bytes | None, most_bytes: int | None = None
    ) -> bool:
        """See `JOBS.finish`."""
        now = int(time.time())
        return await self._keeper.do(JOBS.finish, id, status, answer, now, most_bytes)

    async def _outcome(self, job: Job) -> tuple[str, bytes | None]:
        """The state in which the job ends, and its answer."""
        left = max(0.0, job.expires_at - time.time())
        try:
            async with asyncio.timeout(left):
                return await self._answer(job)
        except TimeoutError:
            return "expired", None

    async def _answer(self, job: Job) -> tuple[str, bytes | None]:
        turns = _Turns(self._places, job.owner)
        await turns.acquire()
        try:
            return await self._answer_in(turns, job)
        finally:
            turns.release()

    async def _answer_in(self, turns: _Turns, job: Job) -> tuple[str, bytes | None]:
        body = await self._keeper.do(JOBS.begin, job.id, int(time.time()), self._most_bytes)
        if body is None:
            return "cancelled", None
        self._changed(job.id)
        request_id = uuid.uuid4().hex
        request = LineRequest(job.endpoint, body)
        reply = await self._executor.answered(request, request_id, job.owner, turns.one)
        status = "completed" if reply.status == 200 else "failed"
        return status, orjson.dumps(reply.shown(request_id))

    def _changed(self, id: str) -> None:
        event = self._changes.pop(id, None)
        if event is not None:
            event.set()
