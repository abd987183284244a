"""A thread for work that may take long, which is replaced when it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

#: Most threads that are left to their jobs at a time.
_MOST_LEFT = 4


class WorkerThread:
    """Runs jobs one after another on a thread that can be replaced while a job takes too long; the
    old thread ends with its job.
    """

    def __init__(self, name: str):
        self._name = name
        self._jobs: SimpleQueue[Callable[[], object]] = SimpleQueue()
        #: Guards `_current` and `_n_left`.
        self._lock = threading.Lock()
        #: Threads that were left to their jobs and still run.
        self._n_left = 0
        self._current = self._started()

    def put(self, job: Callable[[], object]) -> None:
        """Have a job run after those that were put before. It must not raise."""
        self._jobs.put(job)

    def wait(self, seconds: float) -> None:
        """Wait until all jobs are done, at most so long; replace a thread whose job took over half
        of it.
        """
        done = threading.Event()
        self._jobs.put(done.set)
        if not done.wait(seconds):
            self.leave(seconds / 2)

    def leave(self, after_s: float = 0.0) -> None:
        """Leave the thread to its job, if that has run for at least so long."""
        with self._lock:
            began = self._current.began
            if began is None or time.monotonic() - began < after_s or self._n_left >= _MOST_LEFT:
                return
            self._current.is_left = True
            self._n_left += 1
            self._current = self._started()

    def _started(self) -> _Thread:
        worker = _Thread()
        threading.Thread(target=self._run, args=(worker,), name=self._name, daemon=True).start()
        return worker

    def _run(self, worker: _Thread) -> None:
        while not worker.is_left:
            job = self._jobs.get()
            worker.began = time.monotonic()
            job()
            worker.began = None
        with self._lock:
            self._n_left -= 1


class _Thread:
    """One of a worker's threads."""

    #: When its job began (time.monotonic()); None: it has none.
    began: float | None = None
    #: Another thread runs the jobs behind its own.
    is_left = False
