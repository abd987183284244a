"""Injects faults into a served engine, and measures their effect on its clients.

    python docs/benchmarks/faults.py [--model tiny-random] [--only WORDS] [--disconnects 10000]

Starts `jitney serve` with a compile cache of its own, no key and a record file on a full disk, and
records the answers to a set of requests without a fault. Then it sends the same requests again
beside each fault, each on a new server: clients that disconnect, the core killed and stopped in
several phases, a broken compile cache, requests that make the step fail or the model's numbers
infinite, idle connections, a webhook receiver that drips, a grammar whose masks take long, a job
store that is damaged or cannot grow, SIGTERM, and a fleet whose candidate hangs. Prints a table
with a line for each fault: requests whose answer differs from the recorded one, the longest time
that a stream was silent, the time until the server was ready again (or had ended, or the candidate
was rolled back), and the resources that the server holds afterwards, beside those before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
from faulty_server import NAN, POISON
from running import JITNEY, READY_S, Server, running_fleet, serving

from jitney.engine.common.machine import cpu_name

#: Resident bytes above which a core is more than a process that starts.
LOADING_BYTES = 100e6
#: Output tokens of a request.
TOKENS = 240
#: Number of requests that break the engine, one after the other.
BROKEN = 8
#: Idle connections; messages to a receiver that drips; and the measurements beside each: probes,
#: and messages to another receiver.
IDLE, WEBHOOKS, PROBES = 2000, 100, 50
#: Prompts of one request, their length in tokens, and the alternatives of each scored token.
PROMPTS, PROMPT_TOKENS, ALTERNATIVES = 128, 1000, 20
#: A GBNF grammar with very many parses of the same text.
AMBIGUOUS = 'root ::= s\ns ::= s s | "a" | s s s | ""\n'
#: The store of jobs, in the data folder.
STORE = "batches.sqlite3"
#: Most bytes of a file while the disk is "full", and number of jobs tried then.
FULL_BYTES, JOBS_REFUSED = 1 << 18, 8
#: Clients of a fleet whose candidate hangs, and the candidate's share of the keys.
CLIENTS, SHARE = 240, 0.3


@dataclass
class Held:
    """Resources that the server holds while no request is open."""

    pages: int  # KV pages of running sequences
    seats: int  # taken seats
    waiting: int
    descriptors: int  # of the server's process
    threads: int  # of the server's process
    server_mb: float  # resident memory
    core_mb: float

    def __str__(self) -> str:
        return (
            f"{self.pages} / {self.seats} / {self.waiting}; {self.descriptors} / {self.threads}; "
            f"{self.server_mb:.0f} + {self.core_mb:.0f}"
        )


@dataclass
class Row:
    """The table row of one fault."""

    fault: str
    requests: int  # sent beside the fault
    lost: int  # requests whose answer differs from the one without a fault
    silence_s: float  # longest time between two pieces of a stream
    recovery_s: float  # until the server was ready again, or had ended
    before: Held
    after: Held | str  # a text if the server ended


@dataclass
class Answer:
    """The content of a stream."""

    text: str = ""
    pieces: int = 0
    silence_s: float = 0.0
    trouble: str = ""


class TriedServer(Server):
    """A server that gets faults, and that answers known requests meanwhile."""

    def __init__(self, server: Server):
        super().__init__(server.url, server.started, server.model)

    async def next_core(self, before: psutil.Process) -> psutil.Process:
        """Wait until a new core that replaces `before` starts to load; returns its process."""
        while True:
            await asyncio.sleep(0.1)
            with suppress(LookupError, psutil.Error):
                core = self.core()
                if core != before and core.memory_info().rss > LOADING_BYTES:
                    return core

    async def ready(self) -> float:
        """Wait until the server is ready; returns the seconds waited. Raises TimeoutError."""
        started = time.monotonic()
        while time.monotonic() - started < READY_S:
            if await self._is_ready():
                return time.monotonic() - started
            if self.started.poll() is not None:
                raise SystemExit(f"the server ended with status {self.started.returncode}")
            await asyncio.sleep(0.05)
        raise TimeoutError(f"not ready after {READY_S:.0f} s")

    async def _is_ready(self) -> bool:
        try:
            return (await self.client.get("/readyz", timeout=5.0)).status_code == 200
        except httpx.HTTPError:
            return False

    async def gauges(self) -> dict[str, float]:
        """The samples of /metrics that have no labels."""
        text = (await self.client.get("/metrics")).text
        samples = {}
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            if not line.startswith("#") and "{" not in name:
                samples[name] = float(value)
        return samples

    async def held(self) -> Held:
        """Wait until no request is open; returns the resources that the server holds then."""
        for _ in range(200):
            gauges = await self.gauges()
            if not gauges["jitney_seats_busy"] and not gauges["jitney_requests_waiting"]:
                break
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        gauges = await self.gauges()
        return Held(
            pages=int(gauges["jitney_kv_pages_used"]),
            seats=int(gauges["jitney_seats_busy"]),
            waiting=int(gauges["jitney_requests_waiting"]),
            descriptors=self.process.num_fds(),
            threads=self.process.num_threads(),
            server_mb=self.process.memory_info().rss / 1e6,
            core_mb=self.core().memory_info().rss / 1e6,
        )

    async def ask(self, number: int, answer: Answer, **fields: str) -> None:
        """Fill in the answer to request `number`, greedy or seeded, as it streams."""
        last = time.monotonic()
        try:
            async with self.client.stream(
                "POST", "/v1/completions", json=request(self.model, number) | fields
            ) as stream:
                if stream.status_code != 200:
                    answer.trouble = (await stream.aread()).decode()[:200]
                async for line in stream.aiter_lines():
                    if not line.startswith("data: "):
                        continue  # a keep-alive comment
                    now = time.monotonic()
                    answer.silence_s = max(answer.silence_s, now - last)
                    last = now
                    take(answer, line)
        except httpx.HTTPError as error:
            answer.trouble = f"{type(error).__name__}: {error}"

    async def leave(self, number: int, lines: int) -> None:
        """Start request `number`, and disconnect after `lines` lines."""
        try:
            async with self.client.stream(
                "POST", "/v1/completions", json=request(self.model, number)
            ) as stream:
                async for _ in stream.aiter_lines():
                    lines -= 1
                    if lines <= 0:
                        return
        except httpx.HTTPError:
            pass  # refused where the queue is full


def request(model: str, number: int) -> dict[str, Any]:
    draw = random.Random(number)
    body: dict[str, Any] = {
        "model": model,
        "prompt": [draw.randrange(10, 400) for _ in range(draw.randrange(4, 120))],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "logit_bias": {str(NAN): -100},  # never generate the token that breaks the engine
    }
    if number % 2:
        body |= {"temperature": 1.0, "seed": 100 + number, "frequency_penalty": 0.3}
    return body


def take(answer: Answer, line: str) -> None:
    """Add one line of a stream to an answer."""
    if not line.startswith("data: {"):
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        answer.trouble = event["error"]["message"]
        return
    answer.text += event["choices"][0]["text"]
    answer.pieces += 1


#: Flags of a server that NAN and POISON break.
FAULTY = (sys.executable, str(Path(__file__).with_name("faulty_server.py")))


#: A function that injects a fault beside the given answers, and returns the time.monotonic() at
#: which it did so.
type Fault = Callable[[list[Answer]], Awaitable[float]]


async def beside(server: TriedServer, name: str, known: list[Answer], fault: Fault) -> Row:
    """Send all known requests, and inject a fault meanwhile."""
    before = await server.held()
    answers = [Answer() for _ in known]
    requests = [
        asyncio.create_task(server.ask(number, answer)) for number, answer in enumerate(answers)
    ]
    done = await fault(answers)
    await server.ready()
    recovery_s = time.monotonic() - done
    await asyncio.gather(*requests)
    troubles = [answer.trouble for answer in answers if answer.trouble]
    if troubles:
        print(f"{name}: {troubles[0]}", file=sys.stderr, flush=True)
    lost = sum(
        ours.text != theirs.text or bool(ours.trouble)
        for ours, theirs in zip(answers, known, strict=True)
    )
    silence_s = max(answer.silence_s for answer in answers)
    return Row(name, len(known), lost, silence_s, recovery_s, before, await server.held())


async def disconnects(server: TriedServer, known: list[Answer], count: int, most_open: int) -> Row:
    """Clients that disconnect while others stay."""
    draw = random.Random(1)
    slots = asyncio.Semaphore(most_open)

    async def one(number: int) -> None:
        async with slots:
            await server.leave(number, draw.randrange(0, 12))

    async def fault(_: list[Answer]) -> float:
        await asyncio.gather(*(one(1000 + number) for number in range(count)))
        return time.monotonic()

    return await beside(server, f"{count:,} clients leave, {most_open} open", known, fault)


#: (fault's name, signal sent to the core, mean number of pieces of each stream before it).
SIGNALS = (
    ("core killed while it reads prompts", signal.SIGKILL, 0),
    ("core killed while it generates", signal.SIGKILL, 20),
    ("core stopped while it generates", signal.SIGSTOP, 20),
    ("core crashes while it generates (SIGSEGV)", signal.SIGSEGV, 20),
)


async def signalled(
    known: list[Answer], name: str, number: signal.Signals, pieces: int, server: TriedServer
) -> Row:
    """Send the core a signal after some pieces of each stream."""

    async def fault(answers: list[Answer]) -> float:
        await asyncio.sleep(0.05)
        while sum(answer.pieces for answer in answers) < pieces * len(answers):
            await asyncio.sleep(0.01)
        core, done = server.core(), time.monotonic()
        core.send_signal(number)
        await server.next_core(core)
        return done

    return await beside(server, name, known, fault)


async def killed_twice(server: TriedServer, known: list[Answer]) -> Row:
    """Kill the core, and then its successor while that one loads."""

    async def fault(_: list[Answer]) -> float:
        await asyncio.sleep(0.3)
        first, done = server.core(), time.monotonic()
        first.kill()
        second = await server.next_core(first)
        second.kill()
        await server.next_core(second)
        return done

    return await beside(server, "core killed, and again while it loads", known, fault)


async def broken_cache(server: TriedServer, known: list[Answer], cache: Path) -> Row:
    """Cut every file of the compile cache in half, then kill the core."""

    async def fault(_: list[Answer]) -> float:
        for file in cache.rglob("*"):
            if file.is_file():
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        core, done = server.core(), time.monotonic()
        core.kill()
        await server.next_core(core)
        return done

    return await beside(server, "compile cache cut in half, core killed", known, fault)


async def nothing(_: list[Answer]) -> float:
    """Inject no fault."""
    return time.monotonic()


async def broken_requests(
    known: list[Answer], name: str, token: int, code: str, server: TriedServer
) -> Row:
    """Send requests that break the step, one after the other beside the others: each must end with
    its own error.
    """

    async def fault(answers: list[Answer]) -> float:
        for count in range(BROKEN):
            while sum(answer.pieces for answer in answers) < 20 * count * len(answers):
                await asyncio.sleep(0.01)
            body = request(server.model, 0) | {"prompt": [100 + count, token, 9], "stream": False}
            reply = await server.client.post("/v1/completions", json=body)
            if reply.status_code != 500 or reply.json()["error"]["code"] != code:
                raise SystemExit(f"{name}: {reply.status_code} {reply.text[:200]}")
        return time.monotonic()

    return await beside(server, name, known, fault)


async def idle_connections(server: TriedServer, known: list[Answer], count: int) -> Row:
    """Keep `count` idle connections open, and open more of them with each probe."""
    _, _, address = str(server.client.base_url).partition("://")
    host, _, port = address.rpartition(":")
    opened: list[asyncio.StreamWriter] = []
    slowest_s = 0.0

    async def open_one() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        opened.append(writer)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")

    async def fault(_: list[Answer]) -> float:
        nonlocal slowest_s
        for _number in range(count // 100):
            await asyncio.gather(*(open_one() for _ in range(100)))
        for _number in range(PROBES):
            await open_one()
            began = time.monotonic()
            assert (await server.client.get("/readyz")).status_code == 200
            slowest_s = max(slowest_s, time.monotonic() - began)
        return time.monotonic()

    try:
        row = await beside(server, "", known, fault)
    finally:
        for writer in opened:
            writer.close()
    name = f"{count:,} idle connections (slowest of {PROBES} probes {1000 * slowest_s:.0f} ms)"
    return replace(row, fault=name)


class _Receiver:
    """A webhook receiver that answers at once, or with headers that never end."""

    def __init__(self, *, drips: bool):
        self._drips = drips
        self._port = random.randrange(20_000, 40_000)
        self.url = f"http://127.0.0.1:{self._port}/"
        #: time.monotonic() of each message.
        self.told: list[float] = []

    async def listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._answer, "127.0.0.1", self._port)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            self.told.append(time.monotonic())
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n")
            while self._drips:
                writer.write(b"x: x\r\n")
                await writer.drain()
                await asyncio.sleep(0.5)
            writer.write(b"\r\n")
            writer.close()


def webhook_trial(known: list[Answer], folder: Path) -> Trial:
    """Webhooks of finished jobs go to a receiver that drips, and then to one that does not."""
    slow, quick = _Receiver(drips=True), _Receiver(drips=False)
    secret = folder / "secret"
    secret.touch(0o600)
    secret.write_text("any\n")
    flags = ("--webhook-prefixes", f"{slow.url},{quick.url}", "--webhook-secret-file", str(secret))
    return Trial("dripping webhook", partial(dripping_webhook, known, slow, quick), flags=flags)


async def dripping_webhook(
    known: list[Answer], slow: _Receiver, quick: _Receiver, server: TriedServer
) -> Row:
    """Run the fault of `webhook_trial`."""
    latest_s = 0.0

    async def job(receiver: _Receiver) -> None:
        body = {"prompt": [9, 8, 7], "max_tokens": 1}
        job_request = {"endpoint": "/v1/completions", "body": body, "webhook_url": receiver.url}
        job = (await server.client.post("/v1/jobs", json=job_request)).json()
        while job["status"] != "completed":
            await asyncio.sleep(0.01)
            job = (await server.client.get(f"/v1/jobs/{job['id']}")).json()

    async def fault(_: list[Answer]) -> float:
        nonlocal latest_s
        await asyncio.gather(*(job(slow) for _ in range(WEBHOOKS)))
        while not slow.told:
            await asyncio.sleep(0.01)
        for number in range(PROBES):
            await job(quick)
            over = time.monotonic()
            while len(quick.told) <= number:
                await asyncio.sleep(0.005)
            latest_s = max(latest_s, quick.told[number] - over)
        return time.monotonic()

    async with await slow.listen(), await quick.listen():
        row = await beside(server, "", known, fault)
    name = f"{WEBHOOKS} webhooks that drip (latest of {PROBES} others {latest_s:.2f} s)"
    return replace(row, fault=name)


async def ambiguous_grammar(known: list[Answer], name: str, n: int, server: TriedServer) -> Row:
    """Constrain answers to a grammar with very many parses of the same text: each mask takes longer
    than the one before, and the request must end because of that.
    """

    async def fault(answers: list[Answer]) -> float:
        while not all(answer.pieces for answer in answers):
            await asyncio.sleep(0.01)
        constraint = {"structured_outputs": {"grammar": AMBIGUOUS}, "n": n, "temperature": 1.0}
        body = request(server.model, 0) | constraint | {"stream": False, "max_tokens": 400}
        reply = await server.client.post("/v1/completions", json=body)
        if reply.status_code != 400 or reply.json()["error"]["code"] != "grammar_too_complex":
            raise SystemExit(f"{name}: {reply.status_code} {reply.text[:200]}")
        return time.monotonic()

    return await beside(server, name, known, fault)


async def many_prompts(
    known: list[Answer], name: str, asked: dict[str, int | bool], server: TriedServer
) -> Row:
    """Send one request with PROMPTS prompts of PROMPT_TOKENS random tokens; it must be answered."""

    async def fault(answers: list[Answer]) -> float:
        while not all(answer.pieces for answer in answers):
            await asyncio.sleep(0.01)
        source = random.Random(0)
        prompts = [source.choices(range(100, 250), k=PROMPT_TOKENS) for _ in range(PROMPTS)]
        body = {"model": server.model, "prompt": prompts, "max_tokens": 1} | asked
        reply = await server.client.post("/v1/completions", json=body)
        if reply.status_code != 200 or len(reply.json()["choices"]) != PROMPTS:
            raise SystemExit(f"{name}: {reply.status_code} {reply.text[:200]}")
        return time.monotonic()

    return await beside(server, name, known, fault)


async def job(server: TriedServer) -> str:
    """Create a job; returns its id, or the error code."""
    body = request(server.model, 0) | {"max_tokens": 4}
    del body["stream"]
    job_request = {"endpoint": "/v1/completions", "body": body}
    reply = (await server.client.post("/v1/jobs", json=job_request)).json()
    return reply["id"] if "id" in reply else reply["error"]["code"]


def damage_store(folder: Path) -> None:
    """Replace the job store with a file that is no database, before the server starts."""
    (folder / "data").mkdir(mode=0o700, exist_ok=True)
    (folder / "data" / STORE).write_bytes(b"no database" * 1000)


async def damaged_store(server: TriedServer, known: list[Answer]) -> Row:
    """Jobs work from the first request on, since the server sets a damaged store aside."""

    async def fault(_: list[Answer]) -> float:
        begun = await job(server)
        if not begun.startswith("job_"):
            raise SystemExit(f"damaged store: a job is answered {begun}")
        return time.monotonic()

    return await beside(server, "damaged store of jobs", known, fault)


async def full_disk(server: TriedServer, known: list[Answer], folder: Path) -> Row:
    """Jobs are refused while the server's files cannot grow, and accepted again afterwards.

    The file size limit of the process needs no rights, unlike a small disk.
    """

    async def fault(_: list[Answer]) -> float:
        while (folder / "data" / f"{STORE}-wal").stat().st_size <= FULL_BYTES:
            await job(server)
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (FULL_BYTES, unlimited[1]))
        replies = [await job(server) for _ in range(JOBS_REFUSED)]
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, unlimited)
        replies.append((await job(server))[:4])
        if replies != ["store_unavailable"] * JOBS_REFUSED + ["job_"]:
            raise SystemExit(f"full disk: jobs are answered {replies}")
        return time.monotonic()

    await job(server)
    return await beside(server, "full disk, jobs refused", known, fault)


async def told_to_stop(known: list[Answer], name: str, pieces: int, server: TriedServer) -> Row:
    """Send SIGTERM after a mean of `pieces` pieces of each stream; every stream must end with its
    whole answer, or with the error `draining`.
    """
    before = await server.held()
    answers = [Answer() for _ in known]
    requests = [
        asyncio.create_task(server.ask(number, answer)) for number, answer in enumerate(answers)
    ]
    while sum(answer.pieces for answer in answers) < pieces * len(answers):
        await asyncio.sleep(0.01)
    done = time.monotonic()
    server.started.send_signal(signal.SIGTERM)
    await asyncio.gather(*requests)
    status = await asyncio.to_thread(server.started.wait, 60)
    recovery_s = time.monotonic() - done
    cut = [answer for answer in answers if "shutting down" in answer.trouble]
    whole = sum(
        ours.text == theirs.text and not ours.trouble
        for ours, theirs in zip(answers, known, strict=True)
    )
    after = f"exit status {status}; {whole} whole answers, {len(cut)} told `draining`"
    lost = len(known) - whole - len(cut)
    silence_s = max(answer.silence_s for answer in answers)
    return Row(name, len(known), lost, silence_s, recovery_s, before, after)


async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request as a ready engine does, but never answer a generation."""
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"POST"):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
    else:
        await reader.read()
    writer.close()


