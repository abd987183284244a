"""Threads for work that may never end. Neither a job nor its thread can be ended, but the thread
can be left to its job: another one takes its place. None of them keeps the program from ending.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

#: Does not raise.
type _Job = Callable[[], object]


class ReplaceableThreads:
    """Runs jobs in their order on a few threads, which start with the work and end when there is
    none for a while.
    """

    def __init__(self, name: str, threads: int = 1, *, most_left: int = 4, idle_s: float = 5.0):
        """most_left: threads that are left to their jobs at a time. idle_s: seconds after which a
        thread without work ends.
        """
        self._name = name
        self._most = threads
        self._most_left = most_left
        self._idle_s = idle_s
        #: None ends a thread.
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        #: Guards what follows.
        self._lock = threading.Lock()
        #: The threads that are not left to their jobs.
        self._workers: set[_Worker] = set()
        #: Threads that were left to their jobs and still run.
        self._n_left = 0

    def put(self, job: _Job) -> None:
        """Have a job run after those that were put before. It must not raise."""
        with self._lock:
            self._jobs.put(job)
            if len(self._workers) < self._most:
                self._start()

    def wait(self, seconds: float) -> None:
        """Wait until all jobs of a single thread are done, at most so long. If one of them alone
        has then taken more than half of that, its thread is left to it.
        """
        done = threading.Event()
        self.put(done.set)
        if not done.wait(seconds):
            self.leave(after_s=seconds / 2)

    def leave(self, job: _Job | None = None, after_s: float = 0.0) -> bool:
        """Leave threads to the jobs that have run for at least so long; job: only to this one.
        False if a thread would have been one too many.
        """
        now = time.monotonic()
        with self._lock:
            for worker in [*self._workers]:
                if worker.job is None or now - worker.began < after_s:
                    continue
                if job is None or worker.job is job:
                    if self._n_left >= self._most_left:
                        return False
                    self._workers.remove(worker)
                    self._n_left += 1
                    self._start()
        return True

    def close(self) -> None:
        """Let the threads end after the jobs that were put."""
        with self._lock:
            for _ in self._workers:
                self._jobs.put(None)

    def _start(self) -> None:
        worker = _Worker()
        self._workers.add(worker)
        threading.Thread(target=self._run, args=(worker,), name=self._name, daemon=True).start()

    def _run(self, worker: _Worker) -> None:
        while (job := self._next(worker)) is not None:
            worker.began, worker.job = time.monotonic(), job
            job()
            with self._lock:
                worker.job = None
                if worker not in self._workers:
                    self._n_left -= 1
                    return

    def _next(self, worker: _Worker) -> _Job | None:
        """The next job; None if this thread is to end."""
        while True:
            try:
                job = self._jobs.get(timeout=self._idle_s)
            except Empty:
                job = None
            with self._lock:
                if job is not None:
                    return job
                if self._jobs.empty():
                    self._workers.discard(worker)
                    return None


class _Worker:
    """A thread."""

    #: What it does, if anything, and since when (time.monotonic()).
    job: _Job | None = None
    began = 0.0
