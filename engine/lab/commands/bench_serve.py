"""`jitney bench serve`: sends traffic to an OpenAI-compatible endpoint and times its answers."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.machine import cpu_name
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.common.trace import Arrival
from jitney.engine.config import Command, Flag, FlagGroup
from jitney.engine.lab.backlog import QueueGrowth
from jitney.engine.lab.bench.client import Answer, RemoteEndpoint
from jitney.engine.lab.bench.online import EngineAbout, OnlineBench, OnlineRun
from jitney.engine.lab.commands.bench_flags import TrafficArguments, progress, traffic_line
from jitney.engine.lab.simulation.recordings import write_recording

if TYPE_CHECKING:
    from jitney.engine.common.reports.page import Page

#: Environment variables for an API key; other users of the machine could see a flag.
_KEY_VARIABLES = ("JITNEY_BENCH_KEY", "OPENAI_API_KEY")
#: A request counts as too short if it got less than this share of its length.
_NEARLY_ALL = 0.98
_LEDGER_NOTE = (
    "The server's own account of the rows it computed during the run; the time of its "
    "steps is split evenly over them."
)
#: Least requests for a p99; with fewer, it depends on a single request.
ENOUGH_FOR_P99 = 100


def bench_serve(arguments: Sequence[str]) -> int:
    """Send the traffic and print the figures; exit status 1 if no request was served."""
    args = _COMMAND.parse_as(EndpointArguments, arguments)
    rate = _rate_from(args)
    arrivals = args.draw(rate)
    bench = OnlineBench(args.endpoint(), args.warmup, args.clients)
    with progress() as watch:
        measured = bench.measure(
            arrivals,
            concurrency=args.concurrency,
            closed=args.is_closed,
            watch=partial(watch, "requests"),
        )
        run = asyncio.run(measured)
    traffic = args.describe(arrivals, rate) | {"concurrency": args.concurrency}
    traffic |= {"clients": args.clients}
    report = _make_report(args, run, arrivals, traffic)
    if args.trace_to:
        write_recording(args.trace_to, run.load.requests, run.load.started)
    args.deliver(report, partial(_page, args, report, run))
    return int(report["figures"]["served"] == 0)


_MODEL = Flag.of("--model", "the model's name there [the first in its list]", "", metavar="NAME")
_LOAD = (
    Flag.number("--rate", "requests a second, for poisson and gamma", least=0.001),
    Flag.whole(
        "--concurrency",
        "closed: requests open at a time, 0: all; else most that may be open, 0: any number",
        0,
        least=0,
    ),
    Flag.whole("--warmup", "short requests sent before anything is timed", 8, least=0),
    Flag.whole("--clients", "processes that send, where one is the bottleneck", 1, least=1),
)
_TRACE_TO = Flag.output(
    "--trace-to", "write what was sent and measured, for jitney simulate --trace"
)
#: Flags for the form of requests.
_REQUESTS = (
    Flag.switch("--chat", "use chat completions instead of text completions"),
    Flag.of(
        "--ignore-eos",
        "have outputs of exactly the wanted length, by the field ignore_eos, which only some "
        "servers know",
        True,
        action=argparse.BooleanOptionalAction,
    ),
    Flag.number("--timeout-s", "seconds a request may take", 600.0, least=0.001),
)


class EndpointArguments(TrafficArguments):
    """The parsed flags of a command that sends traffic to an endpoint."""

    @staticmethod
    def endpoint_flags(*, model: bool = True) -> FlagGroup:
        """The flags for the endpoint.

        model: whether they include the model's flag and are required; a command with other targets
        has its own flag for the model.
        """
        where = Flag.of("--url", "the endpoint, with or without /v1", metavar="URL", required=model)
        return FlagGroup((where, *[_MODEL] * model, *_REQUESTS), "endpoint")

    def endpoint(self) -> RemoteEndpoint:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {self.url}: must begin with http:// or https://")
        model = getattr(self, "model", "")
        return RemoteEndpoint(self.url, model, _key(), self.chat, self.ignore_eos, self.timeout_s)


def _key() -> str:
    for name in _KEY_VARIABLES:
        if os.environ.get(name):
            return os.environ[name]
    return ""


_COMMAND = Command(
    "bench serve",
    "Send traffic to an OpenAI-compatible endpoint and time it. An API key is taken "
    f"from {' or '.join(_KEY_VARIABLES)}.",
    (
        EndpointArguments.endpoint_flags(),
        FlagGroup(_LOAD, "load"),
        TrafficArguments.traffic_flags(requests=64, arrivals="closed"),
        TrafficArguments.report_flags(),
        FlagGroup([_TRACE_TO]),
    ),
)


def _rate_from(args: TrafficArguments) -> float:
    if args.is_closed and args.rate:
        raise ConfigError(
            "--rate is for --arrivals poisson or gamma, or for --trace: closed arrivals have none"
        )
    if args.is_drawn and not args.rate:
        raise ConfigError(f"--arrivals {args.arrivals} needs --rate, requests a second")
    return args.rate or 0.0


def _make_report(
    args: TrafficArguments, run: OnlineRun, arrivals: Sequence[Arrival], traffic: JsonDict
) -> JsonDict:
    answers = run.load.answers
    short = 0
    for request, arrival in zip(run.load.requests, arrivals, strict=True):
        short += request.served and request.n_output < _NEARLY_ALL * arrival.n_output
    return {
        "url": run.endpoint.url,
        "model": run.endpoint.model,
        "figures": args.figures_of(run.load, closed=args.is_closed),
        "engine": run.about._asdict(),
        "client_machine": cpu_name(),
        "server_queue_mean_s": run.queue_mean_s,
        "ledger": None if run.bill is None else run.bill.as_json(args.price_per_hour),
        "errors": _errors_of(answers),
        "short_outputs": short,
        "cached_prompt_tokens": sum(answer.n_cached for answer in answers),
        "client": run.load.sender.as_json(),
        "traffic": traffic,
    }


def _errors_of(answers: Iterable[Answer]) -> dict[str, JsonDict]:
    """Number of failed requests by kind, and the message of the first of each."""
    failed = [answer for answer in answers if not answer.served]
    counts = Counter(answer.finish for answer in failed)
    first = {answer.finish: answer.detail for answer in reversed(failed)}
    return {kind: {"count": n, "first": first[kind]} for kind, n in counts.most_common()}


def _page(args: TrafficArguments, report: JsonObject, run: OnlineRun, charts: bool) -> Page:
    from jitney.engine.common.reports.page import Page, PageSection
    from jitney.engine.lab.bench.charts import latency_charts, ledger_bars
    from jitney.engine.lab.bench.tables import figures_table, ledger_table

    note = "Latencies count from the time a request should have been sent."
    curves = latency_charts({"measured": run.load.requests}) if charts else []
    table = figures_table({"measured": report["figures"]})
    sections = [PageSection("Figures", [note], [table], curves)]
    if run.bill is not None:
        bars = [ledger_bars({"measured": run.bill})] if charts else []
        table = ledger_table({"measured": run.bill}, args.price_per_hour)
        title = "Ledger of the server over the run"
        sections.append(PageSection(title, [_LEDGER_NOTE], [table], bars))
    return Page(f"Traffic for {report['model']}", list(_summary(report)), sections)


def _summary(report: JsonObject) -> Iterator[str]:
    client, figures = report["client"], report["figures"]
    yield f"{report['model']} at {report['url']}"
    yield f"{EngineAbout(**report['engine'])}; client's machine: {report['client_machine']}"
    yield traffic_line(report["traffic"])
    if 0 < figures["served"] < ENOUGH_FOR_P99:
        yield f"p99 of {figures['served']} requests is nearly the slowest of them"
    if figures["backlog"] is not None:
        yield str(QueueGrowth(**figures["backlog"]))
    for kind, error in report["errors"].items():
        of = f"{error['count']} of {figures['requests']}"
        yield f"failed with {kind}: {of}; {error['first']}"
    if report["short_outputs"]:
        short = report["short_outputs"]
        yield f"ended before their length: {short}; the endpoint does not ignore the end of a text"
    if report["server_queue_mean_s"] is not None:
        waited = 1e3 * report["server_queue_mean_s"]
        yield f"requests waited {waited:.1f} ms in the server's queue, on average"
    if report["cached_prompt_tokens"]:
        cached = report["cached_prompt_tokens"]
        yield f"{cached:,} prompt tokens were found in the server's prefix cache"
    who = "this client" if report["traffic"]["clients"] == 1 else "the busiest client"
    yield f"{who} used {client['cpu_share']:.0%} of a core"
    if client["trouble"]:
        yield client["trouble"]
