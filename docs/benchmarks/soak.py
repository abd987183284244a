"""Memory of a running server over many requests: nothing may grow.

    python docs/benchmarks/soak.py --url http://127.0.0.1:8000 --pid PID [--requests 5000]

PID: the `jitney serve` process (its core is its child). Random prompts, every fifth streamed, every
seventh sampled with log-probabilities, every eleventh abandoned after its first piece. Prints
resident memory after each fifth of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time

import httpx
import psutil


def resident(pid: int) -> list[float]:
    """MB of the server and of its core."""
    server = psutil.Process(pid)
    return [process.memory_info().rss / 1e6 for process in (server, *server.children())]


async def one(client: httpx.AsyncClient, number: int) -> int:
    """Send one request of the kind its number says; its status."""
    draw = random.Random(number)
    body = {
        "model": "smollm2-135m",
        "prompt": [draw.randrange(100, 40000) for _ in range(draw.randrange(1, 60))],
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


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--streams", type=int, default=24)
    args = parser.parse_args()
    numbers, statuses, started = iter(range(args.requests)), {}, time.monotonic()

    async def worker(client: httpx.AsyncClient) -> None:
        for number in numbers:
            status = await one(client, number)
            statuses[status] = statuses.get(status, 0) + 1
            if sum(statuses.values()) % (args.requests // 5) == 0:
                print(
                    f"{sum(statuses.values()):6} requests, {time.monotonic() - started:5.0f} s, "
                    f"MB {[round(mb) for mb in resident(args.pid)]} {statuses}",
                    flush=True,
                )

    async with httpx.AsyncClient(base_url=args.url, timeout=120) as client:
        await asyncio.gather(*(worker(client) for _ in range(args.streams)))


if __name__ == "__main__":
    asyncio.run(main())
