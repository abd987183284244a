"""Flags that the kinds of `jitney bench` share: traffic, service level, price and report files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.common.terminal import console
from jitney.engine.common.trace import Arrival
from jitney.engine.config import Arguments, Flag, FlagGroup
from jitney.engine.lab.backlog import QueueGrowth
from jitney.engine.lab.simulation.workload import (
    WORKLOADS,
    Closed,
    Gamma,
    Lengths,
    LengthSummary,
    Poisson,
    parse_lengths,
)

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from jitney.engine.common.reports.page import Page
    from jitney.engine.lab.bench.load import LoadResult
    from jitney.engine.lab.bench.offline import NamedWatch
    from jitney.engine.lab.simulation.engine_run import EngineRun


#: Flags for the lengths of requests.
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
    Flag.number("--scale", "multiply all output lengths, for a quicker run", 1.0, least=0.001),
)
#: Further flags for arrival times.
_TIMES = (
    Flag.number("--burst-shape", "gamma: below 1 comes in bursts", 1.0, least=0.001),
    Flag.of(
        "--trace",
        "times and lengths from a file of JSON lines instead; with --rate, its times "
        "are stretched to that mean rate",
        metavar="FILE",
    ),
    Flag.whole("--seed", "of lengths and times", 0, least=0),
)
#: Flags for the service level and the price.
_LIMITS = (
    Flag.number(
        "--slo-ttft-ms",
        "goodput counts requests whose first token came in time",
        metavar="MS",
        least=0,
    ),
    Flag.number(
        "--slo-itl-ms",
        "and whose later tokens came this fast on average",
        metavar="MS",
        least=0,
    ),
    Flag.number("--price-per-hour", "of the device, for the cost of tokens and rows", least=0),
)
#: Name of an arrival pattern -> function that makes it from a rate and a shape.
_PATTERNS: dict[str, Callable[[float, float], Closed | Poisson | Gamma]] = {
    "closed": lambda rate, shape: Closed(),
    "poisson": lambda rate, shape: Poisson(rate),
    "gamma": Gamma,
}
#: Flag of every command with a report.
JSON = Flag.output("--json", "write all figures to a file; - is standard output")
_HTML = Flag.output("--html", "write one page with charts that needs no network")


class TrafficArguments(Arguments):
    """The parsed flags of a command with `traffic_flags`."""

    @staticmethod
    def traffic_flags(requests: int | None, arrivals: str, shown: str = "") -> FlagGroup:
        """The flags for the traffic.

        requests, arrivals: the command's own defaults. shown: text for the default number of
        requests if that is not one number.
        """
        text = f"how many requests come [{shown or requests}]"
        how_many = Flag.whole("--requests", text, least=1)
        how_many = how_many._replace(options=how_many.options | {"default": requests})
        when = Flag.of("--arrivals", "when they come", arrivals, choices=_PATTERNS)
        return FlagGroup((*_LENGTHS, how_many, when, *_TIMES), "traffic")

    @staticmethod
    def report_flags(*, page: bool = True) -> FlagGroup:
        """The flags for the output of a measurement. page: whether there is a page."""
        files = (JSON, _HTML) if page else (JSON,)
        return FlagGroup((*_LIMITS, *files), "report")

    @property
    def is_closed(self) -> bool:
        """Whether the traffic is a closed loop."""
        return not self.trace and self.arrivals == "closed"

    @property
    def is_drawn(self) -> bool:
        """Whether arrival times are drawn for a rate."""
        return not self.trace and self.arrivals != "closed"

    def check_concurrency(self) -> None:
        """Raise ConfigError for a number of open requests in an open loop."""
        if self.concurrency and not self.is_closed:
            raise ConfigError(
                "--concurrency is for --arrivals closed: other arrivals come at their own times"
            )

    def check_seats(self) -> None:
        """Raise ConfigError if seats are given twice."""
        if self.seats is not None and "max_seats" in vars(self):
            raise ConfigError("--seats and --max-seats are the same setting: give one")

    def draw(self, rate: float) -> list[Arrival]:
        """Draw the requests for the flags. rate: requests a second, 0 if none is needed."""
        arrivals = _recorded(self.trace, rate) if self.trace else self._made_up(rate)
        return [
            msgspec.structs.replace(each, n_output=max(1, round(self.scale * each.n_output)))
            for each in arrivals
        ]

    def _made_up(self, rate: float) -> list[Arrival]:
        if self.arrivals != "closed" and not rate > 0:
            raise ConfigError(f"{self.arrivals} arrivals need a rate, requests a second")
        pattern = _PATTERNS[self.arrivals](rate, self.burst_shape)
        lengths = {name: self._lengths(name) for name in ("prompt", "output")}
        return WORKLOADS[self.preset].arrivals(self.requests, pattern, self.seed, **lengths)

    def _lengths(self, name: str) -> Lengths | None:
        text = getattr(self, name)
        return parse_lengths(text, self.flag_of(name)) if text else None

    def describe(self, arrivals: list[Arrival], rate: float) -> JsonDict:
        """The traffic for the report: the flags, and the resulting lengths and times."""
        conversations = {arrival.conversation for arrival in arrivals}
        return {
            **_size_of(arrivals),
            "trace": self.trace,
            **self._source(),
            "conversations": len(conversations - {0}),
            "repeated_prompt_tokens": _repeated_tokens(arrivals),
            "scale": self.scale,
            "rate": rate or None,
            "seed": self.seed,
        }

    def figures_of(self, run: LoadResult | EngineRun, *, closed: bool) -> JsonDict:
        """The figures of a run, and the growth of its queue (None in a closed loop)."""
        backlog = None if closed else msgspec.to_builtins(QueueGrowth.of(run.requests))
        return run.figures(**self.figure_options()) | {"backlog": backlog}

    def deliver(self, report: JsonObject, page: Callable[[bool], Page]) -> None:
        """Write the files in the flags, and print the report unless JSON goes to standard output.
        page: makes the page for people, with or without charts.
        """
        if self.html:
            page(True).write(self.html)
        if self.write_report(report):
            page(False).print()

    def _source(self) -> dict[str, str | None]:
        """The flags of the traffic; the preset is "custom" if lengths are given."""
        if self.trace:
            return _OF_A_TRACE
        workload = WORKLOADS[self.preset]
        flags = {
            "preset": self.preset,
            "about": workload.about,
            "prompt": self.prompt or workload.prompt,
            "output": self.output or workload.output,
            "arrivals": self.arrivals,
        }
        if self.prompt or self.output:
            return flags | {"preset": "custom", "about": None}
        return flags


_OF_A_TRACE = dict.fromkeys(("preset", "about", "prompt", "output")) | {"arrivals": "trace"}


def _recorded(file: str, rate: float) -> list[Arrival]:
    arrivals = Arrival.read_all(file)
    return _at_rate(arrivals, rate) if rate else arrivals


def _at_rate(arrivals: list[Arrival], rate: float) -> list[Arrival]:
    """The same requests, their times scaled evenly to a mean of `rate` a second."""
    last = max((a.at for a in arrivals), default=0.0)
    if last <= 0:
        raise ConfigError("a trace whose requests all come at 0 has no rate to change")
    scale = len(arrivals) / rate / last
    return [msgspec.structs.replace(a, at=a.at * scale) for a in arrivals]


def _repeated_tokens(arrivals: list[Arrival]) -> int:
    """Prompt tokens that repeat an earlier prompt of the conversation: the hits of a prefix cache
    with pages of one token and unlimited memory."""
    longest: dict[int, int] = {}
    total = 0
    for arrival in arrivals:
        if not arrival.conversation:
            continue
        before = longest.get(arrival.conversation)
        if before is None:
            before = arrival.n_shared if longest else 0
        total += min(before, arrival.n_prompt)
        longest[arrival.conversation] = max(before, arrival.n_prompt)
    return total


def _size_of(arrivals: list[Arrival]) -> JsonDict:
    size: JsonDict = {"requests": len(arrivals)}
    for kind in ("prompt", "output"):
        lengths = [getattr(arrival, f"n_{kind}") for arrival in arrivals]
        size[f"{kind}_tokens"] = sum(lengths)
        size[f"{kind}_lengths"] = msgspec.to_builtins(LengthSummary.of(lengths))
    return size


def traffic_line(traffic: JsonObject) -> str:
    """A description of traffic in a sentence, with its lengths."""
    amount = "{requests} requests, {prompt_tokens:,} prompt and {output_tokens:,} output tokens"
    parts = [amount.format_map(traffic)]
    if traffic["scale"] != 1:
        parts[0] += f", output lengths times {traffic['scale']:g}"
    rate = f" at {traffic['rate']:.3g} a second" if traffic["rate"] else ""
    parts.append(f"{traffic['arrivals']} arrivals{rate}")
    for kind in ("prompt", "output"):
        parts.append(f"{kind}s {LengthSummary(**traffic[f'{kind}_lengths'])}")
    if traffic["conversations"]:
        share = traffic["repeated_prompt_tokens"] / traffic["prompt_tokens"]
        parts.append(
            f"{traffic['conversations']} conversations, {share:.0%} of the prompt tokens came "
            "before"
        )
    return f"{traffic['trace'] or traffic['preset']}: {'; '.join(parts)}"


@contextmanager
def progress() -> Iterator[NamedWatch]:
    """A progress bar per name on standard error, if that is a terminal."""
    with _bars() as bars:
        tasks: dict[str, TaskID] = {}

        def watch(name: str, done: int, of: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=of)
            bars.update(tasks[name], completed=done, total=of)

        yield watch


def _bars() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    shown = console(stderr=True)
    return Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=shown,
        disable=not shown.is_terminal,
        refresh_per_second=2,
    )
