"""Sending traffic on time, and watching whether the sender itself keeps up.

A request's latency counts from when it should have been sent. A server that stalls therefore shows
its whole queue: a client that waits for an answer before it sends the next request would not have
asked during the stall, and would not have seen it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jitney.engine.bench.client import Answer
from jitney.engine.simulation.workload import Arrival
from jitney.engine.telemetry.summary import RequestTimes, spread

#: How often the event loop is asked whether it is late, seconds.
LAG_EVERY_S = 0.02
#: The client is the bottleneck above these: share of one CPU, and late by so many seconds at the
#: 99th percentile.
MOST_CPU, MOST_LAG_S = 0.85, 0.05

#: Sends request number n and waits for its answer.
Send = Callable[[int], Awaitable[Answer]]
#: Told how many requests have ended, of how many.
Watch = Callable[[int, int], None]


@dataclass(slots=True)
class Sender:
    """How well the client kept up. cpu_share: of one CPU, over the run; lag_s: how late its event
    loop woke up; late_s: how long after its time each request was sent (open loop, no limit on open
    requests; else empty)."""

    cpu_share: float = 0.0
    lag_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)

    @property
    def trouble(self) -> str:
        """Why the figures may be the client's and not the server's; empty if it kept up."""
        found = []
        if self.cpu_share > MOST_CPU:
            found.append(f"it used {self.cpu_share:.0%} of a CPU")
        for what, values in (
            ("its event loop woke up", self.lag_s),
            ("requests left", self.late_s),
        ):
            if values and (p99 := float(np.percentile(values, 99))) > MOST_LAG_S:
                found.append(f"{what} {1e3 * p99:.0f} ms late (p99)")
        return f"the client may be the bottleneck: {', '.join(found)}" if found else ""

    def as_json(self) -> dict[str, Any]:
        return {
            "cpu_share": self.cpu_share,
            "lag_s": spread(self.lag_s),
            "late_s": spread(self.late_s),
            "trouble": self.trouble or None,
        }


@dataclass(slots=True)
class Load:
    """What a run over HTTP brought. times: in order of the arrivals; answers: likewise; started:
    zero of the arrivals; seconds: from the first intended arrival to the last end."""

    times: list[RequestTimes]
    answers: list[Answer]
    started: float
    seconds: float
    sender: Sender


async def run_load(
    send: Send,
    arrivals: Sequence[Arrival],
    *,
    concurrency: int = 0,
    closed: bool = False,
    watch: Watch = lambda done, total: None,
) -> Load:
    """Send every arrival at its time and wait for all answers.

    concurrency: most requests open at a time, 0: any number. closed: a request comes when one of
    those ends, so that its time counts from then; else whoever has to wait for a place among the
    `concurrency` waits on its own time.
    """
    times: list[RequestTimes | None] = [None] * len(arrivals)
    answers: list[Answer | None] = [None] * len(arrivals)
    places = asyncio.Semaphore(concurrency or len(arrivals))
    sender, done, started = Sender(), 0, time.monotonic()

    async def one(number: int, intended: float) -> None:
        nonlocal done
        if not (concurrency or closed):
            sender.late_s.append(time.monotonic() - intended)
        try:
            answer = await send(number)
        finally:
            places.release()
        answers[number], times[number] = (
            answer,
            times_of(number, arrivals[number], intended, answer),
        )
        done += 1
        watch(done, len(arrivals))

    async with watched(sender), asyncio.TaskGroup() as group:
        for number, arrival in enumerate(arrivals):
            intended = started + arrival.at
            if not closed:
                await asyncio.sleep(max(0.0, intended - time.monotonic()))
            await places.acquire()
            group.create_task(one(number, time.monotonic() if closed else intended))
    known = [t for t in times if t is not None]
    return Load(
        known,
        [a for a in answers if a is not None],
        started,
        max(t.finished for t in known) - min(t.arrival for t in known),
        sender,
    )


def times_of(number: int, arrival: Arrival, intended: float, answer: Answer) -> RequestTimes:
    """A request's times; the endpoint's token counts where it tells them. When it boarded only the
    server knows.
    """
    first = answer.pieces[0] if answer.pieces else None
    served = answer.finish in ("stop", "length")
    if served and first is None and answer.n_output:
        first = answer.finished  # its only tokens are no text: they came with the end
    return RequestTimes(
        number,
        arrival.tenant,
        answer.n_prompt or arrival.n_prompt,
        (answer.n_output or len(answer.pieces)) if served else 0,
        intended,
        None,
        first,
        answer.finished,
        answer.finish,
        answer.pieces or None,
    )


@asynccontextmanager
async def watched(sender: Sender):
    """Measure this process's share of a CPU and its event loop's lag while the block runs."""

    async def look() -> None:
        while True:
            due = time.monotonic() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            sender.lag_s.append(max(0.0, time.monotonic() - due))

    task = asyncio.create_task(look())
    cpu, wall = time.process_time(), time.monotonic()
    try:
        yield
    finally:
        task.cancel()
        sender.cpu_share = (time.process_time() - cpu) / max(1e-9, time.monotonic() - wall)
