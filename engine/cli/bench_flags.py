"""Flags that the kinds of `jitney bench` share: the traffic, the service level, the price and where
reports go.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from jitney.engine.cli.flags import Flags, Parser
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
from jitney.engine.telemetry.backlog import backlog_of
from jitney.engine.telemetry.request_record import RequestRecord
from jitney.engine.telemetry.summary import Slo
from jitney.engine.types import JsonDict, JsonObject

if TYPE_CHECKING:
    from jitney.engine.bench.compare import NamedWatch


def add_traffic(parser: Parser, *, requests: int, arrivals: str, requests_help: str = "") -> None:
    """The flags that say what traffic comes.

    requests, arrivals: the command's own defaults. requests_help: how many requests come, in words,
    where that is not one number; then --requests has no default.
    """
    flags = Flags(parser, "traffic")
    presets = "; ".join(f"{name}: {workload.about}" for name, workload in WORKLOADS.items())
    flags.add("--preset", f"what comes; {presets}", "mixed", choices=WORKLOADS)
    flags.add(
        "--prompt",
        "prompt tokens: 128, 50..800, lognormal:mean=200,sigma=0.8,min=1,max=800 or "
        "trace:FILE; for chat, of each turn's message [the preset's]",
        metavar="LENGTH",
    )
    flags.add("--output", "output tokens, likewise [the preset's]", metavar="LENGTH")
    flags.number("--scale", "multiply all output lengths, for a quicker run", 1.0)
    if requests_help:
        flags.whole("--requests", f"how many requests come [{requests_help}]")
    else:
        flags.whole("--requests", "how many requests come", requests)
    flags.add("--arrivals", "when they come", arrivals, choices=PATTERNS)
    flags.number("--burst-shape", "gamma: below 1 comes in bursts", 1.0)
    flags.add(
        "--trace",
        "times and lengths from a file of JSON lines instead; with --rate, its times "
        "are stretched to that mean rate",
        metavar="FILE",
    )
    flags.whole("--seed", "of lengths and times", 0)


def add_report(parser: Parser, *, html: bool = True) -> None:
    """The flags that say what is made of the measurement; html: whether the command can write a
    page.
    """
    flags = Flags(parser, "report")
    add_limits(flags)
    flags.number("--price-per-hour", "of the device, for the cost of tokens and rows")
    flags.add("--json", "write all figures to a file; - is standard output", metavar="FILE")
    if html:
        flags.add("--html", "write one page with charts that needs no network", metavar="FILE")


def add_limits(flags: Flags) -> None:
    """The service level."""
    first = "goodput counts requests whose first token came in time"
    flags.add("--slo-ttft-ms", first, type=float, metavar="MS")
    later = "and whose later tokens came this fast on average"
    flags.add("--slo-itl-ms", later, type=float, metavar="MS")


def check_numbers(args: Namespace, **least: float) -> None:
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
    names = words_of(text)
    if not names:
        raise ConfigError(f"{flag}: nothing is none of {', '.join(known)}")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"{flag}: {', '.join(unknown)} is none of {', '.join(known)}")
    return names


def words_of(text: str) -> list[str]:
    """Words between commas, each once."""
    words = dict.fromkeys(map(str.strip, text.split(",")))
    words.pop("", None)
    return list(words)


def numbers_from[N: (int, float)](flag: str, text: str, kind: type[N]) -> list[N]:
    """Positive numbers between commas, each once. ConfigError for anything else."""
    try:
        numbers = list(dict.fromkeys(map(kind, words_of(text))))
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        what = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"{flag}: must be positive {what} separated by commas")
    return numbers


def is_closed(args: Namespace) -> bool:
    """True where a request comes when another one ends."""
    return not args.trace and args.arrivals == "closed"


def is_drawn(args: Namespace) -> bool:
    """True where requests come at times that are drawn for a rate."""
    return not args.trace and args.arrivals != "closed"


def backlog_json(requests: Sequence[RequestRecord], closed: bool) -> JsonDict | None:
    """How the queue went, None for a closed loop: there it cannot grow."""
    if closed:
        return None
    return msgspec.to_builtins(backlog_of(requests))


def traffic_from(args: Namespace, rate: float) -> list[Arrival]:
    """The requests that the flags describe; rate: requests a second, 0 where none is needed."""
    check_numbers(args, requests=1, scale=0.001, burst_shape=0.001, seed=0)
    if args.trace:
        arrivals = read_trace(args.trace)
        if rate:
            arrivals = at_rate(arrivals, rate)
    else:
        arrivals = _made_up(args, rate)
    for number, arrival in enumerate(arrivals):
        n_output = max(1, round(arrival.n_output * args.scale))
        arrivals[number] = msgspec.structs.replace(arrival, n_output=n_output)
    return arrivals


def _made_up(args: Namespace, rate: float) -> list[Arrival]:
    return make_arrivals(
        WORKLOADS[args.preset],
        args.requests,
        make_pattern(args.arrivals, rate=rate, shape=args.burst_shape),
        args.seed,
        prompt=_lengths(args.prompt, "--prompt"),
        output=_lengths(args.output, "--output"),
    )


def _lengths(text: str | None, flag: str) -> Lengths | None:
    if not text:
        return None
    return parse_lengths(text, flag)


def describe_traffic(args: Namespace, arrivals: list[Arrival], rate: float) -> JsonDict:
    """The traffic for the report: what was asked for, and what it came to."""
    prompts = [arrival.n_prompt for arrival in arrivals]
    outputs = [arrival.n_output for arrival in arrivals]
    conversations = {arrival.conversation for arrival in arrivals}
    return {
        "requests": len(arrivals),
        "prompt_tokens": sum(prompts),
        "output_tokens": sum(outputs),
        "trace": args.trace,
        **_source(args),
        "prompt_lengths": msgspec.to_builtins(LengthSummary.of(prompts)),
        "output_lengths": msgspec.to_builtins(LengthSummary.of(outputs)),
        "conversations": len(conversations - {0}),
        "repeated_prompt_tokens": repeated_tokens(arrivals),
        "scale": args.scale,
        "rate": rate or None,
        "seed": args.seed,
    }


def _source(args: Namespace) -> dict[str, str | None]:
    """What was asked for; a preset is "custom" where a flag says other lengths than it has."""
    source = dict.fromkeys(("preset", "about", "prompt", "output"))
    if args.trace:
        return source | {"arrivals": "trace"}
    workload = WORKLOADS[args.preset]
    if args.prompt or args.output:
        source["preset"] = "custom"
    else:
        source["preset"], source["about"] = args.preset, workload.about
    source["prompt"] = args.prompt or workload.prompt
    source["output"] = args.output or workload.output
    return source | {"arrivals": args.arrivals}


def traffic_line(traffic: JsonObject) -> str:
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


def slo_from(args: Namespace) -> Slo | None:
    """The service level that the flags name, None if they name none."""
    check_numbers(args, slo_ttft_ms=0, slo_itl_ms=0, price_per_hour=0)
    if args.slo_ttft_ms is None and args.slo_itl_ms is None:
        return None
    return Slo(_as_seconds(args.slo_ttft_ms), _as_seconds(args.slo_itl_ms))


def _as_seconds(milliseconds: float | None) -> float | None:
    if milliseconds is None:
        return None
    return milliseconds / 1e3


def write_json(file: str, report: JsonObject) -> None:
    """To a file, or to standard output for "-". ConfigError if it cannot be written."""
    text = json.dumps(report, indent=1)
    if file == "-":
        print(text)
        return
    try:
        Path(file).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {file}: {error.strerror or error}") from None


def check_writable(args: Namespace, *names: str) -> None:
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
        tasks: JsonDict = {}

        def watch(name: str, done: int, of: int) -> None:
            if name not in tasks:
                tasks[name] = shown.add_task(name, total=of)
            shown.update(tasks[name], completed=done, total=of)

        yield watch
