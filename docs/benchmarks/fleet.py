"""What a fleet does on this machine, in counts: prompt tokens of a chat that its engines find in
their pages, by router and number of engines, and requests that are lost when an engine is killed
under load.

    python docs/benchmarks/fleet.py [--model tiny-random] [--engines 2 4 8] [--streams 24]

The chat: so many conversations for each engine, at times all open at once; a system prompt that all
share; messages of 6 to 24 words; pauses of up to `--pause` seconds between the turns. Needs psutil.
Nothing here is a time: the machine may be busy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from jitney.engine.machine import cpu_name

_START_S = 600.0
_SYSTEM = "You are the assistant of a small tram company. " * 6
_ROUTERS = ("round-robin", "least-wait", "prefix")
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


def _started(model: str, engines: int, pages: int) -> str:
    """The table of a model whose engines are started."""
    settings = f"{{ model = '{model}', pages = {pages}, {_ENGINE} }}"
    return f"replicas = {engines}\nrouter = 'round-robin'\nsettings = {settings}\n"


@contextlib.contextmanager
def _fleet(table: str) -> Iterator[_Fleet]:
    """A fleet with one model, which this table describes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fleet.toml"
        file.write_text(f"[fleet]\nport = 0\npoll_s = 0.2\n[models.m]\n{table}")
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


@dataclass
class _Chat:
    """A load. turns: fewest and most of a conversation; pause: the longest, seconds. salt: engines
    do not find one another's prompts of runs with different ones.
    """

    turns: tuple[int, int]
    pause: float
    salt: str
    #: Tokens of the system prompt.
    shared: int


@dataclass
class _Counts:
    """Prompt tokens, and those of them that were found in pages; own: behind the system prompt,
    which all conversations share.
    """

    asked: int = 0
    found: int = 0
    own_asked: int = 0
    own_found: int = 0

    def __add__(self, other: _Counts) -> _Counts:
        return _Counts(
            self.asked + other.asked,
            self.found + other.found,
            self.own_asked + other.own_asked,
            self.own_found + other.own_found,
        )

    @property
    def rate(self) -> float:
        return self.found / self.asked

    @property
    def own_rate(self) -> float:
        return self.own_found / self.own_asked


async def _conversation(http: httpx.AsyncClient, number: int, chat: _Chat) -> list[_Counts]:
    """Of each turn."""
    chance = random.Random(number)
    messages = [{"role": "system", "content": _SYSTEM}]
    counts = []
    for _ in range(chance.randint(*chat.turns)):
        messages.append({"role": "user", "content": _words(chance, chance.randint(6, 24))})
        body = {"model": "m", "messages": messages, "max_tokens": 16, "cache_salt": chat.salt}
        answer = await http.post("/v1/chat/completions", json=body | {"seed": number})
        answer.raise_for_status()
        usage = answer.json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        asked, shared = usage["prompt_tokens"], chat.shared
        counts.append(_Counts(asked, cached, asked - shared, max(0, cached - shared)))
        said = answer.json()["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": said or "."})
        await asyncio.sleep(chance.uniform(0, chat.pause))
    return counts


async def _ready(http: httpx.AsyncClient, engines: int) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        known = (await http.get("/fleet/replicas")).json()["models"]["m"]
        if sum(each["state"] == "ready" for each in known) == engines:
            return
        await asyncio.sleep(0.1)
    raise SystemExit("the engines did not become ready")


async def _shared_tokens(http: httpx.AsyncClient) -> int:
    """Of the system prompt as a chat has it."""
    body = {"model": "m", "prompt": _SYSTEM}
    answer = await http.post("/tokenize", json=body)
    answer.raise_for_status()
    return len(answer.json()["tokens"])


async def _chatted(
    url: str, engines: int, salt: str, args: argparse.Namespace
) -> tuple[_Counts, _Counts, str]:
    """(all turns, turns after the first, how engines were chosen)."""
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
        await _ready(http, engines)
        turns = args.turns[0], args.turns[1]
        chat = _Chat(turns, args.pause, salt, await _shared_tokens(http))
        numbers = range(args.conversations * engines)
        talks = (_conversation(http, number, chat) for number in numbers)
        counts = await asyncio.gather(*talks)
        metrics = (await http.get("/metrics")).text
    every = sum((each for talk in counts for each in talk), _Counts())
    later = sum((each for talk in counts for each in talk[1:]), _Counts())
    chosen = re.findall(r'choices_total{choice="(\w+)",model="m"} (\d+)', metrics)
    return every, later, ", ".join(f"{choice} {number}" for choice, number in chosen)


def _hit_rates(urls: Sequence[str], args: argparse.Namespace) -> None:
    """One row for each router, over these engines."""
    first: _Counts | None = None
    for router in _ROUTERS:
        salt = f"{router}-{len(urls)}-{args.pages}"
        with _fleet(f"urls = {list(urls)}\nrouter = '{router}'\n") as fleet:
            every, later, chosen = asyncio.run(_chatted(fleet.url, len(urls), salt, args))
        first = first or later
        print(
            f"| {len(urls)} | {args.conversations * len(urls)} | {router} | {every.rate:.3f} "
            f"| {later.rate:.3f} | {later.rate / first.rate:.2f} | {later.own_rate:.3f} "
            f"| {later.own_rate / first.own_rate:.2f} | {chosen} |",
            flush=True,
        )


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
    parser.add_argument("--engines", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--conversations", type=int, default=8, help="for each engine")
    parser.add_argument("--turns", type=int, nargs=2, default=[3, 6], help="fewest and most")
    parser.add_argument("--pause", type=float, default=3.0, help="the longest, seconds")
    parser.add_argument("--pages", type=int, default=0, help="of an engine's pool; 0: its own")
    parser.add_argument("--streams", type=int, default=24, help="of the killing; 0: none")
    args = parser.parse_args()
    print(f"engines of {args.model} on {cpu_name()}, beside other programs or not\n")
    if args.engines:
        _chat_over_engines(args)
    if args.streams:
        with _fleet(_started(args.model, 2, 0)) as fleet:
            died_with, lost, differ = asyncio.run(_killed(fleet, args.streams))
        print(
            f"killed with {died_with} of {args.streams} streams: {lost} lost, {differ} differ from "
            "a run in peace"
        )


def _chat_over_engines(args: argparse.Namespace) -> None:
    """Engines are started once; a fleet over some of them is made for each row."""
    with _fleet(_started(args.model, max(args.engines), args.pages)) as started:
        known = httpx.get(started.url + "/fleet/replicas", trust_env=False).json()["models"]["m"]
        urls = [each["url"] for each in known]
        print(
            "| engines | conversations | router | all turns | later turns | times | own | times | |"
        )
        print("|---|---|---|---|---|---|---|---|---|", flush=True)
        for engines in args.engines:
            _hit_rates(urls[:engines], args)


if __name__ == "__main__":
    main()
