"""Flags that the kinds of `jitney bench` share: the traffic, the service level, the price and where
reports go.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from jitney.engine.cli.flags import Parser
from jitney.engine.errors import ConfigError
from jitney.engine.simulation.workload import (
    PATTERNS,
    WORKLOADS,
    Arrival,
    Lengths,
    LengthSummary,
    at_rate,
    make_arrivals,
    make_pattern,
    parse_lengths,
    read_trace,
    repeated_tokens,
)
from jitney.engine.telemetry.summary import Slo

if TYPE_CHECKING:
    from jitney.engine.bench.compare import NamedWatch


def add_traffic(parser: Parser, *, requests: int, arrivals: str, requests_help: str = "") -> None:
    """The flags that say what traffic comes.

    requests, arrivals: the command's own defaults. requests_help: how many requests come, in words,
    where that is not one number.
    """
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
    shown = requests_help or requests
    add(
        "--requests",
        type=int,
        default=requests,
        metavar="N",
        help=f"how many requests come [{shown}]",
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


def check_numbers(args: argparse.Namespace, **least: float) -> None:
    """Raise ConfigError naming the first flag below its least value; absent flags (None) pass."""
    for name, low in least.items():
        value = getattr(args, name)
        if value is not None and not low <= value < float("inf"):
            raise ConfigError(f"{flag_of(name)} must be at least {low:g}, not {value:g}")


def flag_of(name: str) -> str:
    """The flag of an attribute of the parsed arguments."""
    return f"--{name.replace('_', '-')}"


def names_from(flag: str, text: str, known: Collection[str]) -> list[str]:
    """Words between commas, each once. ConfigError if one is not known, or if there is none."""
    names = _words(text)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        wrong = ", ".join(unknown) or "nothing"
        raise ConfigError(f"{flag}: {wrong} is none of {', '.join(known)}")
    return names


def _words(text: str) -> list[str]:
    """Words between commas, each once."""
    words = [word.strip() for word in text.split(",")]
    return list(dict.fromkeys(filter(None, words)))


def numbers_from[N: (int, float)](flag: str, text: str, kind: type[N]) -> list[N]:
    """Positive numbers between commas, each once. ConfigError for anything else."""
    try:
        numbers = list(dict.fromkeys(map(kind, _words(text))))
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        whole = "whole " if kind is int else ""
        raise ConfigError(f"{flag}: must be positive {whole}numbers separated by commas")
    return numbers


def is_closed(args: argparse.Namespace) -> bool:
    """True where a request comes when another one ends."""
    return not args.trace and args.arrivals == "closed"


def traffic_from(args: argparse.Namespace, rate: float) -> list[Arrival]:
    """The requests that the flags describe; rate: requests a second, 0 where none is needed."""
    check_numbers(args, requests=1, scale=0.001, burst_shape=0.001, seed=0)
    arrivals = _recorded(args.trace, rate) if args.trace else _made_up(args, rate)
    for number, arrival in enumerate(arrivals):
        n_output = max(1, round(arrival.n_output * args.scale))
        arrivals[number] = msgspec.structs.replace(arrival, n_output=n_output)
    return arrivals


def _recorded(trace: str, rate: float) -> list[Arrival]:
    arrivals = read_trace(trace)
    return at_rate(arrivals, rate) if rate else arrivals


def _made_up(args: argparse.Namespace, rate: float) -> list[Arrival]:
    return make_arrivals(
        WORKLOADS[args.preset],
        args.requests,
        make_pattern(args.arrivals, rate=rate, shape=args.burst_shape),
        args.seed,
        prompt=_lengths(args.prompt, "--prompt"),
        output=_lengths(args.output, "--output"),
    )


def _lengths(text: str | None, flag: str) -> Lengths | None:
    return parse_lengths(text, flag) if text else None


def describe_traffic(
    args: argparse.Namespace, arrivals: list[Arrival], rate: float
) -> dict[str, Any]:
    """The traffic for the report: what was asked for, and what it came to."""
    prompts = [arrival.n_prompt for arrival in arrivals]
    outputs = [arrival.n_output for arrival in arrivals]
    conversations = {arrival.conversation for arrival in arrivals if arrival.conversation}
    return {
        "requests": len(arrivals),
        "prompt_tokens": sum(prompts),
        "output_tokens": sum(outputs),
        "trace": args.trace,
        **_source(args),
        "prompt_lengths": msgspec.to_builtins(LengthSummary.of(prompts)),
        "output_lengths": msgspec.to_builtins(LengthSummary.of(outputs)),
        "conversations": len(conversations),
        "repeated_prompt_tokens": repeated_tokens(arrivals),
        "scale": args.scale,
        "rate": rate or None,
        "seed": args.seed,
    }


def _source(args: argparse.Namespace) -> dict[str, str | None]:
    """What was asked for; a preset is "custom" where a flag says other lengths than it has."""
    if args.trace:
        unknown = dict.fromkeys(("preset", "about", "prompt", "output"))
        return unknown | {"arrivals": "trace"}
    workload = WORKLOADS[args.preset]
    preset, about = args.preset, workload.about
    if args.prompt or args.output:
        preset, about = "custom", None
    return {
        "preset": preset,
        "about": about,
        "prompt": args.prompt or workload.prompt,
        "output": args.output or workload.output,
        "arrivals": args.arrivals,
    }


def traffic_line(traffic: Mapping[str, Any]) -> str:
    """The same in a sentence, with what its lengths came to."""
    line = (
        f"{traffic['trace'] or traffic['preset']}: {traffic['requests']} requests, "
        f"{traffic['prompt_tokens']:,} prompt and {traffic['output_tokens']:,} output tokens"
    )
    if traffic["scale"] != 1:
        line += f", output lengths times {traffic['scale']:g}"
    line += f"; {traffic['arrivals']} arrivals"
    if traffic["rate"]:
        line += f" at {traffic['rate']:.3g} a second"
    line += f"; prompts {LengthSummary(**traffic['prompt_lengths'])}"
    line += f"; outputs {LengthSummary(**traffic['output_lengths'])}"
    if traffic["conversations"]:
        share = traffic["repeated_prompt_tokens"] / traffic["prompt_tokens"]
        line += (
            f"; {traffic['conversations']} conversations, {share:.0%} of the prompt tokens came "
            "before"
        )
    return line


def slo_from(args: argparse.Namespace) -> Slo | None:
    """The service level that the flags name, None if they name none."""
    check_numbers(args, slo_ttft_ms=0, slo_itl_ms=0, price_per_hour=0)
    if args.slo_ttft_ms is None and args.slo_itl_ms is None:
        return None
    return Slo(_as_seconds(args.slo_ttft_ms), _as_seconds(args.slo_itl_ms))


def _as_seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


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


def check_writable(args: argparse.Namespace, *names: str) -> None:
    """Raise ConfigError before anything runs if a file that the flags name could not be written at
    the end.
    """
    for name in names:
        file = getattr(args, name)
        if file and file != "-" and not Path(file).resolve().parent.is_dir():
            raise ConfigError(f"{flag_of(name)} {file}: there is no such folder")


@contextmanager
def progress() -> Iterator[NamedWatch]:
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
