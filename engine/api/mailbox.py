"""What comes for one task from elsewhere on its event loop, and a limit on how long it waits."""

from __future__ import annotations

import asyncio
import math


class Mailbox[T]:
    """Items in the order in which they came; one task takes them, all that are there at a time.

    A stream takes once for each token, and mostly waits for less than its limit. So a wait sets no
    timer of its own: one timer is set for the end of a wait, and when it goes off for a later wait
    it is set once more, for the end of that one.
    """

    def __init__(self) -> None:
        self._items: list[T] = []
        #: Raised by `take` once the items before it are taken.
        self._failure: Exception | None = None
        #: Done when there is something, or the wait is over; None while nobody waits.
        self._taker: asyncio.Future[None] | None = None
        #: The time of the loop's clock at which the present wait ends.
        self._due = math.inf
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_empty(self) -> bool:
        return not self._items and self._failure is None

    def put(self, item: T) -> None:
        self._items.append(item)
        self._wake()

    def fail(self, error: Exception) -> None:
        """The first one counts."""
        self._failure = self._failure or error
        self._wake()

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    async def take(self, wait_s: float | None) -> list[T]:
        """What came since the last call, at least one item; empty if `wait_s` seconds (None: as
        long as it takes) bring none. Raises the failure.
        """
        if self.is_empty:
            await self._arrival(wait_s)
        if self._failure is not None and not self._items:
            raise self._failure
        items, self._items = self._items, []
        return items

    def close(self) -> None:
        """Hold nothing any more: a failure holds frames, and those may hold us."""
        self._items = []
        self._failure = None
        self._stop_timer()

    async def _arrival(self, wait_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._taker = loop.create_future()
        self._due = math.inf if wait_s is None else loop.time() + wait_s
        if self._timer is not None and self._timer.when() > self._due:
            self._stop_timer()
        if self._timer is None:
            self._set_timer(loop)
        try:
            await self._taker
        finally:
            self._taker = None

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._due < math.inf:
            self._timer = loop.call_at(self._due, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """The wait that the timer was set for is over, or was long ago."""
        self._timer = None
        if self._taker is None:
            return
        if loop.time() < self._due:
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
