"""Threads for jobs that may never end: a stuck one is replaced, and none keeps the program up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

#: A job must not raise.
type _Job = Callable[[], object]


class ReplaceableThreads:
    """Runs jobs in order on a few threads, which start on demand and end when idle."""

    def __init__(self, name: str, threads: int = 1, *, most_left: int = 4, idle_s: float = 5.0):
        """most_left: most abandoned threads. idle_s: seconds until an idle thread ends."""
        self._name = name
        self._most = threads
        self._most_left = most_left
        self._idle_s = idle_s
        #: None ends a thread.
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        #: Guards the fields below.
        self._lock = threading.Lock()
        #: The threads that are not abandoned.
        self._workers: set[_Worker] = set()
        #: Abandoned threads that still run.
        self._n_left = 0

    def put(self, job: _Job) -> None:
        """Run a job after the earlier ones. It must not raise."""
        with self._lock:
            self._jobs.put(job)
            if len(self._workers) < self._most:
                self._start()

    def wait(self, seconds: float) -> None:
        """Wait for a single thread's jobs, at most `seconds`; abandon it if one took over half."""
        done = threading.Event()
        self.put(done.set)
        if not done.wait(seconds):
            self.leave(after_s=seconds / 2)

    def leave(self, job: _Job | None = None, after_s: float = 0.0) -> bool:
        """Replace threads whose job (only `job`, if given) ran `after_s`; False at the limit."""
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
        """End the threads after the jobs put so far."""
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
        """The next job; None if this thread should end."""
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
    """A thread's current job, if any, and its start (time.monotonic())."""

    job: _Job | None = None
    began = 0.0
