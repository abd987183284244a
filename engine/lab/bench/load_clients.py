"""Distributes a load over several processes, since one Python client reads only about ten thousand
tokens a second.

Each process gets its share of the requests, and all start at the same time of the machine's
monotonic clock. Run as a module, this is one of the processes: it reads a job and the start time
from standard input, and prints lines of JSON.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress

import msgspec

from jitney.engine.common.child_process import end_child, start_child
from jitney.engine.common.errors import JitneyError
from jitney.engine.common.request_record import RequestRecord
from jitney.engine.common.trace import Arrival
from jitney.engine.lab.bench.client import Answer, EndpointClient, RemoteEndpoint
from jitney.engine.lab.bench.load import LoadResult, Sender, Watch, ignore_progress, run_load
from jitney.engine.lab.simulation.engine_run import span

_MODULE = "jitney.engine.lab.bench.load_clients"
#: Seconds from the time at which all processes are ready to the start.
_LEAD_S = 0.2
#: Most bytes of a line, which holds the times of all tokens of a share.
_LINE_BYTES = 1 << 30


class _Job(msgspec.Struct, frozen=True):
    """The share of one process."""

    endpoint: RemoteEndpoint
    arrivals: list[Arrival]
    #: Prompt of each arrival.
    texts: list[str]
    #: See `run_load`.
    concurrency: int
    closed: bool


class _Line(msgspec.Struct, omit_defaults=True):
    """A line that a process prints when it is ready, has made progress, or has results."""

    #: Requests that have ended since the last line.
    ended: int = 0
    requests: list[RequestRecord] | None = None
    answers: list[Answer] = []
    sender: Sender | None = None


async def run_shared_load(
    endpoint: RemoteEndpoint,
    arrivals: Sequence[Arrival],
    texts: Sequence[str],
    clients: int,
    *,
    concurrency: int = 0,
    closed: bool = False,
    watch: Watch = ignore_progress,
) -> LoadResult:
    """`run_load` in `clients` processes. Raises JitneyError if one of them dies."""
    clients = min(clients, len(arrivals), concurrency or len(arrivals))
    ended = 0

    def count(more: int) -> None:
        nonlocal ended
        ended += more
        watch(ended, len(arrivals))

    async with AsyncExitStack() as stack:
        processes: list[asyncio.subprocess.Process] = []
        for number in range(clients):
            own = slice(number, None, clients)
            most = (concurrency + clients - 1 - number) // clients
            job = _Job(endpoint, list(arrivals[own]), list(texts[own]), most, closed)
            process = await start_child(_MODULE, limit=_LINE_BYTES)
            stack.push_async_callback(end_child, process)
            _write(process, msgspec.json.encode(job))
            processes.append(process)
        for process in processes:
            await _read(process)
        started = time.monotonic() + _LEAD_S
        for process in processes:
            _write(process, msgspec.json.encode(started))
        lines = await asyncio.gather(*[_result(process, count) for process in processes])
    return _merged(lines, started)


def _write(process: asyncio.subprocess.Process, line: bytes) -> None:
    assert process.stdin is not None  # `start_child` has asked for it
    process.stdin.write(line + b"\n")


async def _read(process: asyncio.subprocess.Process) -> _Line:
    assert process.stdout is not None  # likewise
    line = await process.stdout.readline()
    if not line:
        raise JitneyError("a process of the load client has died: see the messages above")
    return msgspec.json.decode(line, type=_Line)


async def _result(process: asyncio.subprocess.Process, count: Callable[[int], None]) -> _Line:
    while (line := await _read(process)).requests is None:
        count(line.ended)
    return line


def _merged(lines: Sequence[_Line], started: float) -> LoadResult:
    total = sum(len(line.answers) for line in lines)
    requests: list[RequestRecord] = []
    answers: list[Answer] = []
    sender = Sender()
    for number in range(total):
        line, at = lines[number % len(lines)], number // len(lines)
        assert line.requests is not None  # `_result`
        requests.append(msgspec.structs.replace(line.requests[at], number=number))
        answers.append(line.answers[at])
    for line in lines:
        assert line.sender is not None  # likewise
        sender.cpu_share = max(sender.cpu_share, line.sender.cpu_share)
        sender.lag_s += line.sender.lag_s
        sender.late_s += line.sender.late_s
    return LoadResult(requests, answers, started, span(requests), sender)


def _main() -> int:
    with suppress(KeyboardInterrupt):
        job = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Job)
        asyncio.run(_run(job))
    return 0


async def _run(job: _Job) -> None:
    def say(line: _Line) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()

    async with EndpointClient(job.endpoint) as client:
        say(_Line())
        started = msgspec.json.decode(sys.stdin.buffer.readline(), type=float)
        load = await run_load(
            lambda number: client.send(job.arrivals[number], job.texts[number]),
            job.arrivals,
            concurrency=job.concurrency,
            closed=job.closed,
            watch=lambda done, total: say(_Line(ended=1)),
            started=started,
        )
    say(_Line(requests=load.requests, answers=load.answers, sender=load.sender))


if __name__ == "__main__":
    sys.exit(_main())
