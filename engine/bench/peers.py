"""Engines served one after another on this machine and driven by one client over HTTP, so that
their figures can stand in one table.

Every engine gets the same token ids as prompts, the same output lengths (greedy, the end of a text
ignored), no prefix cache and the whole machine; the client is this process, on the same cores, and
its share of them is measured. Lengths are checked by the engine's own usage counts.
"""

from __future__ import annotations

import asyncio
import glob
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any, NamedTuple, NoReturn

import httpx
import msgspec

from jitney.engine.bench.client import Answer, Target, ask, first_model, open_client
from jitney.engine.bench.load import Load, run_load
from jitney.engine.bench.online import read_about
from jitney.engine.bench.text import prompt_ids
from jitney.engine.errors import JitneyError
from jitney.engine.machine import cpu_name
from jitney.engine.simulation.workload import (
    Arrival,
    Closed,
    Fixed,
    LengthSummary,
    LogNormal,
    synthesise,
)
from jitney.engine.telemetry.summary import spread_of, summarise, token_gaps

#: Log-normal lengths around 96 and 64 tokens.
PROMPTS, OUTPUTS = LogNormal(96, 0.5, 4, 384), LogNormal(64, 0.5, 4, 256)
LONG_PROMPT = 512
#: Prompts of that length, and how many of them are open at a time.
LONG_REQUESTS, LONG_STREAMS = 24, 8
#: A single stream is slow, and so gets fewer requests.
SINGLE_REQUESTS = 16
SEED = 0
#: Seconds that an engine gets to be ready (the first start of some compiles for minutes), and to
#: stop.
START_S, STOP_S = 900.0, 30.0
LOOK_EVERY_S = 0.5
#: Memory allocator that vLLM's CPU build asks for, and OpenMP, which its environment brings.
TCMALLOC = "/usr/lib/*/libtcmalloc_minimal.so.4"
#: Last bytes of an engine's output that are shown when it fails.
LOG_TAIL = 1500
Say = Callable[[str], None]
#: Text -> token ids.
Encode = Callable[[str], list[int]]


class Peer(NamedTuple):
    """An engine that can be started: its name in the table, its command but for the port, and what
    its environment has beside ours. settings: what a reader should know of how it runs."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    settings: str


class Work(NamedTuple):
    """One measurement: requests of given prompts (ids) and output lengths, so many of them open at
    a time."""

    name: str
    streams: int
    prompts: list[list[int]]
    outputs: list[int]


@dataclass(slots=True)
class Measured:
    """What an engine did: one mapping from a measurement's name to its figures for each
    repetition."""

    peer: Peer
    version: str = ""
    device: str = ""
    kernels: str = ""
    start_s: list[float] = field(default_factory=list)
    runs: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    failed: str = ""


def ours(model: str, kernels: str, dtype: str) -> Peer:
    """This engine, as `jitney serve` starts it."""
    program = "import sys; from jitney.engine.cli import main; sys.exit(main())"
    words = ("serve", model, "--dtype", dtype, "--no-prefix-cache", "--kernels", kernels)
    return Peer(
        f"Jitney, {kernels} kernels",
        (sys.executable, "-c", program, *words),
        {},
        f"jitney {' '.join(words)}",
    )


def vllm(executable: str, folder: str, dtype: str) -> Peer:
    """vLLM's CPU build on a Hugging Face folder of the same model."""
    flags = (
        *("--served-model-name", "m"),
        *("--dtype", dtype),
        *("--max-model-len", "2048"),
        *("--max-num-seqs", "32"),
        "--no-enable-prefix-caching",
        "--disable-uvicorn-access-log",
    )
    own_openmp = str(Path(executable).resolve().parent.parent / "lib" / "libiomp5.so")
    preload = [*sorted(glob.glob(TCMALLOC))[:1], *glob.glob(glob.escape(own_openmp))]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONPATH": "",
    }
    if preload:
        environment["LD_PRELOAD"] = ":".join(preload)
    names = ", ".join(Path(library).name for library in preload) or "nothing"
    return Peer(
        "vLLM, CPU",
        (executable, "serve", folder, *flags),
        environment,
        f"vllm serve {' '.join(flags)}; preloaded: {names}",
    )


def make_work(encode: Encode, streams: Sequence[int], requests: int) -> list[Work]:
    """The measurements: closed loops of so many streams, and long prompts with one output token
    each."""
    found = []
    for count in streams:
        arrivals = synthesise(
            requests if count > 1 else min(requests, SINGLE_REQUESTS),
            PROMPTS,
            OUTPUTS,
            Closed(),
            SEED,
        )
        found.append(_work(f"streams_{count}", count, arrivals, encode))
    long_requests = min(LONG_REQUESTS, requests)
    long = synthesise(long_requests, Fixed(LONG_PROMPT), Fixed(1), Closed(), SEED)
    return [*found, _work(f"prompts_{LONG_PROMPT}", LONG_STREAMS, long, encode)]


