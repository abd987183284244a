"""Sending traffic on time, and watching whether the sender itself keeps up.

A request's latency counts from when it should have been sent. A server that stalls therefore shows
its whole queue: a client that waits for an answer before it sends the next request would not have
asked during the stall, and would not have seen it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jitney.engine.common.request_record import RequestRecord
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.summary import spread, summarise
from jitney.engine.common.trace import Arrival
from jitney.engine.lab.simulation.simulator import span
from jitney.engine.server import Answer

#: How often the event loop is asked whether it is late, seconds.
_LAG_EVERY_S = 0.02
#: The client is the bottleneck above these: share of one CPU, and late by so many seconds at the
#: 99th percentile.
_MOST_CPU, _MOST_LAG_S = 0.85, 0.05

#: Sends request number n and waits for its answer.
_Send = Callable[[int], Awaitable[Answer]]
#: Called with how many requests have ended, of how many.
type Watch = Callable[[int, int], None]


@dataclass(slots=True)
class _Sender:
    """How well the client kept up."""

    #: Of one CPU, over the run.
    cpu_share: float = 0.0
    #: How late its event loop woke up, seconds.
    lag_s: list[float] = field(default_factory=list)
    #: How long after its time each request was sent, seconds; empty unless an open loop sends any
    #: number of requests.
    late_s: list[float] = field(default_factory=list)

    @property
    def trouble(self) -> str:
        """Why the figures may be the client's and not the server's; empty if it kept up."""
        reasons = list(self._reasons())
        if not reasons:
            return ""
        return f"the client may be the bottleneck: {', '.join(reasons)}"

    def _reasons(self) -> Iterator[str]:
        if self.cpu_share > _MOST_CPU:
            yield f"it used {self.cpu_share:.0%} of a CPU"
        for what, seconds in (
            ("its event loop woke up", self.lag_s),
            ("requests left", self.late_s),
        ):
            late = _p99(seconds)
            if late > _MOST_LAG_S:
                yield f"{what} {1e3 * late:.0f} ms late (p99)"

    def as_json(self) -> JsonDict:
        return {
            "cpu_share": self.cpu_share,
            "lag_s": spread(self.lag_s),
            "late_s": spread(self.late_s),
            "trouble": self.trouble or None,
        }


def _p99(values: Sequence[float]) -> float:
    if not values:
        return 0.0
    return float(np.percentile(values, 99))


@dataclass(slots=True)
class LoadResult:
    """What a run over HTTP brought."""

    #: In the order of the arrivals, seconds of time.monotonic().
    requests: list[RequestRecord]
    #: Likewise.
    answers: list[Answer]
    #: Zero of the arrivals.
    started: float
    #: From the first intended arrival to the last end.
    seconds: float
    #: Whether the client kept up.
    sender: _Sender

    def figures(self, **options: Any) -> JsonDict:
        """As `summary.summarise`, without what only the server knows; options: its slo and
        price_per_hour.
        """
        return summarise(self.requests, records=None, seconds=self.seconds, **options)


async def run_load(
    send: _Send,
    arrivals: Sequence[Arrival],
    *,
    concurrency: int = 0,
    closed: bool = False,
    watch: Watch = lambda done, total: None,
) -> LoadResult:
    """Send every arrival at its time and wait for all answers.

    concurrency: most requests open at a time, 0: any number. closed: a request comes when one of
    those ends, so that its time counts from then; else whoever has to wait for a place among the
    `concurrency` waits on its own time.
    """
    open_loop = not (concurrency or closed)
    places = asyncio.Semaphore(concurrency or len(arrivals))
    exchange = _Exchange(send, arrivals, places, watch, open_loop)
    started = time.monotonic()
    async with _watched(exchange.sender), asyncio.TaskGroup() as group:
        for number, arrival in enumerate(arrivals):
            intended = await exchange.turn(None if closed else started + arrival.at)
            group.create_task(exchange.serve(number, intended))
    return exchange.result(started)


@dataclass(slots=True)
class _Exchange:
    """Sends requests and keeps what comes back, each by its number."""

    #: Asks an endpoint one request.
    send: _Send
    arrivals: Sequence[Arrival]
    #: A request has one, and gives it back when it ends.
    places: asyncio.Semaphore
    #: Is told of every end.
    watch: Watch
    #: No request ever waits for another.
    open_loop: bool
    sender: _Sender = field(default_factory=_Sender)
    requests: dict[int, RequestRecord] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)

    async def turn(self, due: float | None) -> float:
        """Wait until a request may be sent; when it should have been. due: its own time, None: when
        there is a place.
        """
        if due is not None:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        await self.places.acquire()
        return time.monotonic() if due is None else due

    async def serve(self, number: int, intended: float) -> None:
        if self.open_loop:
            self.sender.late_s.append(time.monotonic() - intended)
        try:
            answer = await self.send(number)
        finally:
            self.places.release()
        self._keep(number, intended, answer)

    def _keep(self, number: int, intended: float, answer: Answer) -> None:
        self.answers[number] = answer
        self.requests[number] = _record_of(number, self.arrivals[number], intended, answer)
        self.watch(len(self.answers), len(self.arrivals))

    def result(self, started: float) -> LoadResult:
        """Everything, in the order of the arrivals."""
        requests = [request for _, request in sorted(self.requests.items())]
        answers = [answer for _, answer in sorted(self.answers.items())]
        return LoadResult(requests, answers, started, span(requests), self.sender)


def _record_of(number: int, arrival: Arrival, intended: float, answer: Answer) -> RequestRecord:
    """A request as its client saw it, with the endpoint's token counts where it tells them."""
    return RequestRecord(
        number=number,
        tenant=arrival.tenant,
        n_prompt=answer.n_prompt or arrival.n_prompt,
        n_output=answer.n_tokens,
        arrival=intended,
        first_token=_first_token(answer),
        finished=answer.finished,
        finish=answer.finish,
        token_times=answer.chunks or None,
    )


def _first_token(answer: Answer) -> float | None:
    if answer.chunks:
        return answer.chunks[0]
    if answer.served and answer.n_output:
        return answer.finished  # its only tokens are no text: they came with the end
    return None


@asynccontextmanager
async def _watched(sender: _Sender) -> AsyncIterator[None]:
    """Measure this process's share of a CPU and its event loop's lag while the block runs."""
    task = asyncio.create_task(_look(sender))
    cpu, wall = time.process_time(), time.monotonic()
    try:
        yield
    finally:
        task.cancel()
        spent, passed = time.process_time() - cpu, time.monotonic() - wall
        sender.cpu_share = spent / max(1e-9, passed)


async def _look(sender: _Sender) -> None:
    """Note how late the event loop wakes up, for ever."""
    while True:
        due = time.monotonic() + _LAG_EVERY_S
        await asyncio.sleep(_LAG_EVERY_S)
        sender.lag_s.append(max(0.0, time.monotonic() - due))
