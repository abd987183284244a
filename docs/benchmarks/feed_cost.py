"""Measures the cost of the page: CPU time of the core's events, of the history, and of the feed
with viewers, at many seats.

    python docs/benchmarks/feed_cost.py [--seats 1024] [--viewers 8] [--seconds 10]

The scheduler plans real steps for a device that answers at once. Its reports are then played to the
history of an API process at one step per 10 ms, with and without viewers that read the feed over
TCP from another process.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import uvicorn

from jitney.dashboard import Dashboard
from jitney.engine.common import messages
from jitney.engine.common.engine_info import (
    DeviceInfo,
    EngineInfo,
    EngineSizes,
    KernelsInfo,
    ModelInfo,
    NumberFormats,
    QueueInfo,
)
from jitney.engine.common.history import History
from jitney.engine.common.messages import SeatMap
from jitney.engine.common.records import Ledger
from jitney.engine.common.requests import EngineRequest, SamplingParams
from jitney.engine.core import engine_core as core_module
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.kv_pages import PagePool
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.page_tables import PageTables
from jitney.engine.core.scheduler.plan import Plan, StepResult
from jitney.engine.core.scheduler.scheduler import Scheduler
from jitney.engine.server.http.settings import ServerSettings
from jitney.engine.server.process.counters import EngineCounters

STEP_S = 0.01
PAGES, PAGE_SIZE = 65_537, 16
WATCH = """
import socket, sys, threading
def read():
    s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    s.sendall(b"GET /feed HTTP/1.1\\r\\nhost: x\\r\\n\\r\\n")
    while s.recv(1 << 16): pass
