"""Watches the resources of a running server over a long time: none may grow.

    python docs/benchmarks/soak.py --url http://127.0.0.1:8000 --pid PID [--minutes 60]
    python docs/benchmarks/soak.py --serve tiny-random --pause 1 [--minutes 60]

PID: the `jitney serve` process. `--serve` starts one of its own instead, with `memory_probe.py` in
it and in its core. Clients send random prompts, `--pause` seconds apart: every fifth streamed,
every seventh sampled with log-probabilities, every eleventh abandoned after its first piece; some
are conversations under a schema, stored responses, jobs and invalid requests. One client reads the
page's feed and /metrics. Prints resident memory, descriptors and threads during the run; at the end
the growth of each per hour, after the first fifth of the time and in the second half; and with
`--serve` the causes of growth in the second half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from running import serving

#: Names of the watched values, in the order of `held`.
NAMES = ("server MB", "core MB", "server descriptors", "core descriptors", "threads")
#: Seconds between two samples, and lines printed over the whole time.
LOOK_S, LINES = 5.0, 12
#: Shares of the time in which caches fill, left out of the slopes.
WARM_UPS = (0.2, 0.5)
#: Causes printed for each process.
CAUSES = 12


def core_of(server: psutil.Process) -> psutil.Process:
    """The server's core; its other children render chats, or write a look of the probe."""
    for child in server.children():
        with suppress(psutil.Error):
            if "jitney.engine.core.process" in child.cmdline():
                return child
    raise LookupError("no core runs")


def held(server: psutil.Process, core: psutil.Process) -> list[float]:
    """Current values of NAMES."""
    return [
        server.memory_info().rss / 1e6,
        core.memory_info().rss / 1e6,
        server.num_fds(),
        core.num_fds(),
        server.num_threads() + core.num_threads(),
    ]


SCHEMA = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}


async def one(client: httpx.AsyncClient, model: str, number: int) -> int:
    """Send one request, of a kind chosen by its number; returns its status."""
    draw = random.Random(number)
    words = " ".join(str(draw.randrange(1000)) for _ in range(draw.randrange(1, 20)))
    if number % 13 == 0:
        schema = SCHEMA | {"title": f"answer {draw.randrange(200)}"}
        body = {
            "model": model,
            "messages": [{"role": "user", "content": words}],
            "max_tokens": 12,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema},
            },
        }
        return (await client.post("/v1/chat/completions", json=body)).status_code
    if number % 17 == 0:
        body = {"model": model, "input": words, "max_output_tokens": 4, "store": True}
        return (await client.post("/v1/responses", json=body)).status_code
    if number % 19 == 0:
        return (await client.post("/v1/completions", json={"prompt": words, "n": 0})).status_code
    body = {
        "model": model,
        "prompt": [draw.randrange(100, 500) for _ in range(draw.randrange(1, 60))],
        "max_tokens": draw.randrange(1, 12),
        "ignore_eos": True,
        "temperature": 0.0,
    }
    if number % 31 == 0:
        job = {"endpoint": "/v1/completions", "body": body}
        return (await client.post("/v1/jobs", json=job)).status_code
    if number % 7 == 0:
        body |= {"temperature": 1.0, "logprobs": 5, "n": 2, "presence_penalty": 0.5}
    if number % 5 and number % 11:
        return (await client.post("/v1/completions", json=body)).status_code
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        async for _ in answer.aiter_lines():
            if number % 11 == 0:
                break
        return answer.status_code


async def view(client: httpx.AsyncClient, until: float) -> None:
    """Read the page's feed, and /metrics every LOOK_S, until the time is over."""

    async def read_feed() -> None:
        async with client.stream("GET", "/dashboard/feed") as answer:
            async for _ in answer.aiter_bytes():
                pass

    reading = asyncio.create_task(read_feed())
    while time.monotonic() < until:
        await client.get("/metrics")
        await asyncio.sleep(LOOK_S)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def keep_asking(
    client: httpx.AsyncClient,
    model: str,
    first: int,
    until: float,
    pause_s: float,
    statuses: Counter[int],
) -> None:
    """Send requests of one client until the time is over."""
    number = first
    while time.monotonic() < until:
        statuses[await one(client, model, number)] += 1
        number += 1
        await asyncio.sleep(pause_s * 2 * random.random())


