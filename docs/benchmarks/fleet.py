"""What a fleet of two engines does on this machine, in counts: pages that turns of conversations
find, by router, and requests that are lost when an engine is killed under load.

    python docs/benchmarks/fleet.py [--model tiny-random] [--pages 720] [--streams 24]

Needs psutil. Nothing here is a time: the machine may be busy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from jitney.engine.machine import cpu_name

_START_S = 600.0
_REPLICAS = 2
_ENGINE = "max_seats = 8, log_level = 'warning', context = 2048"


@dataclass
class _Fleet:
    """A running `jitney fleet serve`."""

    url: str
    process: subprocess.Popen[str]

    def engine(self, number: int) -> psutil.Process:
        """The process of the n-th engine, by the port in its arguments."""
        known = httpx.get(self.url + "/fleet/replicas", trust_env=False).json()["models"]["m"]
        port = known[number]["url"].rpartition(":")[2]
        for child in psutil.Process(self.process.pid).children(recursive=True):
            words = child.cmdline()
            if "--port" in words and words[words.index("--port") + 1] == port:
                return child
        raise SystemExit(f"no engine has port {port}")


@contextlib.contextmanager
def _fleet(model: str, router: str, pages: int) -> Iterator[_Fleet]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fleet.toml"
        file.write_text(
            f"[fleet]\nport = 0\npoll_s = 0.2\n[models.m]\nreplicas = {_REPLICAS}\n"
            f'router = "{router}"\nsettings = {{ model = "{model}", pages = {pages}, {_ENGINE} }}\n'
        )
        command = "from jitney.engine.cli import main; raise SystemExit(main())"
        words = [sys.executable, "-P", "-c", command, "fleet", "serve", str(file)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            yield _Fleet(_endpoint(process), process)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)


def _endpoint(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip().startswith("endpoint"):
            return line.split()[1].removesuffix("/v1")
    raise SystemExit("the fleet did not start")


def _words(chance: random.Random, count: int) -> str:
    return " ".join(f"{chance.randrange(10_000)}" for _ in range(count))


async def _conversation(http: httpx.AsyncClient, number: int, turns: int) -> tuple[int, int]:
    """(prompt tokens, those that were found), of the turns after the first."""
    chance = random.Random(number)
    messages = [{"role": "system", "content": "You are brief."}]
    total = found = 0
    for turn in range(turns):
        messages.append({"role": "user", "content": _words(chance, 24)})
        body = {"model": "m", "messages": messages, "max_tokens": 8, "temperature": 0}
        answer = await http.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        usage = answer.json()["usage"]
        if turn:
            total += usage["prompt_tokens"]
            found += usage["prompt_tokens_details"]["cached_tokens"]
        said = answer.json()["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": said or "."})
        await asyncio.sleep(chance.uniform(0, 0.2))
    return total, found


async def _hit_rate(url: str, conversations: int, turns: int) -> float:
    """Of all turns after the first, the share of prompt tokens that were found."""
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
        talks = (_conversation(http, number, turns) for number in range(conversations))
        counts = await asyncio.gather(*talks)
    return sum(found for _, found in counts) / sum(total for total, _ in counts)


async def _stream(http: httpx.AsyncClient, number: int) -> str:
    """The text of an answer of 256 tokens; "" if it was lost."""
    body = {
        "model": "m",
        "prompt": _words(random.Random(number), 12),
        "max_tokens": 256,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
    }
    text, ended = "", False
    try:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    ended = True
                elif data:
                    text += json.loads(data)["choices"][0]["text"]
    except (httpx.HTTPError, KeyError):
        return ""
    return text if ended else ""


async def _killed(fleet: _Fleet, streams: int) -> tuple[int, int, int]:
    """(streams that the killed engine had, lost ones, those that differ from a run in
    peace).
    """
    async with httpx.AsyncClient(base_url=fleet.url, timeout=600, trust_env=False) as http:
        asked = [asyncio.create_task(_stream(http, number)) for number in range(streams)]
        engine, was_open = fleet.engine(0), 0
        until = time.monotonic() + 120
        while was_open < streams // 4 and time.monotonic() < until:
            known = (await http.get("/fleet/replicas")).json()["models"]["m"]
            was_open = known[0]["open"]
            await asyncio.sleep(0.05)
        os.kill(engine.pid, signal.SIGKILL)
        texts = await asyncio.gather(*asked)
        died_with = (await http.get("/fleet/replicas")).json()["models"]["m"][0]["lost"]
        peace = await asyncio.gather(*(_stream(http, number) for number in range(streams)))
    lost = texts.count("")
    differ = sum(one != other for one, other in zip(texts, peace, strict=True))
    return died_with, lost, differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-random")
    parser.add_argument("--conversations", type=int, default=32)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--pages", type=int, nargs="*", default=[720], help="of an engine's pool")
    parser.add_argument("--streams", type=int, default=24, help="of the killing; 0: none")
    args = parser.parse_args()
    print(f"{_REPLICAS} engines of {args.model} on {cpu_name()}")
    for pages in args.pages:
        rates = {}
        for router in ("round-robin", "prefix"):
            with _fleet(args.model, router, pages) as fleet:
                rates[router] = asyncio.run(_hit_rate(fleet.url, args.conversations, args.turns))
                print(f"{pages} pages, {router}: {rates[router]:.3f} of prompt tokens found")
        print(f"{pages} pages: {rates['prefix'] / rates['round-robin']:.2f} times", flush=True)
    if not args.streams:
        return
    with _fleet(args.model, "round-robin", 0) as fleet:
        died_with, lost, differ = asyncio.run(_killed(fleet, args.streams))
    print(
        f"killed with {died_with} of {args.streams} streams: {lost} lost, {differ} differ from "
        "a run in peace"
    )


if __name__ == "__main__":
    main()
