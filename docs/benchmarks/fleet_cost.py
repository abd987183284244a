"""Measures the cost of a fleet's page: CPU time and bytes of its server by replicas and viewers,
and CPU time of one engine whose pulse is read.

    python docs/benchmarks/fleet_cost.py [--replicas 8 100] [--seats 32] [--viewers 1]

The replicas are scripted engines in a separate process; all their seats get tokens every half
second. Viewers read the feed over TCP from a third process. CPU times are the server's own, so
other work on the machine makes them a little larger, not many times.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import uvicorn

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from page_replicas import FakeReplica, engines_app  # noqa: E402

from jitney.dashboard.fleet import _MOST_BYTES_PER_S, FleetView  # noqa: E402
from jitney.dashboard.fleet_page import FleetPage  # noqa: E402
from jitney.dashboard.pulse import _pulse_of  # noqa: E402
from jitney.dashboard.remote import RemoteEngine  # noqa: E402
from jitney.dashboard.sse import encode  # noqa: E402
from jitney.engine.common.machine import cpu_name  # noqa: E402
from jitney.engine.server.http.settings import ServerSettings  # noqa: E402

#: Seconds between two updates of all seats.
_MOVE_S = 0.5
_WATCH = """
import socket, sys, threading
total = [0]
def read():
    s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    s.sendall(b"GET /feed HTTP/1.1\\r\\nhost: 127.0.0.1\\r\\n\\r\\n")
    while part := s.recv(1 << 16): total[0] += len(part)
for _ in range(int(sys.argv[2])): threading.Thread(target=read, daemon=True).start()
for line in sys.stdin: print(total[0], flush=True)
"""


async def serve_engines(n: int, seats: int) -> None:
    """Print the port, and serve until killed."""
    clients = {f"r{number}": FakeReplica(seats, seed=number) for number in range(n)}
    server = uvicorn.Server(uvicorn.Config(engines_app(clients), port=0, log_config=None))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.05)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    while not serving.done():
        for client in clients.values():
            client.move()
        await asyncio.sleep(_MOVE_S)


def start(*arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *arguments], stdin=pipe, stdout=pipe, text=True)


def bytes_read(watching: subprocess.Popen[str]) -> int:
    assert watching.stdin is not None and watching.stdout is not None
    print("how many?", file=watching.stdin, flush=True)
    return int(watching.stdout.readline())


async def measure(n: int, seats: int, viewers: int, seconds: float) -> None:
    with start(os.path.abspath(__file__), "--serve", str(n), "--seats", str(seats)) as engines:
        assert engines.stdout is not None
        port = int(await asyncio.to_thread(engines.stdout.readline))
        urls = {f"r{number}": f"http://127.0.0.1:{port}/r{number}" for number in range(n)}
        fleet = FleetView({name: RemoteEngine(url) for name, url in urls.items()})
        try:
            await _measure_page(fleet, n, viewers, seconds)
        finally:
            engines.kill()


async def _measure_page(fleet: FleetView, n: int, viewers: int, seconds: float) -> None:
    app = FleetPage(fleet, ServerSettings()).by_itself()
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    with start("-c", _WATCH, str(port), str(viewers)) as watching:
        while fleet.frame()["sums"]["ready"] < n:
            await asyncio.sleep(0.1)
        await asyncio.sleep(2)
        spent, read = await _over(seconds, watching)
        watching.kill()
    server.should_exit = True
    await serving
    print(
        f"{n} replicas, {viewers} viewers: {1000 * spent:.1f} ms of CPU a second, "
        f"{read / viewers / 1000:.1f} kB a second to each viewer "
        f"(at most {_MOST_BYTES_PER_S / 1000:g})",
        flush=True,
    )


async def _over(seconds: float, watching: subprocess.Popen[str]) -> tuple[float, float]:
    """(CPU seconds of this process, bytes read by all viewers), both per second."""
    began, spent = time.monotonic(), time.process_time()
    read = bytes_read(watching)
    await asyncio.sleep(seconds)
    lasted = time.monotonic() - began
    spent = time.process_time() - spent
    return spent / lasted, (bytes_read(watching) - read) / lasted


def measure_pulse(seats: int, times: int = 200) -> None:
    """Print the cost of one pulse in the engine's API process."""
    replica = FakeReplica(seats)
    for _ in range(3):
        replica.move()
    began = time.process_time()
    for _ in range(times):
        size = len(encode("pulse", _pulse_of(replica, "run", 0.0, with_levels=True)))  # type: ignore[arg-type]
    each = (time.process_time() - began) / times
    print(f"one pulse of {seats} seats: {1e6 * each:.0f} us of CPU, {size} bytes, twice a second")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 100])
    parser.add_argument("--seats", type=int, default=32)
    parser.add_argument("--viewers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve_engines(options.serve, options.seats))
        return
    print(cpu_name())
    for seats in (options.seats, 1024):
        measure_pulse(seats)
    for n in options.replicas:
        asyncio.run(measure(n, options.seats, options.viewers, options.seconds))


if __name__ == "__main__":
    main()
