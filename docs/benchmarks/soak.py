"""What a running server holds over a long time: nothing may grow.

    python docs/benchmarks/soak.py --url http://127.0.0.1:8000 --pid PID [--minutes 60]

PID: the `jitney serve` process (its core is its largest child). Clients ask without a pause: random
prompts, every fifth streamed, every seventh sampled with log-probabilities, every eleventh
abandoned after its first piece. Prints resident memory, descriptors and threads as they go, and at
the end how fast each of them grew, in units an hour, after the first fifth of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter

import httpx
import numpy as np
import psutil

#: What is watched, in the order in which `held` gives it.
NAMES = ("server MB", "core MB", "server descriptors", "core descriptors", "threads")
#: Seconds between two looks, and lines printed over the whole time.
LOOK_S, LINES = 5.0, 12
#: Share of the time in which caches fill, which counts for no slope.
WARM_UP = 0.2


def held(pid: int) -> list[float]:
    """Values of NAMES, of the server and of its core."""
    server = psutil.Process(pid)
    (core,) = [
        child
        for child in server.children()
        if "jitney.engine.server.process.main" in child.cmdline()
    ]
    return [
        server.memory_info().rss / 1e6,
        core.memory_info().rss / 1e6,
        server.num_fds(),
        core.num_fds(),
        server.num_threads() + core.num_threads(),
    ]


async def one(client: httpx.AsyncClient, model: str, number: int) -> int:
    """Send one request of the kind its number says; its status."""
    draw = random.Random(number)
    body = {
        "model": model,
        "prompt": [draw.randrange(100, 500) for _ in range(draw.randrange(1, 60))],
        "max_tokens": draw.randrange(1, 12),
        "ignore_eos": True,
        "temperature": 0.0,
    }
    if number % 7 == 0:
        body |= {"temperature": 1.0, "logprobs": 5, "n": 2, "presence_penalty": 0.5}
    if number % 5 and number % 11:
        return (await client.post("/v1/completions", json=body)).status_code
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        async for _ in answer.aiter_lines():
            if number % 11 == 0:
                break
        return answer.status_code


async def keep_asking(
    client: httpx.AsyncClient, model: str, first: int, until: float, statuses: Counter[int]
) -> None:
    """One client, until the time is over."""
    number = first
    while time.monotonic() < until:
        statuses[await one(client, model, number)] += 1
        number += 1


async def watch(pid: int, until: float, statuses: Counter[int]) -> np.ndarray:
    """Rows of [hours since the start, values of NAMES], one every LOOK_S."""
    started = time.monotonic()
    every = (until - started) / LINES
    rows, due = [], started
    while (now := time.monotonic()) < until:
        rows.append([(now - started) / 3600, *held(pid)])
        if now >= due:
            due += every
            values = ", ".join(
                f"{name} {value:.0f}" for name, value in zip(NAMES, rows[-1][1:], strict=True)
            )
            print(f"{now - started:6.0f} s: {values}; answers {dict(statuses)}", flush=True)
        await asyncio.sleep(LOOK_S)
    return np.array(rows)


async def main() -> None:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--url", default="http://127.0.0.1:8000")
    flags.add_argument("--pid", type=int, required=True)
    flags.add_argument("--minutes", type=float, default=60.0)
    flags.add_argument("--streams", type=int, default=24)
    args = flags.parse_args()
    until = time.monotonic() + 60 * args.minutes
    statuses: Counter[int] = Counter()
    async with httpx.AsyncClient(base_url=args.url, timeout=120) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        asking = [
            keep_asking(client, model, 1_000_000 * stream, until, statuses)
            for stream in range(args.streams)
        ]
        rows, *_ = await asyncio.gather(watch(args.pid, until, statuses), *asking)
    warm = rows[int(WARM_UP * len(rows)) :]
    print(f"{sum(statuses.values()):,} answers in {args.minutes:g} minutes: {dict(statuses)}")
    for column, name in enumerate(NAMES, 1):
        slope = np.polyfit(warm[:, 0], warm[:, column], 1)[0]
        print(f"{name}: {slope:+.2f} an hour, {warm[0, column]:.0f} to {warm[-1, column]:.0f}")


if __name__ == "__main__":
    asyncio.run(main())
