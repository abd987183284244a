"""Threads for tokenising, of which some may never come back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future

from jitney.engine.common.errors import RequestError
from jitney.engine.common.replaceable_threads import ReplaceableThreads

_log = logging.getLogger("jitney.api")

#: Threads that work, and most of those that are given up and may still take time.
_THREADS = 2
_MOST_LEFT = 8
#: Seconds after which a thread without work ends.
_IDLE_S = 5.0


class TextThreads:
    """Runs work on a few threads; `run` is called on the event loop."""

    def __init__(
        self, threads: int = _THREADS, most_left: int = _MOST_LEFT, idle_s: float = _IDLE_S
    ):
        self._threads = ReplaceableThreads("tokenize", threads, most_left=most_left, idle_s=idle_s)

    async def run[T](self, work: Callable[[], T], timeout_s: float) -> T:
        """The result of `work`, or its error. Raises RequestError if it is not done in that
        time.
        """
        future: Future[T] = Future()

        def job() -> None:
            if future.set_running_or_notify_cancel():
                _do(work, future)

        def give_up() -> None:
            if not future.running():
                return
            if self._threads.leave(job):
                _log.warning("a text takes too long to tokenise; another thread takes over")
            else:
                _log.error("too many threads tokenise without an end; no more are added")

        done = asyncio.wrap_future(future)
        # It stays when the client leaves: a thread that does not come back is missed all the same.
        timer = asyncio.get_running_loop().call_later(timeout_s, give_up)
        self._threads.put(job)
        await asyncio.wait((done,), timeout=timeout_s)
        if done.done():
            timer.cancel()
            return done.result()
        if future.cancel():
            raise RequestError("too many prompts wait to be tokenised", code="busy")
        raise RequestError("the prompt took too long to tokenise")

    def close(self) -> None:
        """Let the threads end after what was given to them; the server does not wait for them."""
        self._threads.close()


def _do[T](work: Callable[[], T], future: Future[T]) -> None:
    try:
        result = work()
    except Exception as error:
        future.set_exception(error)
    except BaseException as error:  # a panic of a library's; the thread must go on
        future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
    else:
        future.set_result(result)
