"""Measures the cost of a fleet's endpoint: its CPU time for a request, and for a token of a stream.

    python docs/benchmarks/fleet_ingress.py [--requests 600] [--router prefix] [--tokens 48]

Two scripted engines run in processes of their own, `jitney fleet serve` is in front of them, and
the clients run here. The CPU time is the endpoint's own, so other work on the machine makes it a
little larger, not many times. Needs psutil.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
from running import Server, running_fleet

from jitney.engine.common.machine import cpu_name
from jitney.engine.common.ports import free_port

ROOT = Path(__file__).parents[2]
_ENGINE = ROOT / "tests" / "support" / "fake_fleet_engine.py"
_AT_ONCE = 8


@contextlib.contextmanager
def _engine() -> Iterator[str]:
    """Start a scripted engine, which ends when its standard input does; yields its URL."""
    port = free_port()
    words = [sys.executable, str(_ENGINE), "--served-model-name", "m"]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    environ = os.environ | {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{_ENGINE.parent}"}
    with subprocess.Popen(words, stdin=subprocess.PIPE, env=environ) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


async def _ask(url: str, first: int, count: int, tokens: int, stream: bool) -> None:
    """Send `count` chats of three messages, several at once."""
    numbers = iter(range(first, first + count))
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:

        async def client() -> None:
            for number in numbers:
                messages = [{"role": "user", "content": f"{number}?"}]
                messages += [{"role": "assistant", "content": "."}, *messages]
                body = {"model": "m", "messages": messages, "max_tokens": tokens, "stream": stream}
                (await http.post("/v1/chat/completions", json=body)).raise_for_status()

        await asyncio.gather(*(client() for _ in range(_AT_ONCE)))


def _measured(fleet: Server, count: int, tokens: int, *, stream: bool) -> float:
    """CPU seconds of the endpoint per request."""
    asyncio.run(_ask(fleet.url, 0, count // 4, tokens, stream))
    before = fleet.cpu_s()
    asyncio.run(_ask(fleet.url, count, count, tokens, stream))
    return (fleet.cpu_s() - before) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=48, help="of a stream")
    parser.add_argument("--router", default="prefix")
    parser.add_argument("--fleet", default="", help="more lines of [fleet]")
    args = parser.parse_args()
    print(f"{cpu_name()}, router {args.router}")
    with contextlib.ExitStack() as running:
        urls = [running.enter_context(_engine()) for _ in range(2)]
        table = f"urls = {urls}\nrouter = '{args.router}'\n"
        lines = f"log_level = 'warning'\n{args.fleet}\n"
        fleet = running.enter_context(running_fleet(table, lines=lines, ready="/readyz"))
        plain = _measured(fleet, args.requests, 1, stream=False)
        short = _measured(fleet, args.requests, 1, stream=True)
        long = _measured(fleet, args.requests // 4, args.tokens, stream=True)
    token = (long - short) / (args.tokens - 1)
    print(f"a plain answer: {1e3 * plain:.2f} ms; a stream: {1e3 * short:.2f} ms to begin with")
    print(f"and {1e6 * token:.0f} us for each token after the first")


if __name__ == "__main__":
    main()
