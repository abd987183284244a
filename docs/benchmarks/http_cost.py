"""Measures the processor time of a streamed token in the API process, by part, and its share of the
machine.

    python docs/benchmarks/http_cost.py [--streams 32] [--tokens-per-s 764] [--json FILE]
    python docs/benchmarks/http_cost.py --step-ms 12 [--trees BEFORE AFTER] [--streams 1 32 256]

Starts `jitney serve`, drives it as `jitney bench peers` does, and reads the user and system time of
the process that answers HTTP and of the core's process, before and after. Other work on the machine
makes processor times a little longer, not many times, so this needs no quiet machine.
`--tokens-per-s`: rates for which the share of all cores is printed (default: the rate of this run).

The parts are sampled: each time the process has used a tick of the kernel (4 ms on most), its main
thread looks up the part of the program that it is in, by the innermost file that belongs to one,
and the part gets the processor time since the last sample. 384 requests give 600 samples, which
measure a part of a quarter to 2 % of the whole.

parse: messages of the core and the clients; detokenise: tokens to text; frame: JSON and events;
send: HTTP and the system's `send`; streams: handing tokens to the answers that wait for them; poll:
asking the system which sockets are ready; loop: the rest of the event loop.

With `--step-ms` no model computes: the core sends a token to every stream each so many ms, and a
client of a few lines reads the streams and the gaps between their events. `--trees`: checkouts
(`git worktree add`) in folders called jitney, measured in turn, twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from jitney.engine import server as server_house
from jitney.engine.cli import main as jitney
from jitney.engine.common.machine import cpu_name
from jitney.engine.common.ports import free_port
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.trace import Arrival
from jitney.engine.lab.bench.client import Answer, EndpointClient, RemoteEndpoint
from jitney.engine.lab.bench.load import LoadResult, run_load
from jitney.engine.lab.bench.peers import OUTPUTS, PROMPTS
from jitney.engine.lab.simulation.workload import Closed, synthesise
from jitney.engine.server.process.supervisor import CoreSupervisor

sys.path.insert(0, str(Path(__file__).parent))

from running import Server, started
from token_source import STEP_S

_REPORT_S = 10.0
#: Without a device: seconds until all streams flow, plus 1 per 100 streams; seconds of counting.
_FLOW_S, _WINDOW_S = 1.0, 5.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
#: Processor seconds between two samples; the kernel checks once a tick.
_SAMPLE_S = 0.001
_SAMPLED = "--sampled"
#: Key of the main thread's seconds between two reports of the core, at the fastest tenth of the
#: steps: other work on the machine makes the others longer.
_QUICK = "quick step"
#: Parts of the program with pieces of "file path:function name"; the first match counts. A function
#: without a match belongs to the part of its caller.
PARTS = {
    "parse": (
        "engine/server/process/",
        "/zmq/",
        "engine/common/messages.py",
        "engine/server/chat/schema.py",
        "engine/server/chat/openai/schema.py",
        "engine/core/text/tokenizer.py",
        "/asyncio/selector_events.py:_read_ready",
    ),
    "detokenise": ("engine/core/text/detokenizer.py", "engine/server/chat/choices.py"),
    "frame": (
        "engine/server/chat/formats.py",
        "engine/server/chat/openai/format.py",
        "engine/server/http/jsonio.py",
    ),
    "send": (
        "engine/server/http/streaming.py",
        "/h11/",
        "/uvicorn/",
        "/starlette/",
        "engine/server/http/protocol.py",
        "/asyncio/selector_events.py:write",
    ),
    "streams": ("engine/server/", "engine/common/"),
    "poll": ("/selectors.py",),
    "loop": ("/asyncio/",),
}


def part_of(frame: FrameType | None) -> str:
    """The part of the program that a stack is in."""
    while frame is not None:
        place = f"{frame.f_code.co_filename}:{frame.f_code.co_name}"
        for part, places in PARTS.items():
            if any(piece in place for piece in places):
                return part
        frame = frame.f_back
    return "other"


class Sampler:
    """Samples which part of this process uses the main thread's processor time. SIGUSR2 writes the
    seconds by part into a file and resets them.
    """

    def __init__(self, file: Path):
        self._file = file
        self._last = time.thread_time()
        self._spent: defaultdict[str, float] = defaultdict(float)
        #: Processor time of the main thread at each report of a step.
        self._steps: list[float] = []
        signal.signal(signal.SIGPROF, self._sample)
        signal.signal(signal.SIGUSR2, self._report)
        signal.setitimer(signal.ITIMER_PROF, _SAMPLE_S, _SAMPLE_S)

    def _sample(self, _: int, frame: FrameType | None) -> None:
        now = time.thread_time()
        self._spent[part_of(frame)] += now - self._last
        self._last = now

    def step_comes(self) -> None:
        self._steps.append(time.thread_time())

    def _report(self, _: int, __: FrameType | None) -> None:
        new_file = self._file.with_suffix(".new")
        steps = np.diff(self._steps)
        quick = {_QUICK: float(np.quantile(steps, 0.1))} if len(steps) else {}
        new_file.write_text(json.dumps(self._spent | quick))
        new_file.replace(self._file)
        self._spent.clear()
        self._steps.clear()


def sampled(pid: int, file: Path) -> dict[str, float]:
    """Seconds by part since the last call."""
    file.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR2)
    until = time.monotonic() + _REPORT_S
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.05)
    return json.loads(file.read_text())


def served(
    words: Sequence[str], port: int, file: Path, environment: Mapping[str, str] = {}
) -> AbstractContextManager[Server]:
    """Run `jitney WORDS` with a sampler that writes to `file`."""
    command = [sys.executable, __file__, _SAMPLED, str(file), *words, "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    return started(command, url, Path(os.devnull), environment, ready="/health")


def spent_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def children_of(pid: int) -> list[int]:
    """Running child processes of a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def costs(pid: int) -> tuple[float, float]:
    """Processor seconds of the API process, and of its children."""
    return spent_s(pid), sum(spent_s(child) for child in children_of(pid))


