"""Flags that the kinds of `jitney bench` share: the traffic, the service level, the price and where
reports go.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from jitney.engine.cli.flags import Parser
from jitney.engine.errors import ConfigError
from jitney.engine.simulation.workload import (
    PATTERNS,
    WORKLOADS,
    Arrival,
    LengthSummary,
    at_rate,
    make_arrivals,
    make_pattern,
    parse_lengths,
    read_trace,
    repeated_tokens,
)
from jitney.engine.telemetry.summary import Slo


def add_traffic(parser: Parser, *, requests: int, arrivals: str, told: str = "") -> None:
    """The flags that say what traffic comes, with a command's own defaults; told: how many requests
    come, in words, where that is not one number."""
    add = parser.add_argument_group("traffic").add_argument
    presets = "; ".join(f"{name}: {workload.about}" for name, workload in WORKLOADS.items())
    add("--preset", choices=WORKLOADS, default="mixed", help=f"what comes; {presets} [mixed]")
    add(
        "--prompt",
        metavar="LENGTH",
        help="prompt tokens: 128, 50..800, lognormal:mean=200,sigma=0.8,min=1,max=800 or "
        "trace:FILE; for chat, of each turn's message [the preset's]",
    )
    add("--output", metavar="LENGTH", help="output tokens, likewise [the preset's]")
    add(
        "--scale",
        type=float,
        default=1.0,
        metavar="X",
        help="multiply all output lengths, for a quicker run [1]",
    )
    add(
        "--requests",
        type=int,
        default=requests,
        metavar="N",
        help=f"how many requests come [{told or requests}]",
    )
    add("--arrivals", choices=PATTERNS, default=arrivals, help=f"when they come [{arrivals}]")
    add(
        "--burst-shape",
        type=float,
        default=1.0,
        metavar="X",
        help="gamma: below 1 comes in bursts [1]",
    )
    add(
        "--trace",
        metavar="FILE",
        help="times and lengths from a file of JSON lines instead; with --rate, its times "
        "are stretched to that mean rate",
    )
    add("--seed", type=int, default=0, metavar="N", help="of lengths and times [0]")


def add_report(parser: Parser, *, html: bool = True) -> None:
    """The flags that say what is made of the measurement; html: whether the command can write a
    page.
    """
    add = parser.add_argument_group("report").add_argument
    add(
        "--slo-ttft-ms",
        type=float,
        metavar="MS",
        help="goodput counts requests whose first token came in time",
    )
    add(
        "--slo-itl-ms",
        type=float,
        metavar="MS",
        help="and whose later tokens came this fast on average",
    )
    add(
        "--price-per-hour",
        type=float,
        metavar="X",
        help="of the device, for the cost of tokens and rows",
    )
    add("--json", metavar="FILE", help="write all figures to a file; - is standard output")
    if html:
        add("--html", metavar="FILE", help="write one page with charts that needs no network")


def check_numbers(known: argparse.Namespace, **least: float) -> None:
    """Raise ConfigError naming the first flag below its least value; absent flags (None) pass."""
    for name, low in least.items():
        value = getattr(known, name)
        if value is not None and not low <= value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {low:g}, not {value:g}")


def traffic_from(known: argparse.Namespace, rate: float) -> list[Arrival]:
    """The requests that the flags describe; rate: requests a second, 0 where none is needed."""
    check_numbers(known, requests=1, scale=0.001, burst_shape=0.001, seed=0)
    if known.trace:
        arrivals = read_trace(known.trace)
        return scaled(at_rate(arrivals, rate) if rate else arrivals, known.scale)
    pattern = make_pattern(known.arrivals, rate=rate, shape=known.burst_shape)
    arrivals = make_arrivals(
        WORKLOADS[known.preset],
        known.requests,
        pattern,
        known.seed,
        prompt=parse_lengths(known.prompt, "--prompt") if known.prompt else None,
        output=parse_lengths(known.output, "--output") if known.output else None,
    )
    return scaled(arrivals, known.scale)


def scaled(arrivals: list[Arrival], scale: float) -> list[Arrival]:
    """The same requests with output lengths multiplied, at least 1."""
    return [
        msgspec.structs.replace(arrival, n_output=max(1, round(arrival.n_output * scale)))
        for arrival in arrivals
    ]


def describe_traffic(
    known: argparse.Namespace, arrivals: list[Arrival], rate: float
) -> dict[str, Any]:
    """The traffic for the report: what was asked for, and what it came to."""
    workload = WORKLOADS[known.preset]
    prompt = known.prompt or workload.prompt
    output = known.output or workload.output
    conversations = {arrival.conversation for arrival in arrivals if arrival.conversation}
    return {
        "requests": len(arrivals),
        "prompt_tokens": sum(a.n_prompt for a in arrivals),
        "output_tokens": sum(a.n_output for a in arrivals),
        "trace": known.trace,
        "preset": None if known.trace else preset_of(known),
        "about": None if known.trace or preset_of(known) == "custom" else workload.about,
        "prompt": None if known.trace else prompt,
        "output": None if known.trace else output,
        "prompt_lengths": msgspec.to_builtins(LengthSummary.of(a.n_prompt for a in arrivals)),
        "output_lengths": msgspec.to_builtins(LengthSummary.of(a.n_output for a in arrivals)),
        "conversations": len(conversations),
        "repeated_prompt_tokens": repeated_tokens(arrivals),
        "scale": known.scale,
        "arrivals": "trace" if known.trace else known.arrivals,
        "rate": rate or None,
        "seed": known.seed,
    }


def preset_of(known: argparse.Namespace) -> str:
    """The preset's name; "custom" where a flag says other lengths than it has."""
    return "custom" if known.prompt or known.output else known.preset


