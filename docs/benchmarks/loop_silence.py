"""Measures how long a served engine is silent while it makes its longest answers.

    python docs/benchmarks/loop_silence.py tiny-random --port 9100 [--seconds 20] [--history 8000]

One thread requests /livez over and over and others read streams, while a separate process sends the
heaviest requests: prompts scored with 20 alternatives a token, the largest bodies, and the page's
long answers about thousands of requests. A silence is the time until /livez answers, or between two
events of a stream; the latter includes the engine's own steps, so compare it with the quiet case.
Other work on the machine makes both longer, but not the last column: the CPU time of the server's
thread in one turn of its event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import running

from jitney.engine.common.machine import cpu_name

#: Seconds between two probes.
_PAUSE_S = 0.002
_SCORED_PROMPT = 2000
_JSON = {"content-type": "application/json"}
#: Start of the line in which a server reports the turns of its loop since the last report.
_TURNS = "TURNS "
_PAGE = (
    "/dashboard/trace?from=0",
    "/dashboard/timeline?from=0&bins=600",
    "/dashboard/requests?limit=1000",
    "/dashboard/frames",
    "/dashboard/report?minutes=10",
)


@dataclass(frozen=True)
class Server:
    """A client of the server under test."""

    address: str
    model: str = ""
    #: Tokens of a prompt plus its answer.
    context: int = 0

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.address, timeout=600)

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of the answer to a GET."""
        return self._ask("GET", path, None)

    def complete(self, **fields: Any) -> tuple[int, bytes]:
        """Status and body of a completion."""
        body = json.dumps({"model": self.model} | fields, separators=(",", ":"))
        return self._ask("POST", "/v1/completions", body.encode())

    def _ask(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        connection = self.connect()
        try:
            connection.request(method, path, body, _JSON)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@dataclass
class Silences:
    """Measured silences in seconds."""

    probes: list[float] = field(default_factory=list)
    streams: list[float] = field(default_factory=list)
    #: Turns of the server's loop: their number, and quantiles of their CPU time in ms.
    turns: list[float] = field(default_factory=list)


class _TimedSelector(selectors.DefaultSelector):
    """A selector that times turns of the loop: the time between two waits for events."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[float] = []
        self._began: float | None = None

    def select(self, timeout: float | None = None) -> list[Any]:
        if self._began is not None:
            self.turns.append(1000 * (time.thread_time() - self._began))
        ready = super().select(timeout)
        self._began = time.thread_time()
        return ready


def serve(arguments: list[str]) -> int:
    """`jitney serve` in this process; reports the turns of its loop at each SIGUSR1."""
    from jitney.engine.cli import main as jitney

    selector = _TimedSelector()

    class Policy(asyncio.DefaultEventLoopPolicy):
        def new_event_loop(self) -> asyncio.AbstractEventLoop:
            return asyncio.SelectorEventLoop(selector)

    def report(*_: object) -> None:
        turns, selector.turns = selector.turns, []
        figures = [float(len(turns)), *np.quantile(turns or [0.0], [0.5, 0.99, 0.999, 1.0])]
        print(_TURNS + json.dumps(figures), flush=True)

    signal.signal(signal.SIGUSR1, report)
    asyncio.set_event_loop_policy(Policy())
    sys.argv = ["jitney", "serve", *arguments]
    return jitney()


def _turns_of(process: subprocess.Popen[str]) -> list[float]:
    process.send_signal(signal.SIGUSR1)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(_TURNS):
            return json.loads(line.removeprefix(_TURNS))
    raise SystemExit("the server has ended")


def _probe(server: Server, stop: threading.Event, silences: Silences) -> None:
    connection = server.connect()
    while not stop.wait(_PAUSE_S):
        started = time.perf_counter()
        connection.request("GET", "/livez")
        connection.getresponse().read()
        silences.probes.append(time.perf_counter() - started)
    connection.close()


def _read_streams(server: Server, stop: threading.Event, silences: Silences) -> None:
    """Read one stream after another until stopped."""
    body = {"model": server.model, "prompt": [5], "stream": True, "ignore_eos": True}
    data = json.dumps(body | {"max_tokens": server.context - 8})
    while not stop.is_set():
        connection = server.connect()
        connection.request("POST", "/v1/completions", data, _JSON)
        answer = connection.getresponse()
        answer.readline()
        last = time.perf_counter()
        while not stop.is_set() and (line := answer.readline()):
            if line.startswith(b"data:"):
                now = time.perf_counter()
                silences.streams.append(now - last)
                last = now
        connection.close()


def _send_scored(server: Server) -> None:
    prompts = [
        [3 + (place + prompt) % 200 for place in range(_scored_length(server))]
        for prompt in range(4)
    ]
    while True:
        _expect(200, *server.complete(prompt=prompts, echo=True, logprobs=20, max_tokens=1))


def _scored_length(server: Server) -> int:
    return min(_SCORED_PROMPT, server.context - 2)


def _send_large(server: Server) -> None:
    """Send a megabyte of token ids, which admission may refuse, and a text that is too long."""
    length = server.context - 2
    prompts = [
        [3 + place % 6 for place in range(length)] for _ in range(min(128, 500_000 // length))
    ]
    while True:
        status, _ = server.complete(prompt=prompts, max_tokens=1)
        assert status in (200, 429), status
        status, _ = server.complete(prompt=["word " * 8000] * 25, max_tokens=1)
        assert status in (200, 400, 429), status


def _send_page(server: Server) -> None:
    while True:
        for path in _PAGE:
            _expect(200, *server.get(path))


def _expect(wanted: int, status: int, body: bytes) -> None:
    if status != wanted:
        raise SystemExit(f"status {status}: {body[:300].decode(errors='replace')}")


def _fill_history(server: Server, count: int) -> None:
    """Send `count` short requests."""
    with ThreadPoolExecutor(16) as threads:
        work = [threads.submit(server.complete, prompt=[7, 8], max_tokens=2) for _ in range(count)]
        for each in work:
            _expect(200, *each.result())


@contextmanager
def _beside(send: Callable[[Server], None] | None, server: Server) -> Iterator[None]:
    """A process that sends requests while the block runs."""
    if send is None:
        yield
        return
    process = multiprocessing.get_context("spawn").Process(target=send, args=(server,))
    process.start()
    time.sleep(1.0)
    try:
        yield
        assert process.is_alive(), "the load ended early"
    finally:
        process.terminate()
        process.join()


def measure(
    server: Server, send: Callable[[Server], None] | None, seconds: float, streams: int
) -> Silences:
    silences = Silences()
    stop = threading.Event()
    threads = [threading.Thread(target=_probe, args=(server, stop, silences))]
    for _ in range(streams):
        threads.append(threading.Thread(target=_read_streams, args=(server, stop, silences)))
    with _beside(send, server):
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        stop.set()
        for thread in threads:
            thread.join()
    return silences


def _row(name: str, silences: Silences) -> str:
    cells = [name, str(len(silences.probes))]
    for values in (silences.probes, silences.streams):
        ms = 1000 * np.asarray(values or [np.nan])
        cells += [f"{np.quantile(ms, q):.1f}" for q in (0.5, 0.99, 0.999)]
        cells.append(f"{ms.max():.1f}")
    cells.append(" / ".join(f"{value:.1f}" for value in silences.turns[2:]))
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="of jitney serve, which gets flags unknown here, too")
    parser.add_argument("--port", type=int, default=9100)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each case")
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--history", type=int, default=8000, help="requests for the page")
    args, others = parser.parse_known_args()
    command = [sys.executable, __file__, "--serve", args.model, "--port", str(args.port)]
    process = subprocess.Popen([*command, *others], stdout=subprocess.PIPE, text=True)
    try:
        _measure_all(process, f"127.0.0.1:{args.port}", args)
    finally:
        process.terminate()
        process.wait()


def _measure_all(process: subprocess.Popen[str], address: str, args: argparse.Namespace) -> None:
    running.Server(f"http://{address}", process, "").wait_ready()
    server = Server(address)
    [model] = json.loads(server.get("/v1/models")[1])["data"]
    server = Server(address, model["id"], model["max_model_len"])
    print(
        f"{cpu_name()}; load {os.getloadavg()[0]:.0f}; {server.model}, {args.streams} streams; ms\n"
    )
    print(
        "| beside | probes | p50 | p99 | p99.9 | max | stream p50 | p99 | p99.9 | max "
        "| turns p99 / p99.9 / max |"
    )
    print("|---" * 11 + "|")
    scored = f"4 x {_scored_length(server)} tokens scored with 20"
    cases: dict[str, Callable[[Server], None] | None] = {
        "nothing": None,
        scored: _send_scored,
        "bodies of 1 MB": _send_large,
        f"the page, {args.history} requests": _send_page,
    }
    for name, send in cases.items():
        if send is _send_page:
            _fill_history(server, args.history)
        _turns_of(process)
        silences = measure(server, send, args.seconds, args.streams)
        silences.turns = _turns_of(process)
        print(_row(name, silences), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        sys.exit(serve(sys.argv[2:]))
    main()