async def watch(pid: int, until: float, statuses: Counter[int]) -> np.ndarray:
    """Rows of [hours since the start, values of NAMES], one every LOOK_S."""
    server = psutil.Process(pid)
    core = core_of(server)
    started = time.monotonic()
    every = (until - started) / LINES
    rows, next_print = [], started
    while (now := time.monotonic()) < until:
        rows.append([(now - started) / 3600, *held(server, core)])
        if now >= next_print:
            next_print += every
            values = ", ".join(
                f"{name} {value:.0f}" for name, value in zip(NAMES, rows[-1][1:], strict=True)
            )
            print(f"{now - started:6.0f} s: {values}; answers {dict(statuses)}", flush=True)
        await asyncio.sleep(LOOK_S)
    return np.array(rows)


def print_slopes(rows: np.ndarray) -> None:
    for share in WARM_UPS:
        warm = rows[int(share * len(rows)) :]
        for column, name in enumerate(NAMES, 1):
            slope = np.polyfit(warm[:, 0], warm[:, column], 1)[0]
            ends = f"{warm[0, column]:.0f} to {warm[-1, column]:.0f}"
            print(f"after {share:.0%} of the time, {name}: {slope:+.2f} an hour, {ends}")


def print_causes(folder: Path, name: str) -> None:
    """Print growth by cause from the middle of the looks to the last: totals, allocating lines and
    types of objects; and the fill of bounded containers.
    """
    looks: list[dict[str, Any]] = [
        json.loads(file.read_text()) for file in sorted(folder.glob(f"{name}-*.json"))
    ]
    first, last = looks[len(looks) // 2], looks[-1]
    hours = (last["seconds"] - first["seconds"]) / 3600
    print(f"\n{name}, {60 * hours:.0f} minutes: MB first, last, an hour")
    for key in (key for key, value in last.items() if isinstance(value, int)):
        scale = 1 if key == "python_blocks" else 1e6
        grown = (last[key] - first[key]) / scale
        print(f"  {key}: {first[key] / scale:.1f}, {last[key] / scale:.1f}, {grown / hours:+.2f}")
    for group, unit in (("lines", 1e3), ("types", 1)):
        before = first.get(group, {})
        grown = {
            key: np.subtract(value, before.get(key, np.zeros_like(value)))
            for key, value in last.get(group, {}).items()
        }
        print(f"  {group} that grew most" + (" (kB, blocks)" if unit > 1 else ""))
        for key, more in sorted(grown.items(), key=lambda item: -np.ravel(item[1])[0])[:CAUSES]:
            size, *blocks = np.ravel(more)
            print(f"    {size / unit:+,.0f} {' '.join(f'{n:+,}' for n in blocks)} {key}")
    for key, (n, most) in last["containers"].items():
        before = first["containers"].get(key, [0])[0]
        print(f"  {key}: {before:,} to {n:,}" + (f" of {most:,}" if most else ""))


async def soak(url: str, pid: int, args: argparse.Namespace) -> None:
    until = time.monotonic() + 60 * args.minutes
    statuses: Counter[int] = Counter()
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        asking = [
            keep_asking(client, model, 1_000_000 * stream, until, args.pause, statuses)
            for stream in range(args.streams)
        ]
        beside = asyncio.gather(view(client, until), *asking)
        rows = await watch(pid, until, statuses)
        await beside
    print(f"{sum(statuses.values()):,} answers in {args.minutes:g} minutes: {dict(statuses)}")
    print_slopes(rows)


@contextmanager
def probed(model: str, folder: Path) -> Iterator[tuple[str, int]]:
    """A server started here that writes looks into a folder: its URL and process id."""
    site = folder / "site"
    site.mkdir()
    here = str(Path(__file__).parent)
    (site / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({here!r})\nimport memory_probe\nmemory_probe.start()\n"
    )
    os.environ["MEMORY_LOOKS"] = str(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    with serving(model, folder) as server:
        yield server.url, server.process.pid


async def main() -> None:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--url", default="http://127.0.0.1:8000")
    started = flags.add_mutually_exclusive_group(required=True)
    started.add_argument("--pid", type=int)
    started.add_argument("--serve", metavar="MODEL")
    flags.add_argument("--minutes", type=float, default=60.0)
    flags.add_argument("--streams", type=int, default=24)
    flags.add_argument("--pause", type=float, default=0.0, help="seconds, on average")
    args = flags.parse_args()
    if args.pid:
        return await soak(args.url, args.pid, args)
    with tempfile.TemporaryDirectory(prefix="jitney-soak-") as name:
        folder = Path(name)
        with probed(args.serve, folder) as (url, pid):
            await soak(url, pid, args)
        for process in ("server", "core"):
            print_causes(folder, process)


if __name__ == "__main__":
    asyncio.run(main())
