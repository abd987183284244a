"""A pool of worker processes with a time limit per task, which threads cannot have. Answers are
msgpack of one type, never pickles: a process that runs a hostile template is not trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from jitney.engine.common.child_process import end_child, start_child
from jitney.engine.common.errors import RequestError
from jitney.engine.common.worker_pipe import LENGTH, framed

_log = logging.getLogger("jitney.api")

#: Default number of processes: the second serves tasks while the first is stuck.
_WORKERS = 2
#: Seconds that a process may take to start.
_START_S = 60.0
#: Seconds that a task waits for a process before it is refused; most waiting tasks.
_WAIT_S = 20.0
_MOST_WAITING = 4096


class WorkerPool[Answer: msgspec.Struct]:
    """A few processes that run one module and answer tasks in order of arrival; one whose task
    takes longer than `timeout_s` seconds is killed and replaced.
    """

    def __init__(
        self,
        work: str,
        module: str,
        setup: msgspec.Struct,
        answer: type[Answer],
        timeout_s: float,
        workers: int = _WORKERS,
    ):
        """work: a verb phrase for messages, "compiles grammars". module: the workers' program,
        which uses `jitney.engine.common.worker_pipe`. setup: the first message to each. answer:
        type of the answers to setup and tasks.
        """
        self._work = work
        self._module = module
        self._setup = setup
        self._answer: type[Answer] = answer
        self._timeout_s = timeout_s
        self._workers = [_Worker() for _ in range(workers)]
        #: Workers without a task; the semaphore hands them out in order of arrival.
        self._idle = deque(self._workers)
        self._turns = asyncio.Semaphore(workers)
        self._n_waiting = 0
        self._started = False
        #: Running work, never cancelled: a process cannot leave a task.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def start(self) -> None:
        """Start all processes; one that fails is tried again by the task that needs it."""
        starts = await self._start_idle()
        if starts:
            await asyncio.wait(starts)

    async def close(self) -> None:
        """Kill all processes and refuse waiting tasks."""
        self._closed = True
        for worker in self._workers:
            await worker.end()
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def ask(self, task: msgspec.Struct) -> Answer:
        """A worker's answer. Raises TimeoutError, EOFError (two processes died), RequestError."""
        worker = await self._next_worker()
        if not self._started:
            await self._start_idle()
        return await asyncio.shield(self._keep_running(self._ask(worker, task)))

    async def _next_worker(self) -> _Worker:
        """Wait for an idle worker. Raises RequestError."""
        reason = f"too many requests wait for the process that {self._work}"
        if self._n_waiting >= _MOST_WAITING:
            raise RequestError(reason, code="busy")
        self._n_waiting += 1
        try:
            async with asyncio.timeout(_WAIT_S):
                await self._turns.acquire()
        except TimeoutError:
            raise RequestError(reason, code="busy") from None
        finally:
            self._n_waiting -= 1
        return self._idle.popleft()

    def _give_back(self, worker: _Worker) -> None:
        self._idle.append(worker)
        self._turns.release()

    async def _start_idle(self) -> list[asyncio.Task[None]]:
        self._started = True
        starts: list[asyncio.Task[None]] = []
        while self._idle:
            await self._turns.acquire()  # at once: no task waits yet
            starts.append(self._keep_running(self._renew(self._idle.popleft())))
        return starts

    def _keep_running[T](self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, since the client that would read it may have left

    async def _ask(self, worker: _Worker, task: msgspec.Struct) -> Answer:
        """Run a task, then give the worker back, with a new process if its own was killed."""
        try:
            return await self._attempt(worker, task)
        except TimeoutError:
            await worker.end()
            raise
        finally:
            if worker.runs or self._closed:
                self._give_back(worker)
            else:
                self._keep_running(self._renew(worker))

    async def _attempt(self, worker: _Worker, task: msgspec.Struct) -> Answer:
        """Run a task, again in a new process if the first dies. Raises TimeoutError, EOFError."""
        for _ in range(2):
            process = await self._ready(worker)
            with contextlib.suppress(ConnectionError, EOFError):
                return await asyncio.wait_for(self._answered(process, task), self._timeout_s)
            await worker.end()
        raise EOFError

    async def _renew(self, worker: _Worker) -> None:
        """Start a worker's new process and make the worker available."""
        try:
            await self._ready(worker)
        except RequestError:
            pass  # logged, or shutting down; the next task tries again
        finally:
            self._give_back(worker)

    async def _ready(self, worker: _Worker) -> asyncio.subprocess.Process:
        """The worker's running process, started if needed. Raises RequestError."""
        self._check_open()
        if worker.process is not None and worker.runs:
            return worker.process
        try:
            process = worker.process = await start_child(self._module)
            self._check_open()
            await asyncio.wait_for(self._answered(process, self._setup), _START_S)
        except RequestError:
            await worker.end()
            raise
        except (OSError, TimeoutError, EOFError) as error:
            await worker.end()
            self._check_open()
            reason = f"cannot start the process that {self._work}"
            _log.error("%s: %s", reason, error or type(error).__name__)
            raise RequestError(reason, code="busy") from None
        return process

    def _check_open(self) -> None:
        """Raise RequestError (draining) after `close`."""
        if self._closed:
            raise RequestError("the server is shutting down", code="draining")

    async def _answered(
        self, process: asyncio.subprocess.Process, message: msgspec.Struct
    ) -> Answer:
        """The answer to a message. Raises ConnectionError or EOFError if the process ends."""
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(framed(message))
        await process.stdin.drain()
        (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        data = await process.stdout.readexactly(length)
        return msgspec.msgpack.decode(data, type=self._answer)


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker of the pool; its process may be replaced."""

    process: asyncio.subprocess.Process | None = None

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def end(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            with contextlib.suppress(OSError):
                await end_child(process)