def open_streams(port: int, streams: int) -> list[socket.socket]:
    """Open `streams` streams that end when their connections close."""
    body = {"prompt": [97], "max_tokens": 4000, "stream": True, "ignore_eos": True}
    text = json.dumps({"model": "tiny-random", **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(text)}\r\n"
    connections: list[socket.socket] = []
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + text)
        connections.append(connection)
    return connections


def read_streams(
    selector: selectors.BaseSelector, seconds: float
) -> tuple[int, dict[int, list[float]]]:
    """Read for `seconds` seconds; returns (tokens of all streams, arrival times by stream)."""
    tokens = 0
    times: dict[int, list[float]] = {key.fd: [] for key in selector.get_map().values()}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for key, _ in selector.select(0.1):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            part = connection.recv(1 << 16)
            if not part or b'"error"' in part:
                raise SystemExit(f"a stream ended: {part.decode(errors='replace')}")
            tokens += part.count(b'"text":"') if b'"text":""' not in part else 0
            times[key.fd].append(time.monotonic())
    return tokens, times


def token_cost(port: int, pid: int, file: Path, streams: int) -> JsonDict:
    """Figures of `streams` streams, measured once all of them flow."""
    connections = open_streams(port, streams)
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        read_streams(selector, _FLOW_S + streams / 100)
        sampled(pid, file)
        before, own = costs(pid), time.process_time()
        tokens, times = read_streams(selector, _WINDOW_S)
        own = time.process_time() - own
        api_s, core_s = (now - then for now, then in zip(costs(pid), before, strict=True))
        parts = sampled(pid, file)
        quick = parts.pop(_QUICK)
        for connection in connections:
            connection.close()
    gaps = np.concatenate([np.diff(each) for each in times.values()])
    p50, p90, p99 = (1e3 * np.quantile(gaps, (0.5, 0.9, 0.99))).round(1).tolist()
    return {
        "streams": streams,
        "output_tok_s": round(tokens / _WINDOW_S),
        "tokens_an_event": round(tokens / sum(map(len, times.values())), 2),
        "api_us_per_token": round(1e6 * api_s / tokens, 1),
        "quick_step_us_per_token": round(1e6 * quick / streams, 1),
        "parts_us_per_token": {name: round(1e6 * s / tokens, 1) for name, s in parts.items()},
        "core_us_per_token": round(1e6 * core_s / tokens, 1),
        "client_us_per_token": round(1e6 * own / tokens, 1),
        "gap_ms_p50_p90_p99": [p50, p90, p99],
    }