def _work(name: str, streams: int, arrivals: Sequence[Arrival], encode: Encode) -> Work:
    prompts = [
        prompt_ids(encode, arrival.n_prompt, [SEED, number])
        for number, arrival in enumerate(arrivals)
    ]
    return Work(name, streams, prompts, [arrival.n_output for arrival in arrivals])


def describe_work(work: Work) -> dict[str, Any]:
    """What a measurement sends, for the report."""
    return {
        "streams": work.streams,
        "requests": len(work.outputs),
        "prompt_lengths": msgspec.to_builtins(
            LengthSummary.of(len(prompt) for prompt in work.prompts)
        ),
        "output_lengths": msgspec.to_builtins(LengthSummary.of(work.outputs)),
    }


def compare(
    peers: Sequence[Peer],
    works: Sequence[Work],
    repetitions: int,
    *,
    port: int,
    save: Callable[[dict[str, Any]], None],
    say: Say,
) -> dict[str, Any]:
    """Start the engines in turn, `repetitions` times over, and measure each; the report so far is
    saved after every measurement. port: 0 takes a free one. An engine that fails is left out from
    then on, with the reason in the report."""
    found = [Measured(peer) for peer in peers]
    for repetition in range(repetitions):
        for one in found:
            if one.failed:
                continue
            say(f"{one.peer.name}: repetition {repetition + 1} of {repetitions}")
            one.runs.append({})
            try:
                _measure_once(one, works, port, lambda: save(report_of(found, works)), say)
            except JitneyError as error:
                one.failed = str(error)
                say(f"{one.peer.name}: {error}")
            save(report_of(found, works))
    return report_of(found, works)


def _measure_once(
    one: Measured, works: Sequence[Work], port: int, save: Callable[[], None], say: Say
) -> None:
    began = time.monotonic()
    with serving(one.peer, port or free_port()) as url:
        one.start_s.append(round(time.monotonic() - began, 1))
        asyncio.run(_measure_all(one, Target(url, ""), works, save, say))


async def _measure_all(
    one: Measured, target: Target, works: Sequence[Work], save: Callable[[], None], say: Say
) -> None:
    async with open_client(target) as client:
        about = await read_about(client, target.base)
        one.version, one.device, one.kernels = about.version, about.device, about.kernels
        named = Target(target.url, await first_model(client, target))
        for work in works:
            await drive(client, named, warm_up_of(work))
            load = await drive(client, named, work)
            figures = figures_of(load, work)
            one.runs[-1][work.name] = figures
            save()
            say(
                f"  {work.name}: {figures['output_tok_s']:.0f} output tok/s, "
                f"{figures['prompt_tok_s']:.0f} prompt tok/s, "
                f"client {figures['client']['cpu_share']:.0%} of a core"
            )


def warm_up_of(work: Work) -> Work:
    """The first requests of a measurement with short outputs, as many as are open at a time."""
    few = max(2, work.streams)
    return Work(
        "warm-up", work.streams, work.prompts[:few], [min(8, n) for n in work.outputs[:few]]
    )


async def drive(client: httpx.AsyncClient, target: Target, work: Work) -> Load:
    """Send the work as a closed loop. JitneyError if a request fails, or is not as long as it
    should be."""

    async def send(number: int) -> Answer:
        body = target.body("", work.outputs[number]) | {"prompt": work.prompts[number]}
        return await ask(client, target, body)

    arrivals = [
        Arrival(0.0, len(prompt), output)
        for prompt, output in zip(work.prompts, work.outputs, strict=True)
    ]
    load = await run_load(send, arrivals, concurrency=work.streams, closed=True)
    for arrival, answer in zip(arrivals, load.answers, strict=True):
        if answer.finish not in ("stop", "length"):
            raise JitneyError(f"{work.name}: a request ended with {answer.finish} {answer.detail}")
        counted, wanted = (answer.n_prompt, answer.n_output), (arrival.n_prompt, arrival.n_output)
        if counted != wanted:
            raise JitneyError(
                f"{work.name}: the engine counted {counted} prompt and output tokens where "
                f"{wanted} were asked for"
            )
    return load


def figures_of(load: Load, work: Work) -> dict[str, Any]:
    """The figures of one measurement; tokens by the engine's usage counts, seconds from the first
    request's sending to the last one's end."""
    figures = summarise(load.times, records=None, seats=0, seconds=load.seconds)
    return {
        "seconds": load.seconds,
        "output_tok_s": figures["output_tok_s"],
        "prompt_tok_s": figures["prompt_tokens"] / load.seconds,
        "ttft_s": figures["ttft_s"],
        "itl_s": spread_of(token_gaps(load.times)),
        "client": load.sender.as_json(),
        "load_average": os.getloadavg()[0],
    }


def report_of(found: Sequence[Measured], works: Sequence[Work]) -> dict[str, Any]:
    """Everything that is known so far, ready for JSON."""
    return {
        "machine": cpu_name(),
        "client": "this process, on the same machine, over HTTP with streaming",
        "prompts": "token ids, the same for every engine",
        "settings": "greedy, the end of a text ignored, no prefix cache",
        "work": {work.name: describe_work(work) for work in works},
        "engines": {
            one.peer.name: {
                "version": one.version,
                "device": one.device,
                "kernels": one.kernels,
                "settings": one.peer.settings,
                "start_s": one.start_s,
                "failed": one.failed or None,
                "medians": medians_of(one.runs),
                "runs": one.runs,
            }
            for one in found
        },
    }


