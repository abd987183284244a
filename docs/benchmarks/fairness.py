"""Measures how long a light client waits for its first token beside a client that floods the
server.

    python docs/benchmarks/fairness.py [--model smollm2-135m] [--streams 110] [--asks 40]
        [--repeats 3] [--seats 32] [--order fcfs]

Starts `jitney serve` with two keys and its default settings, except for the seats; step sizes that
are not set are timed while it serves. The light key sends short questions one after the other:
alone, then beside `--streams` streams of the other key, each of which starts again when it ends;
`--repeats` times both. Prints the time to the first token of the short questions, by how much the
flood makes it longer, and the tokens a second of all clients. `--order` sets another order than the
default of a server with keys.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from running import Server, serving

from jitney.engine.common.machine import cpu_name

#: (prompt, answer) tokens of a request of the flood.
LONG = (60, 120)
#: Words of a short question, and tokens of its answer. The text of a token that ends within a
#: character is sent with the next token, so the questions are ordinary words.
N_WORDS, N_SHORT = 16, 16
WORDS = "the city lies on a wide river and its old market opens early in the morning"
#: Seconds of flood before the measurement starts.
WARM_UP_S = 10.0
#: Short questions sent as a warm-up.
WARM_UP = 3
PAUSE_S = 0.2
#: Seconds that the server needs to drop the flood's streams.
CALM_S = 2.0
MODEST, GREEDY, ADMIN = "modest", "greedy", "admin"
TOKENS = "jitney_generated_tokens_total"


def streamed(prompt: str | list[int], n_output: int) -> dict[str, Any]:
    """The body of a greedy streamed completion."""
    return {
        "prompt": prompt,
        "max_tokens": n_output,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
    }


def question(seed: int) -> dict[str, Any]:
    return streamed(" ".join(random.Random(seed).choices(WORDS.split(), k=N_WORDS)), N_SHORT)


def long_request(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    n_prompt, n_output = LONG
    return streamed([draw.randrange(10, 400) for _ in range(n_prompt)], n_output)


async def first_token_s(server: Server, seed: int) -> float:
    """Ask a short question and read the whole answer. Infinite if the question is refused."""
    headers = {"authorization": f"Bearer {MODEST}"}
    began, first = time.monotonic(), float("inf")
    async with server.client.stream(
        "POST", "/v1/completions", json=question(seed), headers=headers
    ) as answer:
        async for piece in answer.aiter_bytes():
            if first == float("inf") and answer.status_code == 200 and b"data:" in piece:
                first = time.monotonic() - began
    return first


async def ask_in_turn(server: Server, asks: int, seed: int) -> list[float]:
    """Seconds to the first token of each short question."""
    times: list[float] = []
    for number in range(WARM_UP + asks):
        times.append(await first_token_s(server, seed + number))
        await asyncio.sleep(PAUSE_S)
    return times[WARM_UP:]


async def flood_once(server: Server, seed: int) -> bool:
    """Read one stream of the other key as bytes; returns whether the server accepted it. Parsing
    each event would take half a core of the server's machine.
    """
    content = json.dumps(long_request(seed)).encode()
    url = server.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: %b\r\nconnection: close\r\n"
        b"authorization: Bearer %b\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (url.netloc, GREEDY.encode(), len(content), content)
    )
    try:
        status = await reader.readline()
        while await reader.read(1 << 16):
            pass
    finally:
        writer.close()
    return b" 200 " in status


async def flood(server: Server, streams: int) -> None:
    """Keep so many streams of the other key open until cancelled."""

    async def keep_asking(number: int) -> None:
        for seed in itertools.count(1_000_000 * number):
            accepted = False
            with contextlib.suppress(OSError):
                accepted = await flood_once(server, seed)
            if not accepted:
                await asyncio.sleep(1.0)

    await asyncio.gather(*(keep_asking(number) for number in range(streams)))


async def tokens_made(server: Server) -> float:
    """Tokens generated for all clients so far."""
    answer = await server.client.get("/metrics", headers={"authorization": f"Bearer {ADMIN}"})
    lines = [line for line in answer.text.splitlines() if line.startswith(TOKENS)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def show(name: str, times: list[float], tokens_s: float) -> None:
    p50, p95, worst = (1000 * float(np.quantile(times, share)) for share in (0.5, 0.95, 1.0))
    print(f"| {name} | {len(times)} | {p50:.0f} | {p95:.0f} | {worst:.0f} | {tokens_s:.0f} |")


async def measure_phase(server: Server, name: str, asks: int, seed: int) -> list[float]:
    began, before = time.monotonic(), await tokens_made(server)
    times = await ask_in_turn(server, asks, seed)
    tokens = await tokens_made(server) - before
    show(name, times, tokens / (time.monotonic() - began))
    return times


async def measure(args: argparse.Namespace) -> None:
    alone: list[float] = []
    beside: list[float] = []
    with tempfile.TemporaryDirectory(prefix="jitney-fairness-") as name:
        folder = Path(name)
        flags = ["--max-seats", str(args.seats)]
        for setting, keys in (("api", (MODEST, GREEDY)), ("admin", (ADMIN,))):
            file = folder / setting
            file.write_text("\n".join(keys))
            file.chmod(0o600)
            flags += [f"--{setting}-key-file", str(file)]
        if args.order:
            flags += ["--order", args.order]
        with serving(args.model, folder, *flags) as server:
            print(f"{args.model}, {cpu_name()}, order {args.order or 'of a server with keys'}\n")
            print("| a modest key | questions | first token p50, ms | p95 | longest | tokens/s |")
            print("|---|---|---|---|---|---|", flush=True)
            for seed in range(args.repeats):
                alone += await measure_phase(server, "alone", args.asks, seed)
                flooding = asyncio.create_task(flood(server, args.streams))
                await asyncio.sleep(WARM_UP_S)
                what = f"beside {args.streams} streams of another"
                beside += await measure_phase(server, what, args.asks, seed)
                flooding.cancel()
                await asyncio.gather(flooding, return_exceptions=True)
                await asyncio.sleep(CALM_S)
    for share in (0.5, 0.95):
        ratio = float(np.quantile(beside, share) / np.quantile(alone, share))
        print(f"p{100 * share:g}: {ratio:.2f} times as long")


def main() -> None:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--model", default="smollm2-135m")
    flags.add_argument("--streams", type=int, default=110)
    flags.add_argument("--asks", type=int, default=40)
    flags.add_argument("--repeats", type=int, default=3)
    flags.add_argument("--seats", type=int, default=32)
    flags.add_argument("--order", default="")
    asyncio.run(measure(flags.parse_args()))


if __name__ == "__main__":
    main()
