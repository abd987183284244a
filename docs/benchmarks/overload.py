"""What clients get of a server that ten times too many come to.

    python docs/benchmarks/overload.py [--model tiny-random] [--minutes 5] [--load 10]
        [--max-wait-s 5] [--json FILE]

Starts `jitney serve`, measures how many requests a second it serves when it is full, and sends
random requests on their own time (an open loop): first at 0.9 of that, then at `--load` times of
it, each for so many minutes. Whoever is answered 429 comes back when Retry-After-Ms says, at most
five times.
Prints for both the time to the first token of those who were taken (from the moment they came), the
time to a refusal, the share that got no answer at all, the share of those who came back when told
to and were taken, and the server's memory at the start and the end, with how fast it grew.
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
#: Seconds in which the capacity is measured, after as many in which nothing is counted.
CAPACITY_S = 20.0
#: Requests open at a time while it is, as a multiple of the seats.
CROWD = 2
#: Times that a client comes back at most.
RETURNS = 5
#: Seconds between two looks at memory.
LOOK_S = 5.0
#: Share of a phase in which caches fill, which counts for no slope.
WARM_UP = 0.2
#: Seconds that an answer may take.
ANSWER_S = 300.0


@dataclass
class Try:
    """One request sent."""

    came: float  # time.monotonic()
    returned: bool  # it was told to come now
    status: int = 0  # of the answer; 0: none
    first_token_s: float | None = None  # since it came
    answered_s: float = 0.0  # since it came, to the end of the answer's head
    whole: bool = False
    retry_after_s: float = 0.0  # what it was told


@dataclass
class Phase:
    """What clients saw while so many came."""

    name: str
    load: float  # requests that came anew, a second
    ended: float = 0.0  # time.monotonic() of the last arrival
    tries: list[Try] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)  # how long after their time they were sent
    memory: list[tuple[float, float, float]] = field(default_factory=list)  # s; MB server, core

    def taken(self) -> list[Try]:
        return [one for one in self.tries if one.status == 200]

    def returns(self) -> list[Try]:
        return [one for one in self.tries if one.returned]

    def first_token_s(self, share: float) -> float:
        """A quantile over those who were taken."""
        times = [one.first_token_s for one in self.taken() if one.first_token_s is not None]
        return float(np.quantile(times, share)) if times else float("nan")

    def refused_s(self, share: float) -> float:
        """The same of those who were refused, to the refusal."""
        times = [one.answered_s for one in self.tries if one.status == 429]
        return float(np.quantile(times, share)) if times else float("nan")

    def growth_mb(self) -> float:
        """How fast the server's and the core's memory grew, MB an hour."""
        warm = np.array(self.memory[int(WARM_UP * len(self.memory)) :])
        if len(warm) < 3:
            return float("nan")
        return float(np.polyfit(warm[:, 0] / 3600, warm[:, 1] + warm[:, 2], 1)[0])

    def reset(self) -> float:
        """Share of the requests that got no answer at all."""
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
                if one.first_token_s is None and b"data:" in piece:  # no sign of life
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
    """One client: it comes, and again whenever it is told to before the phase is over."""
    one = await ask(server, body)
    phase.tries.append(one)
    for _ in range(RETURNS):
        if one.status != 429 or time.monotonic() + one.retry_after_s > phase.ended:
            return
        await asyncio.sleep(one.retry_after_s)
        one = await ask(server, body, returned=True)
        phase.tries.append(one)


async def run_phase(server: Server, name: str, load: float, seconds: float, seed: int) -> Phase:
    """So many come a second, each on its own time."""
    phase = Phase(name, load, ended=time.monotonic() + seconds)
    looking = asyncio.create_task(look(server, phase))
    draw, source = random.Random(seed), bodies(server.model, seed)
    due = time.monotonic()
    async with asyncio.TaskGroup() as group:
        while due < phase.ended:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            phase.late_s.append(time.monotonic() - due)
            group.create_task(come(server, phase, next(source)))
            due += draw.expovariate(load)
    looking.cancel()
    return phase


async def look(server: Server, phase: Phase) -> None:
    """Note the memory now and then."""
    started = time.monotonic()
    while True:
        server_mb = server.process.memory_info().rss / 1e6
        core_mb = server.core().memory_info().rss / 1e6
        phase.memory.append((time.monotonic() - started, server_mb, core_mb))
        await asyncio.sleep(LOOK_S)


def show(phase: Phase) -> None:
    found = phase.as_json()
    server, core = zip(*found["memory_mb"], strict=True)
    back = "-"
    if found["returned"]:
        share = found["returned_and_taken"] / found["returned"]
        back = f"{share:.1%} of {found['returned']:,}"
    print(
        f"| {phase.name} | {phase.load:.1f} | {found['came']:,} | {found['taken']:,} | "
        f"{found['first_token_p50_s']:.2f} / {found['first_token_p99_s']:.2f} | "
        f"{found['refused_p99_s']:.2f} / {found['refused_last_s']:.2f} | {found['reset']:.1%} | "
        f"{back} | "
        f"{server[0]:.0f} + {core[0]:.0f} | {server[1]:.0f} + {core[1]:.0f} | "
        f"{found['growth_mb_per_h']:+.0f} | {1e3 * found['sent_late_p99_s']:.0f} |",
        flush=True,
    )
    others = {status: n for status, n in found["statuses"].items() if status not in (200, 429)}
    if others or found["taken_not_whole"]:
        print(f"  other answers: {others}; cut off: {found['taken_not_whole']}", flush=True)


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