@asynccontextmanager
async def fleet_with_candidate(server: TriedServer, url: str) -> AsyncIterator[TriedServer]:
    """A fleet of this server with a candidate at `url`."""
    table = (
        f"urls = ['{server.url}']\n[models.'{server.model}'.candidate]\n"
        f"urls = ['{url}']\nshare = {SHARE}\n"
    )
    running = running_fleet(table, model=server.model, lines="", ready="/readyz")
    # In a thread: the fleet asks the candidate, which runs in this event loop.
    fleet = await asyncio.to_thread(running.__enter__)
    try:
        yield TriedServer(fleet)
    finally:
        await asyncio.to_thread(running.__exit__, None, None, None)


async def hanging_candidate(known: list[Answer], name: str, server: TriedServer) -> Row:
    """Clients of a fleet whose candidate accepts requests and answers none. The recovery time ends
    when the candidate is rolled back.
    """
    before = await server.held()
    answers = [Answer() for _ in range(CLIENTS)]
    hung = await asyncio.start_server(hang, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{hung.sockets[0].getsockname()[1]}"
    async with fleet_with_candidate(server, url) as fleet:
        begun = time.monotonic()
        requests = [
            asyncio.create_task(fleet.ask(number % len(known), answer, user=f"user-{number}"))
            for number, answer in enumerate(answers)
        ]
        report = f"/fleet/rollouts/{server.model}"
        while (await fleet.client.get(report)).json()["state"] == "running":
            await asyncio.sleep(0.1)
        recovery_s = time.monotonic() - begun
        await asyncio.gather(*requests)
    hung.close()
    lost = sum(
        bool(answer.trouble) or answer.text != known[number % len(known)].text
        for number, answer in enumerate(answers)
    )
    silence_s = max(answer.silence_s for answer in answers)
    return Row(name, CLIENTS, lost, silence_s, recovery_s, before, await server.held())


async def measure(args: argparse.Namespace) -> list[Row]:
    """Inject every fault into a server of its own, so that restarts do not add up."""
    with tempfile.TemporaryDirectory(prefix="jitney-faults-") as name:
        folder, dtype = Path(name), ("--dtype", args.dtype)
        cache = folder / "cache"
        with serving(args.model, folder, *dtype, cache=cache) as started:
            server = TriedServer(started)
            known = [Answer() for _ in range(args.streams)]
            for number, answer in enumerate(known):
                await server.ask(number, answer)
        for answer in known:
            if answer.trouble or not answer.text:
                raise SystemExit(f"nothing was done to the server, and yet: {answer.trouble}")
        rows = []
        for trial in trials(args, known, folder):
            if args.only not in trial.name:
                continue
            trial.prepare(folder)
            flags = (*dtype, "--record", "/dev/full", *trial.flags)
            served = serving(args.model, folder, *flags, program=trial.program, cache=cache)
            with served as server:
                rows.append(await trial.fault(TriedServer(server)))
            show(rows[-1])
        return rows


@dataclass
class Trial:
    """A fault, and the settings of its server."""

    name: str
    fault: Callable[[TriedServer], Awaitable[Row]]
    program: tuple[str, ...] = JITNEY
    flags: tuple[str, ...] = ()
    #: Called with the server's folder before the server starts.
    prepare: Callable[[Path], None] = lambda folder: None


def trials(args: argparse.Namespace, known: list[Answer], folder: Path) -> list[Trial]:
    """All faults, in the order of the table."""
    leaving = f"{args.disconnects:,} clients leave, {args.open} open"
    nan = f"{BROKEN} requests with logits that are not finite"
    poison = f"{BROKEN} requests that make the step fail"
    one, many = (f"an ambiguous grammar, {n} beside streams" for n in ("1", "29"))
    prompts = f"{PROMPTS} prompts of {PROMPT_TOKENS:,} tokens"
    scored = f"{prompts}, scored with {ALTERNATIVES} alternatives"
    scores: dict[str, int | bool] = {"echo": True, "logprobs": ALTERNATIVES}
    stopped = "SIGTERM while it generates"
    cut = "SIGTERM while it generates, no time to finish"
    hanging = f"a candidate with {SHARE:.0%} of the keys hangs, until it is rolled back"
    return [
        Trial("nothing", lambda server: beside(server, "nothing", known, nothing)),
        Trial(leaving, lambda server: disconnects(server, known, args.disconnects, args.open)),
        *(Trial(when[0], partial(signalled, known, *when)) for when in SIGNALS),
        Trial("killed twice", lambda server: killed_twice(server, known)),
        Trial("compile cache", lambda server: broken_cache(server, known, folder / "cache")),
        Trial(nan, partial(broken_requests, known, nan, NAN, "nan_logits"), FAULTY),
        Trial(poison, partial(broken_requests, known, poison, POISON, "request_failed"), FAULTY),
        Trial("idle connections", lambda server: idle_connections(server, known, IDLE)),
        webhook_trial(known, folder),
        Trial(one, partial(ambiguous_grammar, known, one, 1)),
        Trial(many, partial(ambiguous_grammar, known[:3], many, 29)),
        Trial(prompts, partial(many_prompts, known, prompts, {})),
        Trial(scored, partial(many_prompts, known, scored, scores)),
        Trial(
            "damaged store",
            lambda server: damaged_store(server, known),
            prepare=damage_store,
        ),
        Trial("full disk", lambda server: full_disk(server, known, folder)),
        Trial(stopped, partial(told_to_stop, known, stopped, 20)),
        Trial(cut, partial(told_to_stop, known, cut, 20), flags=("--drain-s", "0")),
        Trial(hanging, partial(hanging_candidate, known, hanging)),
    ]


def show(row: Row) -> None:
    print(
        f"| {row.fault} | {row.requests} | {row.lost} | {row.silence_s:.2f} | "
        f"{row.recovery_s:.2f} | {row.before} | {row.after} |",
        flush=True,
    )


def main() -> None:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--model", default="tiny-random")
    flags.add_argument(
        "--dtype",
        default="float32",
        help="in bfloat16 a sequence that is computed again may choose another of two equal tokens",
    )
    flags.add_argument("--only", default="", help="faults with these words in their names")
    flags.add_argument("--streams", type=int, default=32, help="requests beside each fault")
    flags.add_argument("--disconnects", type=int, default=10_000)
    flags.add_argument("--open", type=int, default=200, help="of them at a time")
    flags.add_argument("--json")
    args = flags.parse_args()
    print(f"{args.model}, {args.dtype}, {cpu_name()}, load {os.getloadavg()[0]:.0f}\n")
    print(
        "| fault | requests | lost | longest silence, s | ready again, s | "
        "pages / seats / waiting; descriptors / threads; MB before | after |\n"
        "|---|---|---|---|---|---|---|",
        flush=True,
    )
    rows = asyncio.run(measure(args))
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
