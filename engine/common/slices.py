"""Long work on the event loop, a few milliseconds at a time, as generators. In a thread, pure
Python would hold the GIL for 5 ms whenever the loop writes to a socket.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator

from jitney.engine.common.errors import RequestError

#: Yields regularly; returns the result.
type Work[T] = Generator[object, None, T]
#: Yields after each piece of the body.
type Pieces = Generator[bytes, None, None]

#: Length of a slice in seconds; generators must yield much more often.
_SLICE_S = 0.002
#: Bytes that are sent at once.
_BLOCK = 1 << 16
#: Most tasks resumed at a time: about as many streams can write a token each in a slice.
_CALLED = 16


class TimeSlices:
    """Shares the event loop's time: one slice in a turn, for the task that has had the fewest. A
    task that ends early leaves the rest of its slice to the next: all streams write after a step in
    one turn. most: tasks at a time, more are refused; 0: no limit.
    """

    _open = 0
    #: The slice of this turn, or of the next one, is assigned to a task.
    _is_assigned = False
    #: Tasks that were resumed and have not run yet; the first one to run begins a slice.
    _called = 0
    _has_begun = True
    #: time.perf_counter() at which this turn's slice is used up.
    _ends = 0.0

    def __init__(self, most: int = 0):
        self._most = most
        #: (slices had so far, order of arrival, the task's future).
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        #: Short work for one of the next turns.
        self._short: deque[Callable[[], object]] = deque()
        self._calls_short = False

    def soon(self, work: Callable[[], object]) -> None:
        """Call short `work` in one of the next turns, so that all streams write without tasks."""
        self._short.append(work)
        if not self._calls_short:
            self._calls_short = True
            asyncio.get_running_loop().call_soon(self._do_short)

    def _do_short(self) -> None:
        ends = time.perf_counter() + _SLICE_S
        try:
            while self._short:
                self._short.popleft()()
                if time.perf_counter() >= ends:
                    break
        finally:
            self._calls_short = bool(self._short)
            if self._short:
                asyncio.get_running_loop().call_soon(self._do_short)

    async def result[T](self, work: Work[T]) -> T:
        """The result of `work`. Raises RequestError busy if too much is under way."""
        self._enter()
        try:
            n_slices = 0
            while True:
                await self._turn(n_slices)
                n_slices += 1
                try:
                    _advance(work, self._ends)
                except StopIteration as end:
                    return end.value
        finally:
            self._open -= 1
            work.close()

    async def blocks(self, pieces: Pieces) -> AsyncGenerator[bytes]:
        """`pieces` joined to blocks of 64 kB; no slice is held while the reader works. Raises
        RequestError busy.
        """
        self._enter()
        try:
            block = bytearray()
            n_slices = 0
            more = True
            while more:
                await self._turn(n_slices)
                n_slices += 1
                more = _fill(block, pieces, self._ends)
                if len(block) >= _BLOCK:
                    yield bytes(block)
                    block.clear()
            if block:
                yield bytes(block)
        finally:
            self._open -= 1
            pieces.close()

    def _enter(self) -> None:
        if self._most and self._open >= self._most:
            raise RequestError(
                f"{self._most} long answers are being made already; ask again in a moment",
                code="busy",
            )
        self._open += 1

    async def _turn(self, n_slices: int) -> None:
        """Wait for a slice of the loop's time, or the rest of one."""
        if not self._is_assigned:
            self._begin()
        elif self._waiting or not self._has_rest:
            await self._wait(n_slices)

    @property
    def _has_rest(self) -> bool:
        """Whether the slice of this turn is not used up."""
        return self._has_begun and time.perf_counter() < self._ends

    async def _wait(self, n_slices: int) -> None:
        order = next(self._order)
        while True:
            ticket = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (n_slices, order, ticket))
            try:
                await ticket
            except asyncio.CancelledError:
                if ticket.done() and not ticket.cancelled():
                    self._give_up_call()
                raise
            self._called -= 1
            if not self._has_begun:
                self._begin()
                return
            if self._has_rest:
                return

    def _begin(self) -> None:
        """Begin a slice; other callbacks of the loop run before the next one."""
        self._is_assigned = self._has_begun = True
        self._ends = time.perf_counter() + _SLICE_S
        asyncio.get_running_loop().call_soon(self._pass_on)

    def _pass_on(self) -> None:
        """Resume the tasks with the fewest slices; the slice is free if none waits."""
        while self._waiting and self._called < _CALLED:
            _, _, ticket = heapq.heappop(self._waiting)
            if not ticket.done():
                ticket.set_result(None)
                self._called += 1
        self._is_assigned = self._called > 0
        self._has_begun = not self._is_assigned

    def _give_up_call(self) -> None:
        """Give up the turn of a cancelled task; resume others if none is resumed."""
        self._called -= 1
        if not self._called and not self._has_begun:
            self._pass_on()


def _advance(work: Iterator[object], end: float) -> None:
    """Run `work` until perf_counter() reaches `end`, or to its own StopIteration."""
    next(work)
    while time.perf_counter() < end:
        next(work)


def _fill(block: bytearray, pieces: Iterator[bytes], end: float) -> bool:
    """Fill the block until perf_counter() reaches `end` or it is full; False: no piece is left."""
    for piece in pieces:
        block += piece
        if len(block) >= _BLOCK or time.perf_counter() >= end:
            return True
    return False
