"""Runs a batch beside live traffic, and a batch whose server is killed in the middle.

    python docs/benchmarks/batch.py [--rate 1] [--seconds 40] [--rounds 3] [--json FILE]

Starts `jitney serve` on this machine. First the same live traffic (an open loop: requests at random
times of a fixed seed) runs in turn without and with a batch of `--lines` requests beside it. Prints
the seconds from each request's scheduled time to its first token, and their ratio. Each batch is
cancelled when its turn is over. Then a batch runs alone; the server is killed with SIGKILL when a
third of it is answered, and started again. Prints how often each line is answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from running import READY_S, Server, serving

from jitney.engine.common.machine import cpu_name

#: Most seconds that a batch may take.
BATCH_S = 3600.0
#: Tokens of prompts and answers, of live requests and of batches: means of log-normal lengths.
LIVE, LINE = (96, 24), (48, 12)
COMPLETIONS = "/v1/completions"


@dataclass
class Turn:
    """Measurements of live traffic over some seconds."""

    beside: bool
    #: Seconds to the first token of each request.
    first_token_s: list[float] = field(default_factory=list)
    failed: int = 0
    #: Lines of the batch answered during this turn.
    lines: int = 0


@dataclass
class Killed:
    """Answers of a batch whose server was killed."""

    lines: int
    answered_before: int
    status: str
    answered_once: int
    answered_more_often: int
    missing: int


def lengths(rng: np.random.Generator, mean: int, count: int) -> list[int]:
    draws = rng.lognormal(np.log(mean) - 0.125, 0.5, count)
    return np.clip(draws.round(), 4, 4 * mean).astype(int).tolist()


def bodies(seed: int, count: int, means: tuple[int, int]) -> list[dict[str, Any]]:
    """`count` requests with prompts of random token ids."""
    rng = np.random.default_rng(seed)
    prompts, outputs = (lengths(rng, mean, count) for mean in means)
    return [
        {
            "prompt": rng.integers(100, 40000, prompt).tolist(),
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
        }
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def batch_file(count: int) -> bytes:
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": COMPLETIONS, "body": body}
        for number, body in enumerate(bodies(7, count, LINE))
    ]
    return "\n".join(map(json.dumps, lines)).encode()


def client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=READY_S, trust_env=False, limits=limits)


def server_of(args: argparse.Namespace, folder: Path) -> AbstractContextManager[Server]:
    return serving(args.model, folder, "--drain-s", "2", *args.serve_flags)


async def begin(http: httpx.AsyncClient, content: bytes) -> str:
    """Create a batch; returns its id."""
    files = {"file": ("lines.jsonl", content), "purpose": (None, "batch")}
    file = (await http.post("/v1/files", files=files)).raise_for_status().json()
    body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
    return (await http.post("/v1/batches", json=body)).raise_for_status().json()["id"]


async def until(http: httpx.AsyncClient, id: str, lines: int, *states: str) -> dict[str, Any]:
    """Wait until the batch is in one of the states or has `lines` answers; returns the batch."""
    deadline = time.monotonic() + BATCH_S
    while time.monotonic() < deadline:
        batch = (await http.get(f"/v1/batches/{id}")).raise_for_status().json()
        if batch["status"] in states or batch["request_counts"]["completed"] >= lines > 0:
            return batch
        await asyncio.sleep(0.3)
    raise TimeoutError(f"the batch is {batch['status']}")


async def ask(http: httpx.AsyncClient, body: dict[str, Any], due: float, turn: Turn) -> None:
    """Send one live request at the time `due`, and record it in `turn`."""
    await asyncio.sleep(due - time.monotonic())
    first = None
    try:
        async with http.stream("POST", COMPLETIONS, json=body | {"stream": True}) as reply:
            async for text in reply.aiter_lines():
                if first is None and text.startswith("data: {"):
                    first = time.monotonic() - due
    except httpx.HTTPError:
        first = None
    if first is None or reply.status_code != 200:
        turn.failed += 1
    else:
        turn.first_token_s.append(first)


async def live(http: httpx.AsyncClient, args: argparse.Namespace, seed: int, turn: Turn) -> None:
    """Send requests at random times, which are the same for the same seed."""
    rng = np.random.default_rng(seed)
    count = max(1, round(args.rate * args.seconds))
    at = np.sort(rng.uniform(0, args.seconds, count)) + time.monotonic() + 0.5
    requests = bodies(seed, count, LIVE)
    await asyncio.gather(
        *(ask(http, body, due, turn) for body, due in zip(requests, at.tolist(), strict=True))
    )


async def turns(args: argparse.Namespace, folder: Path) -> list[Turn]:
    done: list[Turn] = []
    with server_of(args, folder) as server:
        async with client(server.url) as http:
            await live(http, args, 99, Turn(False))  # warm-up: the first requests are slow
            for number in range(2 * args.rounds):
                # Without, with, with, without: cancels slow changes of the machine's speed.
                beside = number % 4 in (1, 2)
                turn = Turn(beside)
                if beside:
                    id = await begin(http, batch_file(args.lines))
                    await until(http, id, 1, "completed")
                await live(http, args, number // 2, turn)
                if beside:
                    await http.post(f"/v1/batches/{id}/cancel")
                    batch = await until(http, id, 0, "cancelled", "completed")
                    turn.lines = batch["request_counts"]["completed"]
                done.append(turn)
                print(describe(turn), flush=True)
    return done


def describe(turn: Turn) -> str:
    times = np.quantile(turn.first_token_s, (0.5, 0.9, 0.99))
    what = f"with a batch ({turn.lines} lines)" if turn.beside else "without"
    shown = ", ".join(f"{name} {each:.3f}" for name, each in zip(QUANTILES, times, strict=True))
    return f"{what:28} first token {shown} s of {len(turn.first_token_s)}; {turn.failed} failed"


QUANTILES = ("p50", "p90", "p99")


async def killed(args: argparse.Namespace, folder: Path) -> Killed:
    with server_of(args, folder) as server:
        async with client(server.url) as http:
            id = await begin(http, batch_file(args.lines))
            before = await until(http, id, args.lines // 3, "completed")
        server.started.kill()
        server.started.wait()
    with server_of(args, folder) as server:
        async with client(server.url) as http:
            batch = await until(http, id, 0, "completed", "failed", "expired")
            count: Counter[str] = Counter()
            for name in ("output_file_id", "error_file_id"):
                if batch[name]:
                    text = (await http.get(f"/v1/files/{batch[name]}/content")).text
                    count.update(json.loads(line)["custom_id"] for line in text.splitlines())
    once = sum(times == 1 for times in count.values())
    return Killed(
        lines=args.lines,
        answered_before=before["request_counts"]["completed"],
        status=batch["status"],
        answered_once=once,
        answered_more_often=len(count) - once,
        missing=args.lines - len(count),
    )


def ratios(done: list[Turn]) -> dict[str, float]:
    """First-token times with a batch divided by those without, by quantile."""
    arms = [
        np.concatenate([turn.first_token_s for turn in done if turn.beside == beside])
        for beside in (True, False)
    ]
    return {
        name: float(np.quantile(arms[0], share) / np.quantile(arms[1], share))
        for name, share in zip(QUANTILES, (0.5, 0.9, 0.99), strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rate", type=float, default=1.0, help="live requests a second")
    parser.add_argument("--seconds", type=float, default=40.0, help="of a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each kind")
    parser.add_argument("--lines", type=int, default=1000, help="of a batch")
    parser.add_argument("--only", choices=("live", "killed"), help="one of the two parts")
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("serve_flags", nargs="*", help="flags of jitney serve, after --")
    args = parser.parse_args()
    figures: dict[str, Any] = {"machine": cpu_name(), "cores": os.cpu_count(), "model": args.model}
    print(f"{args.model} on {cpu_name()}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as name:
        if args.only != "killed":
            done = asyncio.run(turns(args, Path(name)))
            figures |= {"turns": [asdict(turn) for turn in done], "ratios": ratios(done)}
            shown = ", ".join(f"{key} {value:.2f}" for key, value in ratios(done).items())
            print(f"first token with a batch over without: {shown}")
        if args.only != "live":
            result = asyncio.run(killed(args, Path(name)))
            figures["killed"] = asdict(result)
            print(f"killed in the middle: {result}")
    figures["load"] = os.getloadavg()
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
