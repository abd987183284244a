"""A queue for one consumer, which takes all items at once: in its task, or in a callback."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from jitney.engine.common.slices import TimeSlices


class Mailbox[T]:
    """Queues items for one consumer, which takes all of them at once. A stream waits once per
    token, so waits are cheap: they share one timer, which is set again if it fires during a later
    wait; and a reader gets new items in a callback, together with the other streams', without
    waking the consumer's task.
    """

    def __init__(self, slices: TimeSlices) -> None:
        self._slices = slices
        self._items: list[T] = []
        #: Raised by `take` once the items before it are taken.
        self._failure: Exception | None = None
        #: Set when the present wait is over; None while no consumer waits.
        self._taker: asyncio.Future[None] | None = None
        #: Callback for items of the present wait; None: an item ends the wait.
        self._reader: Callable[[list[T]], bool] | None = None
        #: The reader will be called in one of the loop's next turns.
        self._is_due = False
        #: Length of the present wait in seconds, and the time of the loop's clock at which it ends.
        self._wait_s = self._ends = math.inf
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_empty(self) -> bool:
        return not self._items and self._failure is None

    def put(self, item: T, *, ends_wait: bool = False) -> None:
        """Add an item. ends_wait: it is for the consumer's task, not for its reader."""
        self._items.append(item)
        if ends_wait or self._reader is None:
            self._wake()
        elif not self._is_due:
            self._is_due = True
            self._slices.soon(self._read)

    def fail(self, error: Exception) -> None:
        """Let the next `take` raise this error; only the first one counts."""
        self._failure = self._failure or error
        self._wake()

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    async def take(
        self, wait_s: float | None, reader: Callable[[list[T]], bool] | None = None
    ) -> list[T]:
        """The items since the last call, at least one; empty after `wait_s` seconds (None: never).
        Raises the failure. reader: gets items that come during the wait, which then begins again;
        False: they are returned instead. Its exception is the failure.
        """
        if self.is_empty:
            await self._arrival(wait_s, reader)
        if self._failure is not None and not self._items:
            raise self._failure
        items, self._items = self._items, []
        return items

    def close(self) -> None:
        """Drop all references: a failure's frames may refer to this object."""
        self._items = []
        self._failure = None
        self._stop_timer()

    async def _arrival(
        self, wait_s: float | None, reader: Callable[[list[T]], bool] | None
    ) -> None:
        loop = asyncio.get_running_loop()
        self._taker, self._reader = loop.create_future(), reader
        self._wait_s = math.inf if wait_s is None else wait_s
        self._ends = loop.time() + self._wait_s
        if self._timer is not None and self._timer.when() > self._ends:
            self._stop_timer()
        if self._timer is None:
            self._set_timer(loop)
        try:
            await self._taker
        finally:
            self._taker = self._reader = None

    def _read(self) -> None:
        """Call the reader with the new items, unless the wait is over."""
        self._is_due = False
        taker = self._taker
        if taker is None or taker.done() or self._reader is None or not self._items:
            return
        items, self._items = self._items, []
        try:
            if self._reader(items):
                self._ends = taker.get_loop().time() + self._wait_s
                return
            self._items = items
        except Exception as error:
            self._failure = self._failure or error
        self._wake()

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._ends < math.inf:
            self._timer = loop.call_at(self._ends, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Timer callback: end the present wait if it is due, else set the timer again."""
        self._timer = None
        if self._taker is None:
            return
        if loop.time() < self._ends:
            self._set_timer(loop)
        else:
            self._wake()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)
