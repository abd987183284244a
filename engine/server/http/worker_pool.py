"""Processes that work for requests and may be ended in the middle of it: what a client sends, or a
model's folder holds, may take for ever, and a thread that works on it cannot be ended.
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

#: Processes, unless told otherwise: the second is for those who come while the first is held up.
_WORKERS = 2
#: Seconds that a process may take to start, beside other work.
_START_S = 60.0
#: Seconds that a task waits for a process before it is refused, and tasks that may wait.
_WAIT_S = 20.0
_MOST_WAITING = 4096


@dataclass(frozen=True, slots=True)
class WorkerKind[Answer: msgspec.Struct]:
    """What a pool's processes are."""

    #: What it does, for people: "compiles grammars".
    work: str
    #: The module that each runs, which speaks through `jitney.engine.common.worker_pipe`.
    module: str
    #: Their first message.
    setup: msgspec.Struct
    #: Of the setup and of all tasks.
    answer: type[Answer]


class WorkerPool[Answer: msgspec.Struct]:
    """A few processes of one kind. A task that does not end holds only its own until it has taken
    `timeout_s` seconds; then the process is ended, and replaced. Those who wait take their turns as
    they came.
    """

    def __init__(self, kind: WorkerKind[Answer], timeout_s: float, workers: int = _WORKERS):
        self._kind = kind
        self._timeout_s = timeout_s
        self._places = [_Place() for _ in range(workers)]
        #: Places that nothing is done in at the moment.
        self._free = deque(self._places)
        #: Get the places that come free, in this order.
        self._waiters: deque[asyncio.Future[_Place]] = deque()
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
        starts = self._start_free()
        if starts:
            await asyncio.wait(starts)

    async def close(self) -> None:
        """End all processes, whatever they do, and refuse those who wait."""
        self._closed = True
        for place in self._places:
            await place.end()
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def ask(self, task: msgspec.Struct) -> Answer:
        """What a process answers. Raises TimeoutError if it takes too long; EOFError if two
        processes ended over it; RequestError (busy, draining) if there is none to ask.
        """
        place = await self._next_place()
        if not self._started:
            self._start_free()
        return await asyncio.shield(self._go_on(self._ask_in(place, task)))

    async def _next_place(self) -> _Place:
        """A place that nothing is done in. Raises RequestError."""
        if self._free:
            return self._free.popleft()
        if len(self._waiters) >= _MOST_WAITING:
            raise self._too_many()
        waiter: asyncio.Future[_Place] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await asyncio.wait((waiter,), timeout=_WAIT_S)
        except asyncio.CancelledError:
            if not self._leave(waiter):
                self._give_back(waiter.result())
            raise
        if self._leave(waiter):
            raise self._too_many()
        return waiter.result()

    def _leave(self, waiter: asyncio.Future[_Place]) -> bool:
        """Wait no longer; False if it has its place already."""
        if waiter.done():
            return False
        self._waiters.remove(waiter)
        return True

    def _give_back(self, place: _Place) -> None:
        """Let the next one have a place."""
        if self._waiters:
            self._waiters.popleft().set_result(place)
        else:
            self._free.append(place)

    def _too_many(self) -> RequestError:
        return RequestError(
            f"too many requests wait for the process that {self._kind.work}", code="busy"
        )

    def _start_free(self) -> list[asyncio.Task[None]]:
        """Start the processes of all places that are free."""
        self._started = True
        places, self._free = self._free, deque[_Place]()
        return [self._go_on(self._renew(place)) for place in places]

    def _go_on[T](self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may be left to ask for it

    async def _ask_in(self, place: _Place, task: msgspec.Struct) -> Answer:
        """Ask, and give the place back; if its process had to be ended, with a new one."""
        try:
            return await self._attempt(place, task)
        except TimeoutError:
            await place.end()
            raise
        finally:
            if place.runs or self._closed:
                self._give_back(place)
            else:
                self._go_on(self._renew(place))

    async def _attempt(self, place: _Place, task: msgspec.Struct) -> Answer:
        """A process that ended while it was idle is replaced, and so, once, is one that ends over
        this task. Raises TimeoutError, EOFError.
        """
        for _ in range(2):
            process = await self._ready(place)
            with contextlib.suppress(ConnectionError, EOFError):
                asked = _ask_worker(process, task, self._kind.answer)
                return await asyncio.wait_for(asked, self._timeout_s)
            await place.end()
        raise EOFError

    async def _renew(self, place: _Place) -> None:
        """A new process for a place that has none; the place is free once it runs."""
        try:
            await self._ready(place)
        except RequestError:
            pass  # logged already, or the end; the next task tries it again
        finally:
            self._give_back(place)

    async def _ready(self, place: _Place) -> asyncio.subprocess.Process:
        """The place's process, started if it has none that runs. Raises RequestError."""
        self._check_open()
        if place.process is not None and place.runs:
            return place.process
        try:
            process = place.process = await start_child(self._kind.module)
            self._check_open()
            asked = _ask_worker(process, self._kind.setup, self._kind.answer)
            await asyncio.wait_for(asked, _START_S)
        except RequestError:
            await place.end()
            raise
        except (OSError, TimeoutError, EOFError) as error:
            await place.end()
            self._check_open()
            reason = f"the process that {self._kind.work} does not start"
            _log.error("%s: %s", reason, error or type(error).__name__)
            raise RequestError(reason, code="busy") from None
        return process

    def _check_open(self) -> None:
        """Raises RequestError (draining) after the end."""
        if self._closed:
            raise RequestError("the server is shutting down", code="draining")


@dataclass(slots=True, eq=False)
class _Place:
    """Where a process is, or will be again."""

    process: asyncio.subprocess.Process | None = None

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def end(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            with contextlib.suppress(OSError):
                await end_child(process)


async def _ask_worker[T](
    process: asyncio.subprocess.Process, message: msgspec.Struct, answer: type[T]
) -> T:
    """What a worker (`jitney.engine.common.worker_pipe`) answers. Raises ConnectionError or
    EOFError if it ends.
    """
    assert process.stdin is not None and process.stdout is not None  # asked for
    process.stdin.write(framed(message))
    await process.stdin.drain()
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=answer)