for _ in range(int(sys.argv[2])): threading.Thread(target=read, daemon=True).start()
sys.stdin.read()
"""


def _never(*arguments: Any, **named: Any) -> Any:
    raise AssertionError("no step has a grammar, is cut, fails or sleeps")


class Instant:
    """A device that answers at once and computes nothing."""

    compiles = 0

    learn_drafts = choose = restore = sleep = wake = _never
    start = feed = has_paused = finish = _never

    def batch(self, plan: Plan) -> Plan:
        return plan

    def launch(self, batch: Plan) -> int:
        return sum(chunk.sample for chunk in batch.chunks)

    def is_done(self, launched: int) -> bool:
        return True

    def fetch(self, launched: int) -> StepResult:
        return StepResult([7] * launched)


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        started = time.thread_time()
        try:
            return function(*arguments)
        finally:
            spent[0] += time.thread_time() - started

    return call


def requests(seats: int, steps: int) -> list[EngineRequest]:
    """Enough traffic to keep all seats taken: outputs of 16 to 400 tokens, prompts of 8 to 200."""
    rng = random.Random(0)
    return [
        EngineRequest(
            id=f"{number:032x}-0",
            prompt=[1] * rng.randint(8, 200),
            arrival=0.0,
            sampling=SamplingParams(
                temperature=0.0, seed=0, max_tokens=rng.randint(16, 400), ignore_eos=True
            ),
        )
        for number in range(seats + seats * steps // 100)
    ]


def core_reports(seats: int, steps: int) -> tuple[list[bytes], list[EngineRequest]]:
    """Encoded reports of `steps` steps; prints the cost of events in the core."""
    limits = SchedulerLimits(
        max_seats=seats, context_length=2048, max_waiting_requests=10**6, max_waiting_tokens=10**9
    )
    scheduler = Scheduler(
        limits,
        Buckets.of(max_seats=seats, token_budget=4 * seats),
        PageTables(PagePool(PAGES, PAGE_SIZE)),
    )
    core, traffic = EngineCore(scheduler, Instant(), Ledger()), requests(seats, steps)
    for request in traffic:
        core.add(request)
    event_s, asking, step_s, reports = [0.0], [0.0], [0.0], []
    reporter = core._reporter
    reporter.events = timed(reporter.events, event_s)
    core_module.prompt_chunks = timed(core_module.prompt_chunks, event_s)
    reporter.answer = timed(reporter.answer, asking)
    step, encode_events = timed(core.step, step_s), timed(messages.encode, event_s)
    for number in range(steps):
        if number % round(0.5 / STEP_S) == 0:
            core.ask(
                messages.AskSeatMap(number, seats=False)
            )  # the feed reads the pages twice a second
        report = step()
        encode_events(messages.StepReport([], b"", report.events, report.chunks))
        reports.append(messages.encode(report))
    per_step = {
        "host half of a step": step_s[0],
        "events and prompts": event_s[0],
        "page states": asking[0],
    }
    for name, spent in per_step.items():
        print(
            f"core, {name}: {1e6 * spent / steps:8.1f} us a step = "
            f"{100 * spent / steps / STEP_S:.3f} % of "
            f"{1000 * STEP_S:g} ms steps"
        )
    return reports, traffic


def make_client(seats: int) -> Any:
    info = EngineInfo(
        version="0",
        model=ModelInfo(name="bench", context_length=2048, vocab_size=1000),
        formats=NumberFormats(dtype="none", kv_dtype="none"),
        device=DeviceInfo(platform="none", name="none"),
        kernels=KernelsInfo(label="none"),
        sizes=EngineSizes(
            seats=seats,
            pages=PAGES - 1,
            page_size=PAGE_SIZE,
            prefix_cache=True,
            token_budget=4 * seats,
        ),
        queue=QueueInfo(policy="continuous", order="fcfs", max_waiting_requests=1),
    )
    history, rng = History(), random.Random(1)
    history.core_ready(info)

    async def page_map() -> SeatMap:
        codes = bytes(code % 4 for code in range(256))
        return SeatMap(0, [], rng.randbytes(PAGES).translate(codes))

    return SimpleNamespace(
        info=info,
        history=history,
        counters=EngineCounters(),
        state="ready",
        progress=None,
        last_step_age=lambda: 0.0,
        records=history.records.since,
        page_map=page_map,
    )


async def play(client: Any, reports: list[bytes], seconds: float) -> float:
    """CPU seconds of this process while the reports come in, one every STEP_S."""
    started, next_at, at = time.process_time(), time.monotonic(), 0
    end = next_at + seconds
    while time.monotonic() < end and at < len(reports):
        report = msgspec.msgpack.decode(reports[at], type=messages.FromCore)
        assert isinstance(report, messages.StepReport)
        if (record := client.history.take(report)) is not None:
            client.counters.observe_step(record)
        at, next_at = at + 1, next_at + STEP_S
        await asyncio.sleep(max(0.0, next_at - time.monotonic()))
    return time.process_time() - started


async def measure(seats: int, viewers: int, seconds: float) -> None:
    steps = round(seconds / STEP_S)
    reports, traffic = core_reports(seats, 2 * steps)
    client = make_client(seats)
    for request in traffic:
        client.history.submit(request)
    app = Dashboard(client, ServerSettings()).to_mount()
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_config=None, http="h11", lifespan="off")
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.05)
    alone = await play(client, reports[:steps], seconds)
    port = server.servers[0].sockets[0].getsockname()[1]
    with subprocess.Popen(
        [sys.executable, "-c", WATCH, str(port), str(viewers)], stdin=subprocess.PIPE
    ) as watching:
        while len(app.state.feed._viewers) < viewers:
            await asyncio.sleep(0.05)
        watched = await play(client, reports[steps:], seconds)
        watching.stdin.close()  # type: ignore[union-attr]
    server.should_exit = True
    await serving
    print(f"API process, history alone:       {1000 * alone / seconds:7.1f} ms of CPU a second")
    print(
        f"API process, {viewers} viewers at 10 Hz:  {1000 * watched / seconds:7.1f} ms of CPU a "
        "second, "
        f"{1000 * (watched - alone) / seconds:.1f} of them for the feed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seats", type=int, default=1024)
    parser.add_argument("--viewers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    asyncio.run(measure(options.seats, options.viewers, options.seconds))


if __name__ == "__main__":
    main()
