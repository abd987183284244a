"""How long a client that asks for little waits for its first token beside one that asks for all
that the server takes.

    python docs/benchmarks/fairness.py [--model smollm2-135m] [--streams 110] [--asks 40]
        [--order fcfs]

Starts `jitney serve` with two keys and its default settings. One key asks short questions, one
after the other: first alone, then beside `--streams` streams of the other key, each of which begins
anew when it ends. Prints the time to the first token of the short questions, and by how much the
flood makes it longer. `--order` sets another order than the one of a server with keys.
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
from faults import Server, serving

from jitney.engine.common.machine import cpu_name

#: Tokens of a short question's prompt and answer, and of those of the flood.
SHORT, LONG = (20, 16), (60, 120)
#: Seconds of the flood before anything is measured.
WARM_UP_S = 10.0
#: Short questions before any is measured.
WARM_UP = 3
PAUSE_S = 0.2
MODEST, GREEDY = "modest", "greedy"


def body_of(lengths: tuple[int, int], seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    n_prompt, n_output = lengths
    return {
        "prompt": [draw.randrange(10, 400) for _ in range(n_prompt)],
        "max_tokens": n_output,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
    }


async def first_token_s(server: Server, seed: int) -> float:
    """Ask a short question, and read the answer to its end. Infinite for one that is refused."""
    headers = {"authorization": f"Bearer {MODEST}"}
    began, first = time.monotonic(), float("inf")
    async with server.client.stream(
        "POST", "/v1/completions", json=body_of(SHORT, seed), headers=headers
    ) as answer:
        async for piece in answer.aiter_bytes():
            if first == float("inf") and answer.status_code == 200 and b"data:" in piece:
                first = time.monotonic() - began
    return first


async def ask_in_turn(server: Server, asks: int, seed: int) -> list[float]:
    """First tokens of short questions, seconds."""
    times: list[float] = []
    for number in range(WARM_UP + asks):
        times.append(await first_token_s(server, seed + number))
        await asyncio.sleep(PAUSE_S)
    return times[WARM_UP:]


async def flood_once(server: Server, seed: int) -> bool:
    """A stream of the other key, read as bytes: a client that looks at each event takes half a core
    of the server's machine. Whether it was taken.
    """
    content = json.dumps(body_of(LONG, seed)).encode()
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
    """Streams of the other key, for ever."""

    async def keep_asking(number: int) -> None:
        for seed in itertools.count(1_000_000 * number):
            taken = False
            with contextlib.suppress(OSError):
                taken = await flood_once(server, seed)
            if not taken:
                await asyncio.sleep(1.0)

    await asyncio.gather(*(keep_asking(number) for number in range(streams)))


def show(name: str, times: list[float]) -> None:
    p50, p90, worst = (1000 * float(np.quantile(times, share)) for share in (0.5, 0.9, 1.0))
    print(f"| {name} | {len(times)} | {p50:.0f} | {p90:.0f} | {worst:.0f} |", flush=True)


def show_servers_view(record: Path, asks: int) -> None:
    """record: the server's. The modest key came first."""
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    own = [line for line in lines if line["tenant"] == "tenant-1" and line["ttft_s"] is not None]
    for name, part in (("alone", own[WARM_UP : WARM_UP + asks]), ("beside", own[-asks:])):
        queue, first = (
            1000 * float(np.median([line[field] for line in part]))
            for field in ("queue_s", "ttft_s")
        )
        print(
            f"{name}, at the server: seat after {queue:.0f} ms, first token after {first:.0f} (p50)"
        )


async def measure(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="jitney-fairness-") as name:
        folder = Path(name)
        keys = folder / "keys"
        keys.write_text(f"{MODEST}\n{GREEDY}\n")
        keys.chmod(0o600)
        record = folder / "record.jsonl"
        flags = ["--api-key-file", str(keys), "--record", str(record)]
        if args.order:
            flags += ["--order", args.order]
        async with serving(args.model, folder, *flags) as server:
            print(f"{args.model}, {cpu_name()}, order {args.order or 'of a server with keys'}\n")
            print("| a modest key | questions | first token p50, ms | p90 | longest |")
            print("|---|---|---|---|---|", flush=True)
            alone = await ask_in_turn(server, args.asks, 1)
            show("alone", alone)
            flooding = asyncio.create_task(flood(server, args.streams))
            await asyncio.sleep(WARM_UP_S)
            beside = await ask_in_turn(server, args.asks, 1)
            flooding.cancel()
            await asyncio.gather(flooding, return_exceptions=True)
            show(f"beside {args.streams} streams of another", beside)
            ratio = float(np.median(beside) / np.median(alone))
            print(f"\n{ratio:.2f} times as long (p50)")
        show_servers_view(record, args.asks)


def main() -> None:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--model", default="smollm2-135m")
    flags.add_argument("--streams", type=int, default=110)
    flags.add_argument("--asks", type=int, default=40)
    flags.add_argument("--order", default="")
    asyncio.run(measure(flags.parse_args()))


if __name__ == "__main__":
    main()
