"""Flags that the kinds of `jitney bench` share: the traffic, the service level, the price and where reports go."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from jitney.engine.cli.flags import Parser
from jitney.engine.errors import ConfigError
from jitney.engine.figures import Slo
from jitney.engine.workload import PATTERNS, Arrival, at_rate, make_pattern, parse_lengths, read_trace, synthesise


class Preset(NamedTuple):
    """Lengths of a workload with a name, as the length flags write them."""

    prompt: str
    output: str
    what: str


PRESETS = {
    "mixed": Preset("lognormal:mean=48,sigma=0.5,min=8,max=128", "lognormal:mean=120,sigma=1.5,min=50,max=800",
                    "outputs of 50 to 800 tokens, most of them short"),
    "short": Preset("16..48", "8..64", "short outputs, every length from 8 to 64 alike"),
}


def add_traffic(parser: Parser, *, requests: int, arrivals: str) -> None:
    """The flags that say what traffic comes, with a command's own defaults."""
    add = parser.add_argument_group("traffic").add_argument
    presets = "; ".join(f"{name}: {preset.what}" for name, preset in PRESETS.items())
    add("--preset", choices=PRESETS, default="mixed", help=f"lengths of prompts and outputs; {presets} [mixed]")
    add("--prompt", metavar="LENGTH", help="prompt tokens: 128, 50..800, lognormal:mean=200,sigma=0.8,min=1,max=800 or "
        "trace:FILE [the preset's]")
    add("--output", metavar="LENGTH", help="output tokens, likewise [the preset's]")
    add("--scale", type=float, default=1.0, metavar="X", help="multiply all output lengths, for a quicker run [1]")
    add("--requests", type=int, default=requests, metavar="N", help=f"how many requests come [{requests}]")
    add("--arrivals", choices=PATTERNS, default=arrivals, help=f"when they come [{arrivals}]")
    add("--burst-shape", type=float, default=1.0, metavar="X", help="gamma: below 1 comes in bursts [1]")
    add("--trace", metavar="FILE", help="times and lengths from a file of JSON lines instead; with --rate, its times "
        "are stretched to that mean rate")
    add("--seed", type=int, default=0, metavar="N", help="of lengths and times [0]")


def add_report(parser: Parser, *, html: bool = True) -> None:
    """The flags that say what is made of the measurement; html: whether the command can write a page."""
    add = parser.add_argument_group("report").add_argument
    add("--slo-ttft-ms", type=float, metavar="MS", help="goodput counts requests whose first token came in time")
    add("--slo-itl-ms", type=float, metavar="MS", help="and whose later tokens came this fast on average")
    add("--price-per-hour", type=float, metavar="X", help="of the device, for the cost of tokens and rows")
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
    preset = PRESETS[known.preset]
    pattern = make_pattern(known.arrivals, rate=rate, shape=known.burst_shape)
    return scaled(synthesise(known.requests, parse_lengths(known.prompt or preset.prompt, "--prompt"),
                             parse_lengths(known.output or preset.output, "--output"), pattern, known.seed),
                  known.scale)


def scaled(arrivals: list[Arrival], scale: float) -> list[Arrival]:
    """The same requests with output lengths multiplied, at least 1."""
    return [Arrival(a.at, a.n_prompt, max(1, round(a.n_output * scale)), a.tenant, a.priority) for a in arrivals]


def describe_traffic(known: argparse.Namespace, arrivals: list[Arrival], rate: float) -> dict[str, Any]:
    """The traffic for the report: what was asked for, and what it came to."""
    preset = PRESETS[known.preset]
    return {"requests": len(arrivals), "prompt_tokens": sum(a.n_prompt for a in arrivals),
            "output_tokens": sum(a.n_output for a in arrivals), "trace": known.trace,
            "prompt": None if known.trace else known.prompt or preset.prompt,
            "output": None if known.trace else known.output or preset.output,
            "scale": known.scale, "arrivals": "trace" if known.trace else known.arrivals, "rate": rate or None,
            "seed": known.seed}


def traffic_line(traffic: Mapping[str, Any]) -> str:
    """The same in a sentence."""
    scale = f", output lengths times {traffic['scale']:g}" if traffic["scale"] != 1 else ""
    rate = f" at {traffic['rate']:.3g} a second" if traffic["rate"] else ""
    return (f"{traffic['requests']} requests, {traffic['prompt_tokens']:,} prompt and {traffic['output_tokens']:,} "
            f"output tokens{scale}; {traffic['arrivals']} arrivals{rate}")


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
    """Raise ConfigError before anything runs if a file that the flags name could not be written at the end."""
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
    with Progress(TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                  console=console, disable=not console.is_terminal, refresh_per_second=2) as shown:
        tasks: dict[str, Any] = {}

        def watch(name: str, done: int, of: int) -> None:
            if name not in tasks:
                tasks[name] = shown.add_task(name, total=of)
            shown.update(tasks[name], completed=done, total=of)

        yield watch
