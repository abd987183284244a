"""Measures what clients get from a server under ten times the load that it can serve.

    python docs/benchmarks/overload.py [--model tiny-random] [--minutes 5] [--load 10]
        [--max-wait-s 5] [--json FILE]

Starts `jitney serve`, measures its capacity (requests a second when it is full), and sends requests
at random times in an open loop: first at 0.9 of the capacity, then at `--load` times of it, each
for `--minutes`. A client that gets a 429 comes back after Retry-After-Ms, at most five times.
Prints for both phases the time to the first token of accepted requests (from their arrival), the
time to a refusal, the share of requests without any answer, the share of returning clients that
were accepted, and the server's memory at the start and the end, with its growth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from running import Server, serving

from jitney.engine.common.machine import cpu_name

#: Lengths of prompts and answers, tokens.
PROMPT, OUTPUT = (8, 64), (60, 180)
#: Seconds in which the capacity is measured, after a warm-up of the same length.
CAPACITY_S = 20.0
#: Requests open at a time during the capacity measurement, as a multiple of the seats.
CROWD = 2
#: Most times that a client comes back.
RETURNS = 5
#: Seconds between two memory samples.
LOOK_S = 5.0
#: Share of a phase in which caches fill, left out of the slope of memory growth.
WARM_UP = 0.2
#: Most seconds that an answer may take.
ANSWER_S = 300.0


@dataclass
class Try:
    """One request sent."""

    came: float  # time.monotonic()
    returned: bool  # a refused client came back
    status: int = 0  # of the answer; 0: none
    first_token_s: float | None = None  # since the request was sent
    answered_s: float = 0.0  # from sending to the end of the response's head
    whole: bool = False
    retry_after_s: float = 0.0  # from the header Retry-After-Ms


@dataclass
class Phase:
    """Measurements of clients at one load."""

    name: str
    load: float  # new requests a second
    ended: float = 0.0  # time.monotonic() of the last arrival
    tries: list[Try] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)  # delay of sending after the scheduled time
    memory: list[tuple[float, float, float]] = field(default_factory=list)  # s; MB server, core

    def taken(self) -> list[Try]:
        return [one for one in self.tries if one.status == 200]

    def returns(self) -> list[Try]:
        return [one for one in self.tries if one.returned]

    def first_token_s(self, share: float) -> float:
        """A quantile of the time to the first token of accepted requests."""
        times = [one.first_token_s for one in self.taken() if one.first_token_s is not None]
        return float(np.quantile(times, share)) if times else float("nan")

    def refused_s(self, share: float) -> float:
        """A quantile of the time to the refusal of refused requests."""
        times = [one.answered_s for one in self.tries if one.status == 429]
        return float(np.quantile(times, share)) if times else float("nan")

    def growth_mb(self) -> float:
        """Growth of the server's and the core's memory, MB an hour."""
        warm = np.array(self.memory[int(WARM_UP * len(self.memory)) :])
        if len(warm) < 3:
            return float("nan")
        return float(np.polyfit(warm[:, 0] / 3600, warm[:, 1] + warm[:, 2], 1)[0])

    def reset(self) -> float:
        """Share of the requests without any answer."""
        return sum(one.status == 0 for one in self.tries) / max(1, len(self.tries))

    def as_json(self) -> dict[str, Any]:
        returns = self.returns()
        return {
            "phase": self.name,
            "load_per_s": self.load,
            "came": len(self.tries) - len(returns),
            "statuses": dict(Counter(one.status for one in self.tries)),
            "taken": len(self.taken()),
            "taken_not_whole": sum(not one.whole for one in self.taken()),
            "returned": len(returns),
            "returned_and_taken": sum(one.status == 200 for one in returns),
            "first_token_p50_s": self.first_token_s(0.5),
            "first_token_p99_s": self.first_token_s(0.99),
            "refused_p99_s": self.refused_s(0.99),
            "refused_last_s": self.refused_s(1.0),
            "reset": self.reset(),
            "sent_late_p99_s": float(np.quantile(self.late_s, 0.99)),
            "memory_mb": [self.memory[0][1:], self.memory[-1][1:]],
            "growth_mb_per_h": self.growth_mb(),
        }


def bodies(model: str, seed: int) -> Iterator[dict[str, Any]]:
    draw = random.Random(seed)
    while True:
        prompt = [draw.randrange(10, 400) for _ in range(draw.randint(*PROMPT))]
        yield {
            "model": model,
            "prompt": prompt,
            "max_tokens": draw.randint(*OUTPUT),
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
        }


async def ask(server: Server, body: dict[str, Any], *, returned: bool = False) -> Try:
    """Send a request and read its answer to the end."""
    one = Try(time.monotonic(), returned)
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            server.client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            one.status, one.answered_s = answer.status_code, time.monotonic() - one.came
            one.retry_after_s = float(answer.headers.get("retry-after-ms", 0)) / 1000
            async for piece in answer.aiter_bytes():
                if one.first_token_s is None and b"data:" in piece:  # not a keep-alive comment
                    one.first_token_s = time.monotonic() - one.came
                one.whole = piece.endswith(b"data: [DONE]\n\n")
    except (httpx.HTTPError, TimeoutError):
        one.whole = False
    return one


async def capacity(server: Server, seats: int, seconds: float) -> float:
    """Requests a second of a server whose seats are all taken."""
    source = bodies(server.model, 0)
    begin = time.monotonic() + seconds
    end = begin + seconds
    count = 0

    async def keep_asking() -> None:
        nonlocal count
        while time.monotonic() < end:
            body = next(source)
            one = await ask(server, body)
            while one.status == 429:
                await asyncio.sleep(one.retry_after_s)
                one = await ask(server, body)
            count += one.whole and begin < time.monotonic() < end

    await asyncio.gather(*(keep_asking() for _ in range(CROWD * seats)))
    return count / seconds


async def come(server: Server, phase: Phase, body: dict[str, Any]) -> None:
    """One client: it sends a request, and again after each 429 while the phase lasts."""
    one = await ask(server, body)
    phase.tries.append(one)
    for _ in range(RETURNS):
        if one.status != 429 or time.monotonic() + one.retry_after_s > phase.ended:
            return
        await asyncio.sleep(one.retry_after_s)
        one = await ask(server, body, returned=True)
        phase.tries.append(one)


async def run_phase(server: Server, name: str, load: float, seconds: float, seed: int) -> Phase:
    """Send requests at random times, `load` a second on average, each by a client of its own."""
    phase = Phase(name, load, ended=time.monotonic() + seconds)
    looking = asyncio.create_task(look(server, phase))
    draw, source = random.Random(seed), bodies(server.model, seed)
    next_at = time.monotonic()
    async with asyncio.TaskGroup() as group:
        while next_at < phase.ended:
            await asyncio.sleep(max(0.0, next_at - time.monotonic()))
            phase.late_s.append(time.monotonic() - next_at)
            group.create_task(come(server, phase, next(source)))
            next_at += draw.expovariate(load)
    looking.cancel()
    return phase


async def look(server: Server, phase: Phase) -> None:
    """Sample the memory every LOOK_S."""
    started = time.monotonic()
    while True:
        server_mb = server.process.memory_info().rss / 1e6
        core_mb = server.core().memory_info().rss / 1e6
        phase.memory.append((time.monotonic() - started, server_mb, core_mb))
        await asyncio.sleep(LOOK_S)


def show(phase: Phase) -> None:
    facts = phase.as_json()
    server, core = zip(*facts["memory_mb"], strict=True)
    back = "-"
    if facts["returned"]:
        share = facts["returned_and_taken"] / facts["returned"]
        back = f"{share:.1%} of {facts['returned']:,}"
    print(
        f"| {phase.name} | {phase.load:.1f} | {facts['came']:,} | {facts['taken']:,} | "
        f"{facts['first_token_p50_s']:.2f} / {facts['first_token_p99_s']:.2f} | "
        f"{facts['refused_p99_s']:.2f} / {facts['refused_last_s']:.2f} | {facts['reset']:.1%} | "
        f"{back} | "
        f"{server[0]:.0f} + {core[0]:.0f} | {server[1]:.0f} + {core[1]:.0f} | "
        f"{facts['growth_mb_per_h']:+.0f} | {1e3 * facts['sent_late_p99_s']:.0f} |",
        flush=True,
    )
    others = {status: n for status, n in facts["statuses"].items() if status not in (200, 429)}
    if others or facts["taken_not_whole"]:
        print(f"  other answers: {others}; cut off: {facts['taken_not_whole']}", flush=True)


async def measure(args: argparse.Namespace) -> list[Phase]:
    flags = ("--max-seats", str(args.seats))
    if args.max_wait_s is not None:
        flags += ("--max-predicted-wait-s", f"{args.max_wait_s:g}")
    with (
        tempfile.TemporaryDirectory(prefix="jitney-overload-") as folder,
        serving(args.model, Path(folder), *flags) as server,
    ):
        fit = await capacity(server, args.seats, args.capacity_s)
        print(f"{args.model}, {cpu_name()}; {fit:.2f} requests/s when full\n")
        print(
            "| load | come anew a second | came | taken | first token p50 / p99, s | "
            "refused after, p99 / last, s | reset | of those who came back when told to, "
            "taken | MB before | after | growth, MB an hour | sent late p99, ms |\n"
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
            flush=True,
        )
        phases = []
        for seed, times in enumerate((0.9, args.load), 1):
            name = f"{times:g} of what fits"
            phases.append(await run_phase(server, name, times * fit, 60 * args.minutes, seed))
            show(phases[-1])
        return phases


def main() -> None:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--model", default="tiny-random")
    flags.add_argument("--minutes", type=float, default=5.0, help="of each load")
    flags.add_argument("--load", type=float, default=10.0, help="times what fits")
    flags.add_argument("--seats", type=int, default=16)
    flags.add_argument("--capacity-s", type=float, default=CAPACITY_S)
    flags.add_argument("--max-wait-s", type=float, help="the server's max_predicted_wait_s")
    flags.add_argument("--json")
    args = flags.parse_args()
    phases = asyncio.run(measure(args))
    if args.json:
        Path(args.json).write_text(json.dumps([phase.as_json() for phase in phases], indent=1))


if __name__ == "__main__":
    main()