def without_device(trees: Sequence[Path], crowds: Sequence[int], step_ms: float) -> JsonDict:
    """The cost of a token in each tree by number of streams; the trees take turns, twice."""
    by_tree: dict[str, list[JsonDict]] = {str(tree): [] for tree in trees}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "parts.json"
        for tree in [*trees, *trees]:
            port = free_port()
            environment = {"PYTHONPATH": str(tree.parent), STEP_S: str(1e-3 * step_ms)}
            with served(["serve", "tiny-random"], port, file, environment) as server:
                pid = server.started.pid
                for streams in crowds:
                    cost = token_cost(port, pid, file, streams)
                    by_tree[str(tree)].append(cost)
                    print(tree, json.dumps(cost), flush=True)
    return {"machine": cpu_name(), "step_ms": step_ms, "trees": by_tree}


async def drive(url: str, arrivals: list[Arrival], streams: int) -> LoadResult:
    """Send all requests in a closed loop."""
    async with EndpointClient(RemoteEndpoint(url, "")) as client:
        await client.find_model()

        async def send(number: int) -> Answer:
            arrival = arrivals[number]
            body = client.endpoint.body("", arrival.n_output)
            body["prompt"] = [100 + (number + at) % 20_000 for at in range(arrival.n_prompt)]
            return await client.ask(body)

        return await run_load(send, arrivals, concurrency=streams, closed=True)


def report(
    load: LoadResult,
    api_s: float,
    core_s: float,
    parts: Mapping[str, float],
    rates: Sequence[float],
) -> dict[str, object]:
    """Figures per token. parts: sampled seconds of the API process; the rest is the time of its
    other threads and unsampled time.
    """
    tokens = sum(answer.n_output for answer in load.answers)
    own_rate = round(tokens / load.seconds, 1)
    per_token = api_s / tokens
    seconds = {**parts, "other threads": max(0.0, api_s - sum(parts.values()))}
    return {
        "machine": cpu_name(),
        "tokens": tokens,
        "output_tok_s": own_rate,
        "api_us_per_token": round(1e6 * per_token, 1),
        "parts_us_per_token": {name: round(1e6 * s / tokens, 1) for name, s in seconds.items()},
        "core_us_per_token": round(1e6 * core_s / tokens, 1),
        "client_us_per_token": round(1e6 * load.sender.cpu_share * load.seconds / tokens, 1),
        "api_share_of_machine_at_tok_s": {
            rate: round(per_token * rate / (os.cpu_count() or 1), 4) for rate in rates or [own_rate]
        },
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    if sys.argv[1:2] == [_SAMPLED]:
        if STEP_S in os.environ:
            source = str(Path(__file__).parent)
            os.environ["PYTHONPATH"] += os.pathsep + source
            server_house.ProcessClient = partial(
                server_house.ProcessClient, builder="token_source:build"
            )
            sampler = Sampler(Path(sys.argv[2]))
            take = CoreSupervisor._take

            def take_and_tell(self: CoreSupervisor, link: Any, message: Any) -> None:
                sampler.step_comes()
                take(self, link, message)

            CoreSupervisor._take = take_and_tell
        else:
            Sampler(Path(sys.argv[2]))
        sys.exit(jitney(sys.argv[3:]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="", help="such as int8; default: the checkpoint's")
    parser.add_argument("--streams", type=int, nargs="+", default=[32])
    parser.add_argument("--step-ms", type=float, help="no model: so many ms a step")
    parser.add_argument("--trees", type=Path, nargs="+", default=[Path(__file__).parents[2]])
    parser.add_argument("--requests", type=int, default=384)
    parser.add_argument("--tokens-per-s", type=float, nargs="*", default=[])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.step_ms:
        text = json.dumps(without_device(args.trees, args.streams, args.step_ms), indent=1)
        if args.json:
            args.json.write_text(text + "\n")
        return
    [streams] = args.streams
    arrivals = synthesise(args.requests, PROMPTS, OUTPUTS, Closed(), 0)
    port = args.port or free_port()
    url = f"http://127.0.0.1:{port}"
    words = ["serve", args.model, "--dtype", "bfloat16", "--no-prefix-cache"]
    if args.weights:
        words += ["--weights", args.weights]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "parts.json"
        with served(words, port, file) as server:
            pid = server.started.pid
            asyncio.run(drive(url, arrivals[:streams], streams))
            before = costs(pid)
            sampled(pid, file)
            load = asyncio.run(drive(url, arrivals, streams))
            parts = sampled(pid, file)
            api_s, core_s = (now - then for now, then in zip(costs(pid), before, strict=True))
    results = report(load, api_s, core_s, parts, args.tokens_per_s)
    text = json.dumps(results, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
