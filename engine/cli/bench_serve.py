"""`jitney bench serve`: traffic for an OpenAI-compatible endpoint, ours or another's, and what it
made of it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from jitney.engine.bench.client import EXTRA_FIELDS, Target
from jitney.engine.bench.online import EngineAbout, Online, measure
from jitney.engine.cli.bench_flags import (
    add_report,
    add_traffic,
    check_numbers,
    check_writable,
    describe_traffic,
    progress,
    slo_from,
    traffic_from,
    traffic_line,
    write_json,
)
from jitney.engine.cli.flags import Parser
from jitney.engine.errors import ConfigError
from jitney.engine.machine import cpu_name
from jitney.engine.simulation.workload import Arrival
from jitney.engine.telemetry.backlog import Backlog, backlog_of
from jitney.engine.telemetry.cost import as_json
from jitney.engine.telemetry.summary import summarise

if TYPE_CHECKING:
    from jitney.engine.report.page import Section

#: Where an API key may stand; a flag would show it to other users of the machine.
KEY_VARIABLES = ("JITNEY_BENCH_KEY", "OPENAI_API_KEY")
#: A request fell short of its length if it got less than this share of it.
NEARLY_ALL = 0.98
#: With fewer requests one of them decides the 99th percentile.
ENOUGH_FOR_P99 = 100


def run(arguments: Sequence[str]) -> int:
    """Send the traffic and print the figures; exit status 1 if no request was served."""
    known = make_parser().parse(arguments)
    check_writable(known, "json", "html", "trace_to")
    check_numbers(known, rate=0.001, concurrency=0, warmup=0, timeout_s=0.001)
    slo_from(known)
    arrivals = traffic_from(known, rate_of(known))
    with progress() as watch:
        online = asyncio.run(
            measure(
                target_from(known),
                arrivals,
                concurrency=known.concurrency,
                closed=is_closed(known),
                warmup=known.warmup,
                watch=lambda done, total: watch("requests", done, total),
            )
        )
    report = make_report(known, online, arrivals)
    deliver(known, report, online)
    return 0 if report["figures"]["served"] else 1


def make_parser() -> Parser:
    parser = Parser(
        "bench serve",
        "Send traffic to an OpenAI-compatible endpoint and time it. An API key is taken "
        f"from {' or '.join(KEY_VARIABLES)}.",
    )
    add_target(parser)
    add = parser.add_argument_group("load").add_argument
    add("--rate", type=float, metavar="X", help="requests a second, for poisson and gamma")
    add(
        "--concurrency",
        type=int,
        default=0,
        metavar="N",
        help="closed: requests open at a time, 0: all; else most "
        "that may be open, 0: any number [0]",
    )
    add(
        "--warmup",
        type=int,
        default=8,
        metavar="N",
        help="short requests sent before anything is timed [8]",
    )
    add_traffic(parser, requests=64, arrivals="closed")
    add_report(parser)
    add(
        "--trace-to",
        metavar="FILE",
        help="write what was sent and measured, for jitney simulate --trace",
    )
    return parser


def add_target(parser: Parser, *, required: bool = True) -> None:
    """The flags that say where requests go; where a model may be named for other ends too, it has
    its flag already.
    """
    add = parser.add_argument_group("endpoint").add_argument
    add("--url", metavar="URL", required=required, help="the endpoint, with or without /v1")
    if required:
        add(
            "--model",
            metavar="NAME",
            default="",
            help="the model's name there [the first in its list]",
        )
    add("--chat", action="store_true", help="use chat completions instead of text completions")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="have outputs of exactly the wanted length, by the field ignore_eos, which only some "
        "servers know [true]",
    )
    add(
        "--timeout-s",
        type=float,
        default=600.0,
        metavar="X",
        help="seconds a request may take [600]",
    )


def target_from(known: argparse.Namespace) -> Target:
    """The endpoint that the flags and the environment describe."""
    if not known.url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {known.url}: must begin with http:// or https://")
    key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), "")
    extras = EXTRA_FIELDS if known.ignore_eos else ()
    return Target(known.url, getattr(known, "model", ""), key, known.chat, extras, known.timeout_s)


def is_closed(known: argparse.Namespace) -> bool:
    return not known.trace and known.arrivals == "closed"


def rate_of(known: argparse.Namespace) -> float:
    """Requests a second. ConfigError where arrivals need a rate, or have none."""
    if is_closed(known):
        if known.rate:
            raise ConfigError(
                "--rate is for --arrivals poisson or gamma, or for --trace: closed arrivals have "
                "none"
            )
        return 0.0
    if not known.trace and not known.rate:
        raise ConfigError(f"--arrivals {known.arrivals} needs --rate, requests a second")
    return known.rate or 0.0


def make_report(
    known: argparse.Namespace, online: Online, arrivals: list[Arrival]
) -> dict[str, Any]:
    """Everything that was found, ready for JSON."""
    load, price = online.load, known.price_per_hour
    figures = summarise(
        load.times,
        records=None,
        seats=0,
        seconds=load.seconds,
        slo=slo_from(known),
        price_per_hour=price,
    )
    short = sum(
        t.served and t.n_output < NEARLY_ALL * a.n_output
        for t, a in zip(load.times, arrivals, strict=True)
    )
    backlog = None if is_closed(known) else backlog_of(load.times)
    figures["backlog"] = None if backlog is None else msgspec.to_builtins(backlog)
    return {
        "url": online.target.url,
        "model": online.target.model,
        "figures": figures,
        "engine": online.about._asdict(),
        "client_machine": cpu_name(),
        "server_queue_mean_s": online.queue_mean_s,
        "ledger": None if online.bill is None else as_json(online.bill, price),
        "errors": errors_of(online),
        "short_outputs": short,
        "cached_prompt_tokens": sum(answer.n_cached for answer in load.answers),
        "client": load.sender.as_json(),
        "traffic": describe_traffic(known, arrivals, rate_of(known))
        | {"concurrency": known.concurrency},
    }


def errors_of(online: Online) -> dict[str, dict[str, Any]]:
    """How many requests failed in which way, and what was said to the first of them."""
    failed = [answer for answer in online.load.answers if answer.finish not in ("stop", "length")]
    counts = Counter(answer.finish for answer in failed)
    return {
        kind: {"count": count, "first": next(a.detail for a in failed if a.finish == kind)}
        for kind, count in counts.most_common()
    }


def deliver(known: argparse.Namespace, report: Mapping[str, Any], online: Online) -> None:
    """Print the tables and write the files that were asked for."""
    from jitney.engine.bench.saved import write_recording
    from jitney.engine.report.tables import figures_table, ledger_table, print_table

    if known.trace_to:
        write_recording(known.trace_to, online.load.times, online.load.started)
    if known.html:
        _write_html(known, report, online)
    if known.json:
        write_json(known.json, report)
    if known.json == "-":
        return
    for line in summary(report):
        print(line)
    print_table(figures_table({"measured": report["figures"]}))
    if online.bill is not None:
        print_table(
            ledger_table(online.bill, known.price_per_hour), "Ledger of the server over the run"
        )


def summary(report: Mapping[str, Any]) -> list[str]:
    """What was sent where, and whatever casts doubt on the figures."""
    lines = [
        f"{report['model']} at {report['url']}",
        machine_line(report),
        traffic_line(report["traffic"]),
    ]
    lines += few_line(report["figures"])
    if report["figures"]["backlog"] is not None:
        lines.append(str(Backlog(**report["figures"]["backlog"])))
    lines += [
        f"failed with {kind}: {fact['count']} of {report['figures']['requests']}; {fact['first']}"
        for kind, fact in report["errors"].items()
    ]
    if report["short_outputs"]:
        lines.append(
            f"ended before their length: {report['short_outputs']}; the endpoint does not ignore "
            "the end of a "
            "text"
        )
    if report["server_queue_mean_s"] is not None:
        lines.append(
            f"requests waited {1e3 * report['server_queue_mean_s']:.1f} ms in the server's queue, "
            "on average"
        )
    if report["cached_prompt_tokens"]:
        lines.append(
            f"{report['cached_prompt_tokens']:,} prompt tokens were found in the server's prefix "
            "cache"
        )
    lines.append(f"this client used {report['client']['cpu_share']:.0%} of a core")
    return lines + ([report["client"]["trouble"]] if report["client"]["trouble"] else [])


def machine_line(report: Mapping[str, Any]) -> str:
    """What the engine runs on, as far as it says so, and what this client runs on."""
    return f"{EngineAbout(**report['engine'])}; client's machine: {report['client_machine']}"


def few_line(figures: Mapping[str, Any]) -> list[str]:
    """A sentence about a p99 of too few requests, none where there are enough."""
    if 0 < figures["served"] < ENOUGH_FOR_P99:
        return [f"p99 of {figures['served']} requests is nearly the slowest of them"]
    return []


def _write_html(known: argparse.Namespace, report: Mapping[str, Any], online: Online) -> None:
    """The HTML report."""
    from jitney.engine.report.page import write_page

    write_page(
        known.html,
        f"Traffic for {report['model']}",
        summary(report),
        sections(known, report, online),
    )


def sections(known: argparse.Namespace, report: Mapping[str, Any], online: Online) -> list[Section]:
    """The page's parts: figures, curves, and the server's ledger if it has one."""
    from jitney.engine.report import figures, tables
    from jitney.engine.report.page import Section

    found = [
        Section(
            "Figures",
            ["Latencies count from the time a request should have been sent."],
            [tables.figures_table({"measured": report["figures"]})],
        ),
        Section("Distributions", charts=figures.latency_charts({"measured": online.load.times})),
    ]
    if online.bill is not None:
        found.append(
            Section(
                "Ledger",
                [
                    "The server's own account of the rows it computed during the run; the time of "
                    "its steps is split evenly over them."
                ],
                [tables.ledger_table(online.bill, known.price_per_hour)],
                [figures.ledger_bars({"measured": online.bill})],
            )
        )
    return found
