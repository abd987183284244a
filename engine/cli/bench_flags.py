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

from jitney.engine.cli.flags import Flag, Parser, add_flags
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
    from rich.progress import Progress, TaskID

    from jitney.engine.bench.compare import NamedWatch


#: What the requests are made of.
_LENGTHS = (
    Flag.of(
        "--preset",
        f"what comes; {'; '.join(f'{name}: {load.about}' for name, load in WORKLOADS.items())}",
        "mixed",
        choices=WORKLOADS,
    ),
    Flag.of(
        "--prompt",
        "prompt tokens: 128, 50..800, lognormal:mean=200,sigma=0.8,min=1,max=800 or "
        "trace:FILE; for chat, of each turn's message [the preset's]",
        metavar="LENGTH",
    ),
    Flag.of("--output", "output tokens, likewise [the preset's]", metavar="LENGTH"),
    Flag.number("--scale", "multiply all output lengths, for a quicker run", 1.0),
)
#: More about when they come.
_TIMES = (
    Flag.number("--burst-shape", "gamma: below 1 comes in bursts", 1.0),
    Flag.of(
        "--trace",
        "times and lengths from a file of JSON lines instead; with --rate, its times "
        "are stretched to that mean rate",
        metavar="FILE",
    ),
    Flag.whole("--seed", "of lengths and times", 0),
)
#: The service level and the price.
_LIMITS = (
    Flag.number(
        "--slo-ttft-ms",
        "goodput counts requests whose first token came in time",
        metavar="MS",
    ),
    Flag.number("--slo-itl-ms", "and whose later tokens came this fast on average", metavar="MS"),
    Flag.number("--price-per-hour", "of the device, for the cost of tokens and rows"),
)
_JSON = Flag.of("--json", "write all figures to a file; - is standard output", metavar="FILE")
_HTML = Flag.of("--html", "write one page with charts that needs no network", metavar="FILE")


def add_traffic(parser: Parser, *, requests: int, arrivals: str, requests_help: str = "") -> None:
    """The flags that say what traffic comes.

    requests, arrivals: the command's own defaults. requests_help: how many requests come, in words,
    where that is not one number; then --requests has no default.
    """
    how_many = Flag.whole("--requests", "how many requests come", requests)
    if requests_help:
        how_many = Flag.whole("--requests", f"how many requests come [{requests_help}]")
    when = Flag.of("--arrivals", "when they come", arrivals, choices=PATTERNS)
    add_flags(parser, (*_LENGTHS, how_many, when, *_TIMES), "traffic")


def add_report(parser: Parser, *, html: bool = True) -> None:
    """The flags that say what is made of the measurement; html: whether the command can write a
    page.
    """
    pages = (_HTML,) if html else ()
    add_flags(parser, (*_LIMITS, _JSON, *pages), "report")


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
    if not numbers or not 0 < min(numbers) <= max(numbers) < float("inf"):
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
    arrivals = _recorded(args.trace, rate) if args.trace else _made_up(args, rate)
    for number, arrival in enumerate(arrivals):
        n_output = max(1, round(arrival.n_output * args.scale))
        arrivals[number] = msgspec.structs.replace(arrival, n_output=n_output)
    return arrivals


def _recorded(file: str, rate: float) -> list[Arrival]:
    arrivals = read_trace(file)
    return at_rate(arrivals, rate) if rate else arrivals


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
    conversations = {arrival.conversation for arrival in arrivals}
    return {
        **_size_of(arrivals),
        "trace": args.trace,
        **_source(args),
        "conversations": len(conversations - {0}),
        "repeated_prompt_tokens": repeated_tokens(arrivals),
        "scale": args.scale,
        "rate": rate or None,
        "seed": args.seed,
    }


def _size_of(arrivals: list[Arrival]) -> JsonDict:
    prompts = [arrival.n_prompt for arrival in arrivals]
    outputs = [arrival.n_output for arrival in arrivals]
    return {
        "requests": len(arrivals),
        "prompt_tokens": sum(prompts),
        "output_tokens": sum(outputs),
        "prompt_lengths": msgspec.to_builtins(LengthSummary.of(prompts)),
        "output_lengths": msgspec.to_builtins(LengthSummary.of(outputs)),
    }


def _source(args: Namespace) -> dict[str, str | None]:
    """What was asked for."""
    if args.trace:
        unasked = dict.fromkeys(("preset", "about", "prompt", "output"))
        return unasked | {"arrivals": "trace"}
    workload = WORKLOADS[args.preset]
    return {
        **_preset_of(args),
        "prompt": args.prompt or workload.prompt,
        "output": args.output or workload.output,
        "arrivals": args.arrivals,
    }


def _preset_of(args: Namespace) -> dict[str, str | None]:
    """A preset is "custom" where a flag says other lengths than it has."""
    if args.prompt or args.output:
        return {"preset": "custom", "about": None}
    return {"preset": args.preset, "about": WORKLOADS[args.preset].about}


def traffic_line(traffic: JsonObject) -> str:
    """The same in a sentence, with what its lengths came to."""
    line = f"{traffic['trace'] or traffic['preset']}: {_amount(traffic)}"
    line += f"; {traffic['arrivals']} arrivals"
    if traffic["rate"]:
        line += f" at {traffic['rate']:.3g} a second"
    line += f"; prompts {LengthSummary(**traffic['prompt_lengths'])}"
    line += f"; outputs {LengthSummary(**traffic['output_lengths'])}"
    if traffic["conversations"]:
        line += f"; {_repetition(traffic)}"
    return line


def _amount(traffic: JsonObject) -> str:
    amount = (
        f"{traffic['requests']} requests, {traffic['prompt_tokens']:,} prompt and "
        f"{traffic['output_tokens']:,} output tokens"
    )
    if traffic["scale"] != 1:
        amount += f", output lengths times {traffic['scale']:g}"
    return amount


def _repetition(traffic: JsonObject) -> str:
    share = traffic["repeated_prompt_tokens"] / traffic["prompt_tokens"]
    return f"{traffic['conversations']} conversations, {share:.0%} of the prompt tokens came before"


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


def write_report(args: Namespace, report: JsonObject) -> bool:
    """Write what --json asks for; False where that is standard output, which tables would spoil.
    ConfigError if it cannot be written.
    """
    if not args.json:
        return True
    text = json.dumps(report, indent=1)
    if args.json == "-":
        print(text)
        return False
    write_text("--json", args.json, text + "\n")
    return True


def write_text(flag: str, file: str, text: str) -> None:
    """ConfigError, naming the flag, if it cannot be written."""
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {file}: {error.strerror or error}") from None


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
    with _bars() as bars:
        tasks: dict[str, TaskID] = {}

        def watch(name: str, done: int, of: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=of)
            bars.update(tasks[name], completed=done, total=of)

        yield watch


def _bars() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        refresh_per_second=2,
    )
