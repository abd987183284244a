"""What a streamed token costs in the API process, in processor time, and which share of the machine
that is.

    python docs/benchmarks/http_cost.py [--streams 32] [--tokens-per-s 673] [--json FILE]

Starts `jitney serve`, drives it as `jitney bench peers` does, and reads the user and system time of
the process that answers HTTP and of the core's beside it, before and after. Other work on the
machine makes processor times a little longer, not many times, so this needs no quiet machine;
`--tokens-per-s` is the rate for which the share of all cores is said (default: the rate of this
run).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from jitney.engine.bench.client import Answer, RemoteEndpoint, ask, first_model, open_client
from jitney.engine.bench.load import LoadResult, run_load
from jitney.engine.bench.peer_process import Peer, free_port, ours
from jitney.engine.bench.peers import OUTPUTS, PROMPTS
from jitney.engine.machine import cpu_name
from jitney.engine.simulation.workload import Arrival, Closed, synthesise

_START_S, _STOP_S = 600.0, 30.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@contextmanager
def served(peer: Peer, port: int) -> Iterator[int]:
    """The process that answers HTTP, once it does."""
    command = [*peer.command, "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait(process, f"http://127.0.0.1:{port}/health")
            yield process.pid
        finally:
            process.terminate()
            process.wait(_STOP_S)


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise SystemExit("the server did not get ready")


def spent_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def children_of(pid: int) -> list[int]:
    """Processes that it started and that run."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def costs(pid: int) -> tuple[float, float]:
    """Seconds of the API process, and of what it started."""
    return spent_s(pid), sum(spent_s(child) for child in children_of(pid))


async def drive(url: str, arrivals: list[Arrival], streams: int) -> LoadResult:
    """All requests as a closed loop."""
    endpoint = RemoteEndpoint(url, "")
    async with open_client(endpoint) as client:
        named = RemoteEndpoint(url, await first_model(client, endpoint))

        async def send(number: int) -> Answer:
            arrival = arrivals[number]
            body = named.body("", arrival.n_output)
            body["prompt"] = [100 + (number + at) % 20_000 for at in range(arrival.n_prompt)]
            return await ask(client, named, body)

        return await run_load(send, arrivals, concurrency=streams, closed=True)


def report(load: LoadResult, api_s: float, core_s: float, rate: float) -> dict[str, object]:
    """Figures, by token."""
    tokens = sum(answer.n_output for answer in load.answers)
    own_rate = tokens / load.seconds
    rate = rate or own_rate
    per_token = api_s / tokens
    return {
        "machine": cpu_name(),
        "tokens": tokens,
        "output_tok_s": round(own_rate, 1),
        "api_us_per_token": round(1e6 * per_token, 1),
        "core_us_per_token": round(1e6 * core_s / tokens, 1),
        "client_us_per_token": round(1e6 * load.sender.cpu_share * load.seconds / tokens, 1),
        "share_for_tok_s": rate,
        "api_share_of_machine": round(per_token * rate / (os.cpu_count() or 1), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--tokens-per-s", type=float, default=0.0)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    arrivals = synthesise(args.requests, PROMPTS, OUTPUTS, Closed(), 0)
    port = args.port or free_port()
    url = f"http://127.0.0.1:{port}"
    with served(ours(args.model, "auto", "bfloat16"), port) as pid:
        asyncio.run(drive(url, arrivals[: args.streams], args.streams))
        before = costs(pid)
        load = asyncio.run(drive(url, arrivals, args.streams))
        api_s, core_s = (now - then for now, then in zip(costs(pid), before, strict=True))
    found = report(load, api_s, core_s, args.tokens_per_s)
    text = json.dumps(found, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
