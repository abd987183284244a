"""Counts what a fleet does on this machine: prompt tokens of a chat that its engines find in their
pages, by router and number of engines, and requests lost when an engine is killed under load.

    python docs/benchmarks/fleet.py [--model tiny-random] [--engines 2 4 8] [--streams 24]
    python docs/benchmarks/fleet.py --on ray --engines 2 --pages 200 --system-prompt no --streams 0

The chat: some users for each engine, all at once, with `--each` conversations one after the other;
a system prompt that all share, or none; messages of 6 to 24 words; pauses of up to `--pause`
seconds between the turns. "Open pages" is the mean number of pages that the conversations of one
engine take. On Ray each router is an application of its own, with new engines. Needs psutil. The
figures are counts, not times, so the machine may be busy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx
import psutil
from running import Server, running_fleet, wait_engines

from jitney.engine.common.machine import cpu_name

_SYSTEM = "You are the assistant of a small tram company. " * 6
_ROUTERS = ("round-robin", "least-wait", "prefix")
_ENGINE = "max_seats = 8, log_level = 'warning', context = 2048"
#: Most tokens of an answer, and tokens of a page.
_ANSWER, _PAGE = 16, 16


def _engine(fleet: Server, number: int) -> psutil.Process:
    """The process of the engine at index `number`, found by the port in its arguments."""
    replicas = fleet.get("/fleet/replicas").json()["models"]["m"]
    port = replicas[number]["url"].rpartition(":")[2]
    for child in fleet.process.children(recursive=True):
        words = child.cmdline()
        if "--port" in words and words[words.index("--port") + 1] == port:
            return child
    raise SystemExit(f"no engine has port {port}")


def _started(model: str, engines: int, pages: int, router: str = "round-robin") -> str:
    """The TOML table of a model whose engines the fleet starts."""
    settings = f"{{ model = '{model}', pages = {pages}, {_ENGINE} }}"
    return f"replicas = {engines}\nrouter = '{router}'\nsettings = {settings}\n"


def _words(chance: random.Random, count: int) -> str:
    return " ".join(f"{chance.randrange(10_000)}" for _ in range(count))


@dataclass
class _Chat:
    """A chat load. each: conversations of a user; turns: (fewest, most) of a conversation; pause:
    the longest, in seconds. salt: runs with different salts share no cached prompts.
    """

    each: int
    turns: tuple[int, int]
    pause: float
    salt: str
    #: The system prompt; empty: none.
    system: str
    #: Tokens of the system prompt as part of a chat.
    shared: int


@dataclass
class _Counts:
    """Prompt tokens, and those of them found in cached pages; own: tokens after the system prompt
    that all conversations share.
    """

    turns: int = 0
    asked: int = 0
    found: int = 0
    own_asked: int = 0
    own_found: int = 0

    def __add__(self, other: _Counts) -> _Counts:
        return _Counts(
            self.turns + other.turns,
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
    """Hold one conversation; returns the counts of each turn."""
    chance = random.Random(number)
    messages = [{"role": "system", "content": chat.system}] if chat.system else []
    counts = []
    for _ in range(chance.randint(*chat.turns)):
        messages.append({"role": "user", "content": _words(chance, chance.randint(6, 24))})
        body = {"model": "m", "messages": messages, "max_tokens": _ANSWER, "cache_salt": chat.salt}
        answer = await http.post("/v1/chat/completions", json=body | {"seed": number})
        answer.raise_for_status()
        usage = answer.json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        n_prompt, shared = usage["prompt_tokens"], chat.shared
        counts.append(_Counts(1, n_prompt, cached, n_prompt - shared, max(0, cached - shared)))
        text = answer.json()["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": text or "."})
        await asyncio.sleep(chance.uniform(0, chat.pause))
    return counts


async def _user(http: httpx.AsyncClient, number: int, chat: _Chat) -> list[list[_Counts]]:
    """Hold all conversations of one user; returns the counts by conversation and turn."""
    first = number * chat.each
    return [await _conversation(http, first + each, chat) for each in range(chat.each)]


async def _shared_tokens(http: httpx.AsyncClient, system: str) -> int:
    """Tokens of the system prompt as part of a chat."""
    if not system:
        return 0
    body = {"model": "m", "prompt": system}
    answer = await http.post("/tokenize", json=body)
    answer.raise_for_status()
    return len(answer.json()["tokens"])


async def _chatted(
    url: str, engines: int, salt: str, system: str, args: argparse.Namespace
) -> tuple[_Counts, _Counts, str]:
    """(counts of all turns, of turns after the first, how often engines were chosen each way)."""
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
        turns = args.turns[0], args.turns[1]
        shared = await _shared_tokens(http, system)
        before = await _choices(http)
        chat = _Chat(args.each, turns, args.pause, salt, system, shared)
        users = (_user(http, number, chat) for number in range(args.users * engines))
        talks = [talk for user in await asyncio.gather(*users) for talk in user]
        chosen = await _choices(http) - before
    every = sum((each for talk in talks for each in talk), _Counts())
    later = sum((each for talk in talks for each in talk[1:]), _Counts())
    return every, later, ", ".join(f"{choice} {number}" for choice, number in chosen.items())


async def _choices(http: httpx.AsyncClient) -> Counter[str]:
    """Number of engine choices so far, by kind."""
    metrics = (await http.get("/metrics")).text
    counts = re.findall(r'choices_total{choice="(\w+)",model="m"} (\d+)', metrics)
    return Counter({choice: int(number) for choice, number in counts})


def _hit_rates(
    fleets: Iterator[tuple[str, Server]], engines: int, args: argparse.Namespace
) -> None:
    """A row for each router and system prompt. fleets: (router's name, fleet) for each router."""
    first: dict[str, _Counts] = {}
    for router, fleet in fleets:
        wait_engines(fleet, engines)
        for with_system in args.system_prompt:
            salt = f"{router}-{engines}-{with_system}"
            system = _SYSTEM if with_system == "yes" else ""
            every, later, chosen = asyncio.run(_chatted(fleet.url, engines, salt, system, args))
            than = first.setdefault(with_system, later)
            print(
                f"| {engines} | {args.users * engines} | {with_system} "
                f"| {_open_pages(every, args.users):.0f} | {args.pages} | {router} "
                f"| {every.found} of {every.asked} | {every.rate:.3f} "
                f"| {later.rate:.3f} | {later.rate / than.rate:.2f} | {later.own_rate:.3f} "
                f"| {later.own_rate / than.own_rate:.2f} | {chosen} |",
                flush=True,
            )


def _open_pages(every: _Counts, users: int) -> float:
    """Pages that the conversations of `users` users take at the end of a mean turn."""
    shared = every.asked - every.own_asked
    own = users * (every.own_asked / every.turns + _ANSWER)
    return (shared / every.turns + own) / _PAGE


def _over(urls: Sequence[str], routers: Sequence[str]) -> Iterator[tuple[str, Server]]:
    """Fleets over engines that already run."""
    for router in routers:
        with running_fleet(f"urls = {list(urls)}\nrouter = '{router}'\n") as fleet:
            yield router, fleet


def _on_ray(engines: int, args: argparse.Namespace) -> Iterator[tuple[str, Server]]:
    """Fleets whose engines Ray Serve starts."""
    for router in args.routers:
        table = _started(args.model, engines, args.pages, router) + "ray = { cpus = 0.1 }\n"
        with running_fleet(table, on="ray") as fleet:
            yield router, fleet


async def _stream(http: httpx.AsyncClient, number: int) -> str:
    """The text of an answer of 256 tokens; "" if it is lost."""
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


async def _killed(fleet: Server, streams: int) -> tuple[int, int, int]:
    """(streams on the killed engine, lost ones, those that differ from a run without a kill)."""
    async with httpx.AsyncClient(base_url=fleet.url, timeout=600, trust_env=False) as http:
        requests = [asyncio.create_task(_stream(http, number)) for number in range(streams)]
        engine, was_open = _engine(fleet, 0), 0
        until = time.monotonic() + 120
        while was_open < streams // 4 and time.monotonic() < until:
            replicas = (await http.get("/fleet/replicas")).json()["models"]["m"]
            was_open = replicas[0]["open"]
            await asyncio.sleep(0.05)
        os.kill(engine.pid, signal.SIGKILL)
        texts = await asyncio.gather(*requests)
        died_with = (await http.get("/fleet/replicas")).json()["models"]["m"][0]["lost"]
        peace = await asyncio.gather(*(_stream(http, number) for number in range(streams)))
    lost = texts.count("")
    differ = sum(one != other for one, other in zip(texts, peace, strict=True))
    return died_with, lost, differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", choices=("processes", "ray"), default="processes")
    parser.add_argument("--model", default="tiny-random")
    parser.add_argument("--engines", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--routers", choices=_ROUTERS, nargs="+", default=_ROUTERS)
    parser.add_argument("--users", type=int, default=8, help="for each engine")
    parser.add_argument("--each", type=int, default=1, help="conversations of each user")
    parser.add_argument("--turns", type=int, nargs=2, default=[3, 6], help="fewest and most")
    parser.add_argument("--pause", type=float, default=3.0, help="the longest, seconds")
    parser.add_argument("--pages", type=int, default=0, help="of an engine's pool; 0: its own")
    parser.add_argument(
        "--system-prompt",
        choices=("yes", "no"),
        nargs="+",
        default=["yes"],
        help="whether conversations share one; both: a row for each",
    )
    parser.add_argument("--streams", type=int, default=24, help="of the killing; 0: none")
    args = parser.parse_args()
    print(f"engines of {args.model} on {cpu_name()}, on {args.on}, beside other programs or not\n")
    if args.engines:
        _chat_over_engines(args)
    if args.streams:
        with running_fleet(_started(args.model, 2, 0)) as fleet:
            wait_engines(fleet, 2)
            died_with, lost, differ = asyncio.run(_killed(fleet, args.streams))
        print(
            f"killed with {died_with} of {args.streams} streams: {lost} lost, {differ} differ from "
            "a run in peace"
        )


def _chat_over_engines(args: argparse.Namespace) -> None:
    """Start the engines once, and a fleet over some of them for each router."""
    print(
        "| engines | users | system prompt | open pages | pages | router | tokens found "
        "| all turns | later turns | times | own | times | |"
    )
    print("|" + "---|" * 13, flush=True)
    if args.on == "ray":
        for engines in args.engines:
            _hit_rates(_on_ray(engines, args), engines, args)
        return
    with running_fleet(_started(args.model, max(args.engines), args.pages)) as started:
        urls = list(wait_engines(started, max(args.engines)).values())
        for engines in args.engines:
            _hit_rates(_over(urls[:engines], args.routers), engines, args)


if __name__ == "__main__":
    main()