def medians_of(runs: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """For each measurement the median, least and most of its figures over the repetitions."""
    names = dict.fromkeys(name for run in runs for name in run)
    found = {}
    for name in names:
        done = [run[name] for run in runs if name in run]
        found[name] = {
            "output_tok_s": _middle([figures["output_tok_s"] for figures in done]),
            "prompt_tok_s": _middle([figures["prompt_tok_s"] for figures in done]),
            "ttft_p50_s": _middle([figures["ttft_s"]["p50"] for figures in done]),
            "ttft_p99_s": _middle([figures["ttft_s"]["p99"] for figures in done]),
            "client_cpu_share": _middle([figures["client"]["cpu_share"] for figures in done]),
        }
    return found


def _middle(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "least": min(values), "most": max(values)}


def kernel_ratios(report: Mapping[str, Any], model_engines: tuple[str, str]) -> dict[str, float]:
    """For each measurement, the first engine's median over the second's: prompt tokens where
    outputs are one token long, else output tokens. Empty if one of them was not measured."""
    first, second = (report["engines"].get(name, {}).get("medians", {}) for name in model_engines)
    found = {}
    for name in first:
        if name in second:
            figure = "prompt_tok_s" if name.startswith("prompts_") else "output_tok_s"
            found[name] = first[name][figure]["median"] / second[name][figure]["median"]
    return found


def markdown(report: Mapping[str, Any]) -> str:
    """The table for a page, with what it was taken on above it."""
    works = report["work"]
    heads = []
    for name, work in works.items():
        if name.startswith("prompts_"):
            heads.append(f"prompt tok/s, {work['prompt_lengths']['longest']}-token prompts")
        else:
            count = work["streams"]
            heads.append(f"{count} stream{'' if count == 1 else 's'}, output tok/s")
    busiest = max(
        (name for name in works if name.startswith("streams_")),
        key=lambda name: works[name]["streams"],
    )
    heads.append(f"first token at {works[busiest]['streams']} streams, p50 / p99")
    lines = [
        f"{report['machine']}; over HTTP with streaming, the client on the same machine; medians "
        "(least - most).",
        "",
        f"| | {' | '.join(heads)} |",
        f"|---|{'---|' * len(heads)}",
    ]
    for name, engine in report["engines"].items():
        if engine["medians"]:
            title = f"{name} {engine['version']}".strip()
            lines.append(f"| {title} | {' | '.join(_cells(engine['medians'], works, busiest))} |")
    return "\n".join(lines) + "\n"


def _cells(medians: Mapping[str, Any], works: Mapping[str, Any], busiest: str) -> Iterator[str]:
    for name in works:
        figure = "prompt_tok_s" if name.startswith("prompts_") else "output_tok_s"
        yield _range(medians[name][figure]) if name in medians else ""
    if busiest in medians:
        waits = [
            1e3 * medians[busiest][f"ttft_{quantile}_s"]["median"] for quantile in ("p50", "p99")
        ]
        yield f"{waits[0]:,.0f} / {waits[1]:,.0f} ms"
    else:
        yield ""


def _range(figure: Mapping[str, float]) -> str:
    if figure["least"] == figure["most"]:
        return f"{figure['median']:,.0f}"
    return f"{figure['median']:,.0f} ({figure['least']:,.0f} - {figure['most']:,.0f})"


@contextmanager
def serving(peer: Peer, port: int) -> Iterator[str]:
    """The engine's address once it is ready; it is stopped at the end. JitneyError if it does not
    get ready."""
    environment = os.environ | dict(peer.environment)
    command = [*peer.command, "--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log, terminable():
        try:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise JitneyError(f"it cannot be started: {error.strerror or error}") from None
        try:
            wait_ready(process, url, log)
            yield url
        finally:
            stop(process)


@contextmanager
def terminable() -> Iterator[None]:
    """Have SIGTERM end this process as an exception, so that the engine it started is stopped
    too.
    """

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_ready(process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    """Return when /health answers 200. JitneyError, with the end of the engine's output, if that
    never happens."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise JitneyError(
                f"it ended with status {process.returncode} before it was ready: {tail(log)}"
            )
        try:
            if httpx.get(f"{url}/health", timeout=LOOK_EVERY_S).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(LOOK_EVERY_S)
    raise JitneyError(
        f"it was not ready after {START_S:g} s; if it compiles at its first start, its own compile "
        f"cache may now be broken and has to be deleted: {tail(log)}"
    )


def tail(log: IO[bytes]) -> str:
    """The end of an engine's output, on one line."""
    log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL))
    return " ".join(log.read().decode(errors="replace").split())


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the engine and whatever it started, politely at first."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its own session: nobody else is in the group
    process.wait()


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
