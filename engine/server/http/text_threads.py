"""Threads for tokenising, of which some may never come back.

Such a thread cannot be ended, but it can be given up: another one takes its place, and none of them
keeps the program from ending. One that has nothing to do for a while ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from jitney.engine.common.errors import RequestError

_log = logging.getLogger("jitney.api")

#: Threads that work, and most of those that are given up and may still take time.
_THREADS = 2
_MOST_LOST = 8
#: Seconds after which a thread without work ends.
_IDLE_S = 5.0


@dataclass(slots=True, eq=False)
class _Job:
    """Work that waits for a thread, or has one."""

    work: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)
    #: Its thread was given up; written under the threads' lock.
    lost: bool = False


class TextThreads:
    """A few threads, started as they are needed; `run` is called on the event loop."""

    def __init__(
        self, threads: int = _THREADS, most_lost: int = _MOST_LOST, idle_s: float = _IDLE_S
    ):
        self._most = threads
        self._most_lost = most_lost
        self._idle_s = idle_s
        #: Guards what follows; told of new jobs and of the end.
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        #: Threads that have not been given up, and those of them without work.
        self._n_threads = 0
        self._n_idle = 0
        #: Threads given up that still run.
        self._n_lost = 0
        self._closed = False

    async def run[T](self, work: Callable[[], T], timeout_s: float) -> T:
        """What `work` returns or raises. Raises RequestError if it is not done in that time."""
        job = _Job(work)
        done: asyncio.Future[T] = asyncio.wrap_future(job.future)
        # It stays when the client leaves: a thread that does not come back is missed all the same.
        timer = asyncio.get_running_loop().call_later(timeout_s, self._give_up, job)
        self._add(job)
        await asyncio.wait((done,), timeout=timeout_s)
        if done.done():
            timer.cancel()
            return done.result()
        if job.future.cancel():
            raise RequestError("too many prompts wait to be tokenised", code="busy")
        raise RequestError("the prompt took too long to tokenise")

    def close(self) -> None:
        """Let the threads end after what they do now; nobody waits for them."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _add(self, job: _Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()
            if len(self._jobs) <= self._n_idle or self._n_threads >= self._most:
                return
            self._n_threads += 1
        self._add_thread()

    def _add_thread(self) -> None:
        threading.Thread(target=self._work, name="tokenize", daemon=True).start()

    def _give_up(self, job: _Job) -> None:
        """Put another thread in the place of one that is not done in time."""
        with self._changed:
            if not job.future.running():
                return
            if self._n_lost >= self._most_lost:
                _log.error("%d threads tokenise without an end; no more are added", self._n_lost)
                return
            job.lost = True
            self._n_lost += 1
        _log.warning("a text takes too long to tokenise; another thread takes over")
        self._add_thread()

    def _work(self) -> None:
        while True:
            job = self._next()
            if job is None:
                return
            if job.future.set_running_or_notify_cancel():
                self._do(job)
            with self._changed:
                if job.lost:
                    self._n_lost -= 1
                    return

    def _next(self) -> _Job | None:
        """The next job, or None if this thread is not needed any more."""
        with self._changed:
            self._n_idle += 1
            self._changed.wait_for(lambda: self._jobs or self._closed, self._idle_s)
            self._n_idle -= 1
            if self._jobs:
                return self._jobs.popleft()
            self._n_threads -= 1
            return None

    def _do(self, job: _Job) -> None:
        try:
            result = job.work()
        except Exception as error:
            job.future.set_exception(error)
        except BaseException as error:  # a panic of a library's; the thread must go on
            job.future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            job.future.set_result(result)
