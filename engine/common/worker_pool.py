"""A pool of processes that may be ended in the middle of their work: what a client sends, or a
model's folder holds, may take for ever, and a thread that works on it cannot be ended.

Answers are msgpack of one type (`jitney.engine.common.worker_pipe`), never pickles: a process that
runs a hostile template is not to be believed.
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

#: Processes, unless told otherwise: the second is for tasks that come while the first is held up.
_WORKERS = 2
#: Seconds that a process may take to start, beside other work.
_START_S = 60.0
#: Seconds that a task waits for a process before it is refused, and tasks that may wait.
_WAIT_S = 20.0
_MOST_WAITING = 4096


class WorkerPool[Answer: msgspec.Struct]:
    """A few processes of one kind. A task that does not end holds only its own until it has taken
    `timeout_s` seconds; then the process is ended, and replaced. Tasks have their turns in the
    order in which they came.
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
        """The processes run `module`, which speaks through `jitney.engine.common.worker_pipe`.

        work: what it does, for people: "compiles grammars".
        setup: the first message to each.
        answer: of the setup and of all tasks.
        """
        self._work = work
        self._module = module
        self._setup = setup
        self._answer: type[Answer] = answer
        self._timeout_s = timeout_s
        self._workers = [_Worker() for _ in range(workers)]
        #: Those that do nothing at the moment; the semaphore gives them to tasks in their order.
        self._idle = deque(self._workers)
        self._turns = asyncio.Semaphore(workers)
        self._n_waiting = 0
        self._started = False
        #: Work that goes on when the client it was for has left, and is never cancelled: a process
        #: in the middle of a task is of no use to others, and asyncio may wait for ever for one
        #: whose start was cancelled.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def start(self) -> None:
        """Start all processes, so that the first task need not wait; else it starts them. One that
        cannot be started is tried again by the task that needs it.
        """
        starts = await self._start_idle()
        if starts:
            await asyncio.wait(starts)

    async def close(self) -> None:
        """End all processes, whatever they do, and refuse the tasks that wait."""
        self._closed = True
        for worker in self._workers:
            await worker.end()
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def ask(self, task: msgspec.Struct) -> Answer:
        """The answer of a process. Raises TimeoutError if it takes too long; EOFError if two
        processes ended over it; RequestError (busy, draining) if there is none to ask.
        """
        worker = await self._next_worker()
        if not self._started:
            await self._start_idle()
        return await asyncio.shield(self._go_on(self._ask(worker, task)))

    async def _next_worker(self) -> _Worker:
        """A worker that does nothing. Raises RequestError."""
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
        """Let the next task have a worker."""
        self._idle.append(worker)
        self._turns.release()

    async def _start_idle(self) -> list[asyncio.Task[None]]:
        """Start the processes of all workers that do nothing."""
        self._started = True
        starts: list[asyncio.Task[None]] = []
        while self._idle:
            await self._turns.acquire()  # at once: no task waits yet
            starts.append(self._go_on(self._renew(self._idle.popleft())))
        return starts

    def _go_on[T](self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may be left to ask for it

    async def _ask(self, worker: _Worker, task: msgspec.Struct) -> Answer:
        """Ask, and give the worker back; if its process had to be ended, with a new one."""
        try:
            return await self._attempt(worker, task)
        except TimeoutError:
            await worker.end()
            raise
        finally:
            if worker.runs or self._closed:
                self._give_back(worker)
            else:
                self._go_on(self._renew(worker))

    async def _attempt(self, worker: _Worker, task: msgspec.Struct) -> Answer:
        """A process that ended while it was idle is replaced, and so, once, is one that ends over
        this task. Raises TimeoutError, EOFError.
        """
        for _ in range(2):
            process = await self._ready(worker)
            with contextlib.suppress(ConnectionError, EOFError):
                return await asyncio.wait_for(self._answered(process, task), self._timeout_s)
            await worker.end()
        raise EOFError

    async def _renew(self, worker: _Worker) -> None:
        """A new process for a worker that has none; it is idle once it runs."""
        try:
            await self._ready(worker)
        except RequestError:
            pass  # logged already, or the end; the next task tries it again
        finally:
            self._give_back(worker)

    async def _ready(self, worker: _Worker) -> asyncio.subprocess.Process:
        """The worker's process, started if it has none that runs. Raises RequestError."""
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
            reason = f"the process that {self._work} does not start"
            _log.error("%s: %s", reason, error or type(error).__name__)
            raise RequestError(reason, code="busy") from None
        return process

    def _check_open(self) -> None:
        """Raises RequestError (draining) after the end."""
        if self._closed:
            raise RequestError("the server is shutting down", code="draining")

    async def _answered(
        self, process: asyncio.subprocess.Process, message: msgspec.Struct
    ) -> Answer:
        """The answer to a message. Raises ConnectionError or EOFError if the process ends."""
        assert process.stdin is not None and process.stdout is not None  # asked for
        process.stdin.write(framed(message))
        await process.stdin.drain()
        (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        data = await process.stdout.readexactly(length)
        return msgspec.msgpack.decode(data, type=self._answer)


@dataclass(slots=True, eq=False)
class _Worker:
    """One of the pool, with a process, or about to have another one."""

    process: asyncio.subprocess.Process | None = None

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def end(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            with contextlib.suppress(OSError):
                await end_child(process)