def traffic_line(traffic: Mapping[str, Any]) -> str:
    """The same in a sentence, with what its lengths came to."""
    scale = f", output lengths times {traffic['scale']:g}" if traffic["scale"] != 1 else ""
    rate = f" at {traffic['rate']:.3g} a second" if traffic["rate"] else ""
    prompts, outputs = (
        LengthSummary(**traffic[name]) for name in ("prompt_lengths", "output_lengths")
    )
    source = traffic["trace"] or traffic["preset"]
    line = (
        f"{source}: {traffic['requests']} requests, {traffic['prompt_tokens']:,} prompt and "
        f"{traffic['output_tokens']:,} output tokens{scale}; {traffic['arrivals']} arrivals{rate}; "
        f"prompts {prompts}; outputs {outputs}"
    )
    if traffic["conversations"]:
        share = traffic["repeated_prompt_tokens"] / traffic["prompt_tokens"]
        line += (
            f"; {traffic['conversations']} conversations, {share:.0%} of "
            "the prompt tokens came before"
        )
    return line


def slo_from(known: argparse.Namespace) -> Slo | None:
    """The service level that the flags name, None if they name none."""
    check_numbers(known, slo_ttft_ms=0, slo_itl_ms=0, price_per_hour=0)
    ttft, itl = known.slo_ttft_ms, known.slo_itl_ms
    if ttft is None and itl is None:
        return None
    return Slo(None if ttft is None else ttft / 1e3, None if itl is None else itl / 1e3)


def write_json(file: str, report: Mapping[str, Any]) -> None:
    """To a file, or to standard output for "-". ConfigError if it cannot be written."""
    text = json.dumps(report, indent=1)
    if file == "-":
        print(text)
        return
    try:
        Path(file).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {file}: {error.strerror or error}") from None


def check_writable(known: argparse.Namespace, *names: str) -> None:
    """Raise ConfigError before anything runs if a file that the flags name could not be written at
    the end.
    """
    for name in names:
        file = getattr(known, name)
        if file and file != "-" and not Path(file).resolve().parent.is_dir():
            raise ConfigError(f"--{name.replace('_', '-')} {file}: there is no such folder")


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar per name on standard error, where a person watches it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        refresh_per_second=2,
    ) as shown:
        tasks: dict[str, Any] = {}

        def watch(name: str, done: int, of: int) -> None:
            if name not in tasks:
                tasks[name] = shown.add_task(name, total=of)
            shown.update(tasks[name], completed=done, total=of)

        yield watch
