"""Flags that the kinds of `jitney bench` share: the traffic, the service level, the price and where
reports go.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from jitney.engine.cli.flags import Flag, FlagGroup
from jitney.engine.errors import ConfigError
from jitney.engine.report.page import write_text
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
from jitney.engine.telemetry.backlog import QueueGrowth
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


def traffic_flags(requests: int | None, arrivals: str, shown: str = "") -> FlagGroup:
    """The flags that say what traffic comes.

    requests, arrivals: the command's own defaults. shown: how many requests come, in words, where
    that is not one number.
    """
    text = f"how many requests come [{shown or requests}]"
    how_many = Flag("--requests", {"help": text, "default": requests, "type": int, "metavar": "N"})
    when = Flag.of("--arrivals", "when they come", arrivals, choices=PATTERNS)
    return FlagGroup((*_LENGTHS, how_many, when, *_TIMES), "traffic")


#: What is made of the measurement; a command that writes no page has the shorter one.
REPORT_WITHOUT_PAGE = FlagGroup((*_LIMITS, _JSON), "report")
REPORT = FlagGroup((*_LIMITS, _JSON, _HTML), "report")


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
    unknown = ", ".join(name for name in names if name not in known)
    if unknown or not names:
        raise ConfigError(f"{flag}: {unknown or 'nothing'} is none of {', '.join(known)}")
    return names


def words_of(text: str) -> list[str]:
    """Words between commas, each once."""
    words = dict.fromkeys(map(str.strip, text.split(",")))
    words.pop("", None)
    return list(words)


def numbers_from[N: (int, float)](flag: str, text: str, kind: type[N]) -> list[N]:
    """Positive numbers between commas, each once. ConfigError for anything else."""
    with suppress(ValueError):
        numbers = list(dict.fromkeys(map(kind, words_of(text))))
        if numbers and 0 < min(numbers) <= max(numbers) < float("inf"):
            return numbers
    what = "whole numbers" if kind is int else "numbers"
    raise ConfigError(f"{flag}: must be positive {what} separated by commas")


def is_closed(args: Namespace) -> bool:
    """True where a request comes when another one ends."""
    return not args.trace and args.arrivals == "closed"


def is_drawn(args: Namespace) -> bool:
    """True where requests come at times that are drawn for a rate."""
    return not args.trace and args.arrivals != "closed"


def check_concurrency(args: Namespace) -> None:
    """Raise ConfigError for a number of open requests where they come at their own times."""
    if args.concurrency and not is_closed(args):
        raise ConfigError(
            "--concurrency is for --arrivals closed: other arrivals come at their own times"
        )


def check_seats(args: Namespace) -> None:
    """Raise ConfigError for seats that are given twice."""
    if args.seats is not None and "max_seats" in vars(args):
        raise ConfigError("--seats and --max-seats are the same setting: give one")


def backlog_json(requests: Sequence[RequestRecord], closed: bool) -> JsonDict | None:
    """How the queue went, None for a closed loop: there it cannot grow."""
    if closed:
        return None
    return msgspec.to_builtins(QueueGrowth.of(requests))


def traffic_from(args: Namespace, rate: float) -> list[Arrival]:
    """The requests that the flags describe; rate: requests a second, 0 where none is needed."""
    check_numbers(args, requests=1, scale=0.001, burst_shape=0.001, seed=0)
    arrivals = _recorded(args.trace, rate) if args.trace else _made_up(args, rate)
    return [_scaled(arrival, args.scale) for arrival in arrivals]


def _scaled(arrival: Arrival, scale: float) -> Arrival:
    """With its output so many times as long."""
    return msgspec.structs.replace(arrival, n_output=max(1, round(arrival.n_output * scale)))


def _recorded(file: str, rate: float) -> list[Arrival]:
    arrivals = read_trace(file)
    return at_rate(arrivals, rate) if rate else arrivals


def _made_up(args: Namespace, rate: float) -> list[Arrival]:
    pattern = make_pattern(args.arrivals, rate=rate, shape=args.burst_shape)
    lengths = {name: _lengths(args, name) for name in ("prompt", "output")}
    return make_arrivals(WORKLOADS[args.preset], args.requests, pattern, args.seed, **lengths)


def _lengths(args: Namespace, name: str) -> Lengths | None:
    text = getattr(args, name)
    return parse_lengths(text, flag_of(name)) if text else None


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
    size: JsonDict = {"requests": len(arrivals)}
    for kind in ("prompt", "output"):
        lengths = [getattr(arrival, f"n_{kind}") for arrival in arrivals]
        size[f"{kind}_tokens"] = sum(lengths)
        size[f"{kind}_lengths"] = msgspec.to_builtins(LengthSummary.of(lengths))
    return size


def _source(args: Namespace) -> dict[str, str | None]:
    """What was asked for."""
    if args.trace:
        return _OF_A_TRACE
    return _preset_of(args) | {"arrivals": args.arrivals}


_OF_A_TRACE = dict.fromkeys(("preset", "about", "prompt", "output")) | {"arrivals": "trace"}


def _preset_of(args: Namespace) -> dict[str, str | None]:
    """A preset is "custom" where a flag says other lengths than it has."""
    workload = WORKLOADS[args.preset]
    lengths = {"prompt": args.prompt or workload.prompt, "output": args.output or workload.output}
    if args.prompt or args.output:
        return {"preset": "custom", "about": None, **lengths}
    return {"preset": args.preset, "about": workload.about, **lengths}


def traffic_line(traffic: JsonObject) -> str:
    """The same in a sentence, with what its lengths came to."""
    what = traffic["trace"] or traffic["preset"]
    return f"{what}: {'; '.join(_traffic_parts(traffic))}"


def _traffic_parts(traffic: JsonObject) -> Iterator[str]:
    yield _amount(traffic)
    rate = f" at {traffic['rate']:.3g} a second" if traffic["rate"] else ""
    yield f"{traffic['arrivals']} arrivals{rate}"
    for kind in ("prompt", "output"):
        yield f"{kind}s {LengthSummary(**traffic[f'{kind}_lengths'])}"
    if traffic["conversations"]:
        yield _repetition(traffic)


def _amount(traffic: JsonObject) -> str:
    amount = "{requests} requests, {prompt_tokens:,} prompt and {output_tokens:,} output tokens"
    if traffic["scale"] != 1:
        amount += ", output lengths times {scale:g}"
    return amount.format_map(traffic)


def _repetition(traffic: JsonObject) -> str:
    share = traffic["repeated_prompt_tokens"] / traffic["prompt_tokens"]
    return f"{traffic['conversations']} conversations, {share:.0%} of the prompt tokens came before"


def slo_from(args: Namespace) -> Slo | None:
    """The service level that the flags name, None if they name none."""
    check_numbers(args, slo_ttft_ms=0, slo_itl_ms=0, price_per_hour=0)
    slo = Slo(_as_seconds(args.slo_ttft_ms), _as_seconds(args.slo_itl_ms))
    return None if slo == _NO_SLO else slo


_NO_SLO = Slo()


def figure_options(args: Namespace) -> JsonDict:
    """Options of `summary.summarise`."""
    return {"slo": slo_from(args), "price_per_hour": args.price_per_hour}


def _as_seconds(milliseconds: float | None) -> float | None:
    if milliseconds is None:
        return None
    return milliseconds / 1e3


def write_report(args: Namespace, report: JsonObject) -> bool:
    """Write what --json asks for; False where that is standard output, which tables would spoil.
    ConfigError if it cannot be written.
    """
    if args.json == "-":
        print(json.dumps(report, indent=1))
    elif args.json:
        write_text("--json", args.json, json.dumps(report, indent=1) + "\n")
    return args.json != "-"


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
