"""Sends traffic on time, and measures whether the sender itself keeps up.

A request's latency counts from its intended time, so that a stalled server shows its whole queue.
A client that waits for an answer before it sends the next request would send nothing during the
stall, and would not measure it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from jitney.engine.common.request_record import RequestRecord
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.summary import spread, summarise
from jitney.engine.common.trace import Arrival
from jitney.engine.lab.bench.client import Answer
from jitney.engine.lab.simulation.engine_run import span

#: Seconds between two measurements of the event loop's lag.
_LAG_EVERY_S = 0.02
#: The client is the bottleneck above these values: share of one CPU, and p99 of the lag in seconds.
_MOST_CPU, _MOST_LAG_S = 0.85, 0.05

#: Sends request number n and waits for its answer.
_Send = Callable[[int], Awaitable[Answer]]
#: Called with the number of ended requests and of all requests.
type Watch = Callable[[int, int], None]


@dataclass(slots=True)
class Sender:
    """Measurements of the client, which show whether it kept up."""

    #: Mean share of one CPU over the run.
    cpu_share: float = 0.0
    #: Delays with which its event loop woke up, seconds.
    lag_s: list[float] = field(default_factory=list)
    #: Delay of each request after its intended time, seconds; only measured in an open loop without
    #: a limit of open requests.
    late_s: list[float] = field(default_factory=list)

    @property
    def trouble(self) -> str:
        """A warning that the client may have distorted the figures; empty if it kept up."""
        reasons = []
        if self.cpu_share > _MOST_CPU:
            reasons.append(f"it used {self.cpu_share:.0%} of a CPU")
        delays = {"its event loop woke up": self.lag_s, "requests left": self.late_s}
        for what, seconds in delays.items():
            late = (spread(seconds) or {}).get("p99", 0.0)
            if late > _MOST_LAG_S:
                reasons.append(f"{what} {1e3 * late:.0f} ms late (p99)")
        return f"the client may be the bottleneck: {', '.join(reasons)}" if reasons else ""

    def as_json(self) -> JsonDict:
        return {
            "cpu_share": self.cpu_share,
            "lag_s": spread(self.lag_s),
            "late_s": spread(self.late_s),
            "trouble": self.trouble or None,
        }


@dataclass(slots=True)
class LoadResult:
    """A run over HTTP."""

    #: Requests in the order of the arrivals; times are time.monotonic() in seconds.
    requests: list[RequestRecord]
    #: Answers in the same order.
    answers: list[Answer]
    #: time.monotonic() from which arrival times count.
    started: float
    #: Seconds from the first intended arrival to the last end.
    seconds: float
    #: Measurements of the client.
    sender: Sender

    def figures(self, **options: Any) -> JsonDict:
        """Figures of `summary.summarise` that a client knows. options: slo and price_per_hour."""
        return summarise(self.requests, records=None, seconds=self.seconds, **options)


def ignore_progress(done: int, total: int) -> None:
    """A `Watch` that shows nothing."""


async def run_load(
    send: _Send,
    arrivals: Sequence[Arrival],
    *,
    concurrency: int = 0,
    closed: bool = False,
    watch: Watch = ignore_progress,
    started: float | None = None,
) -> LoadResult:
    """Send every arrival at its time and wait for all answers.

    concurrency: most open requests, 0: any number. closed: in a closed loop, a request's time
    counts from the end of the request before it; otherwise the wait for one of the `concurrency`
    open requests to end is part of its latency. started: time.monotonic() of the start; None: now.
    """
    sender = Sender()
    slots = asyncio.Semaphore(concurrency or len(arrivals))
    requests: list[RequestRecord | None] = [None] * len(arrivals)
    answers: list[Answer | None] = [None] * len(arrivals)
    ended = itertools.count(1)

    async def serve(number: int, intended: float) -> None:
        if not (concurrency or closed):
            sender.late_s.append(time.monotonic() - intended)
        try:
            answer = await send(number)
        finally:
            slots.release()
        answers[number] = answer
        requests[number] = _record_of(number, arrivals[number], intended, answer)
        watch(next(ended), len(arrivals))

    if started is None:
        started = time.monotonic()
    await asyncio.sleep(started - time.monotonic())
    async with _watched(sender), asyncio.TaskGroup() as group:
        for number, arrival in enumerate(arrivals):
            due = started + arrival.at
            if not closed:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            await slots.acquire()
            group.create_task(serve(number, time.monotonic() if closed else due))
    records = [request for request in requests if request is not None]
    return LoadResult(
        records, [each for each in answers if each is not None], started, span(records), sender
    )


def _record_of(number: int, arrival: Arrival, intended: float, answer: Answer) -> RequestRecord:
    """A request as measured by its client, with the endpoint's token counts if it sends them."""
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
        return answer.finished  # its only tokens have no text, and come with the end
    return None


@asynccontextmanager
async def _watched(sender: Sender) -> AsyncIterator[None]:
    """Measure this process's share of a CPU and its event loop's lag while the block runs."""

    async def measure_lag() -> None:
        while True:
            due = time.monotonic() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            sender.lag_s.append(max(0.0, time.monotonic() - due))

    task = asyncio.create_task(measure_lag())
    cpu, wall = time.process_time(), time.monotonic()
    try:
        yield
    finally:
        task.cancel()
        spent, passed = time.process_time() - cpu, time.monotonic() - wall
        sender.cpu_share = spent / max(1e-9, passed)
