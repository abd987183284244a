"""`jitney bench serve`: traffic for an OpenAI-compatible endpoint, ours or another's, and what it
made of it.
"""

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
from jitney.engine.common.terminal import visible
from jitney.engine.common.trace import Arrival
from jitney.engine.config import Command, Flag, FlagGroup
from jitney.engine.lab.backlog import QueueGrowth
from jitney.engine.lab.bench.online import EngineAbout, OnlineBench, OnlineRun, Sending
from jitney.engine.lab.commands.bench_flags import TrafficArguments, progress, traffic_line
from jitney.engine.server import Answer, RemoteEndpoint

if TYPE_CHECKING:
    from jitney.dashboard import PageSection
    from jitney.engine.common.request_record import RequestRecord
    from jitney.engine.core import Bill

#: Where an API key may stand; a flag would show it to other users of the machine.
_KEY_VARIABLES = ("JITNEY_BENCH_KEY", "OPENAI_API_KEY")
#: A request fell short of its length if it got less than this share of it.
_NEARLY_ALL = 0.98
_LEDGER_NOTE = (
    "The server's own account of the rows it computed during the run; the time of its "
    "steps is split evenly over them."
)
#: With fewer requests one of them decides the 99th percentile.
ENOUGH_FOR_P99 = 100


def bench_serve(arguments: Sequence[str]) -> int:
    """Send the traffic and print the figures; exit status 1 if no request was served."""
    args = _COMMAND.parse_as(EndpointArguments, arguments)
    args.check_writable("json", "html", "trace_to")
    args.check_numbers(rate=0.001, concurrency=0, warmup=0, timeout_s=0.001)
    args.slo()
    arrivals = args.draw(_rate_from(args))
    report = _measure(args, arrivals)
    return int(report["figures"]["served"] == 0)


def _measure(args: EndpointArguments, arrivals: list[Arrival]) -> JsonDict:
    """Send, and say what came of it; the report."""
    online = _measured(args, arrivals)
    report = _make_report(args, online, arrivals)
    _deliver(args, report, online)
    return report


def _measured(args: EndpointArguments, arrivals: list[Arrival]) -> OnlineRun:
    with progress() as watch:
        sending = Sending(args.concurrency, args.is_closed, args.warmup, partial(watch, "requests"))
        return asyncio.run(OnlineBench(args.endpoint()).measure(arrivals, sending))


_MODEL = Flag.of("--model", "the model's name there [the first in its list]", "", metavar="NAME")
_LOAD = (
    Flag.number("--rate", "requests a second, for poisson and gamma"),
    Flag.whole(
        "--concurrency",
        "closed: requests open at a time, 0: all; else most that may be open, 0: any number",
        0,
    ),
    Flag.whole("--warmup", "short requests sent before anything is timed", 8),
)
_TRACE_TO = Flag.of(
    "--trace-to", "write what was sent and measured, for jitney simulate --trace", metavar="FILE"
)
#: How requests are sent.
_REQUESTS = (
    Flag.switch("--chat", "use chat completions instead of text completions"),
    Flag.of(
        "--ignore-eos",
        "have outputs of exactly the wanted length, by the field ignore_eos, which only some "
        "servers know",
        True,
        action=argparse.BooleanOptionalAction,
    ),
    Flag.number("--timeout-s", "seconds a request may take", 600.0),
)


class EndpointArguments(TrafficArguments):
    """The parsed flags of a command that sends traffic to an endpoint."""

    @staticmethod
    def endpoint_flags(*, model: bool = True) -> FlagGroup:
        """The flags that say where requests go.

        model: whether they say which model, and must be given; where requests may go elsewhere too,
        a model has its flag already.
        """
        where = Flag.of("--url", "the endpoint, with or without /v1", metavar="URL", required=model)
        return FlagGroup((where, *[_MODEL] * model, *_REQUESTS), "endpoint")

    def endpoint(self) -> RemoteEndpoint:
        """The endpoint that the flags and the environment describe."""
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


def _make_report(args: TrafficArguments, online: OnlineRun, arrivals: list[Arrival]) -> JsonDict:
    answers = online.load.answers
    return {
        "url": online.endpoint.url,
        "model": online.endpoint.model,
        "figures": args.figures_of(online.load, closed=args.is_closed),
        "engine": online.about._asdict(),
        "client_machine": cpu_name(),
        "server_queue_mean_s": online.queue_mean_s,
        "ledger": _server_ledger(args, online),
        "errors": _errors_of(answers),
        "short_outputs": _short_outputs(online, arrivals),
        "cached_prompt_tokens": sum(answer.n_cached for answer in answers),
        "client": online.load.sender.as_json(),
        "traffic": _traffic(args, arrivals),
    }


def _server_ledger(args: TrafficArguments, online: OnlineRun) -> JsonDict | None:
    if online.bill is None:
        return None
    return online.bill.as_json(args.price_per_hour)


def _traffic(args: TrafficArguments, arrivals: list[Arrival]) -> JsonDict:
    traffic = args.describe(arrivals, _rate_from(args))
    return traffic | {"concurrency": args.concurrency}


def _short_outputs(online: OnlineRun, arrivals: Sequence[Arrival]) -> int:
    pairs = zip(online.load.requests, arrivals, strict=True)
    return sum(_is_short(request, arrival) for request, arrival in pairs)


def _is_short(request: RequestRecord, arrival: Arrival) -> bool:
    return request.served and request.n_output < _NEARLY_ALL * arrival.n_output


def _errors_of(answers: Iterable[Answer]) -> dict[str, JsonDict]:
    """How many requests failed in which way, and what was said to the first of them."""
    failed = [answer for answer in answers if not answer.served]
    counts = Counter(answer.finish for answer in failed)
    first = {answer.finish: answer.detail for answer in reversed(failed)}
    return {kind: {"count": n, "first": first[kind]} for kind, n in counts.most_common()}


def _deliver(args: TrafficArguments, report: JsonObject, online: OnlineRun) -> None:
    from jitney.engine.lab.bench.saved import write_recording

    if args.trace_to:
        write_recording(args.trace_to, online.load.requests, online.load.started)
    if args.html:
        _write_page(args, report, online)
    if args.write_report(report):
        _print_report(args, report, online)


def _print_report(args: TrafficArguments, report: JsonObject, online: OnlineRun) -> None:
    from jitney.dashboard import figures_table, ledger_table

    print(visible("\n".join(_summary(report))))
    figures_table({"measured": report["figures"]}).print()
    if online.bill is not None:
        ledger = ledger_table(online.bill, args.price_per_hour)
        ledger.print("Ledger of the server over the run")


def _summary(report: JsonObject) -> list[str]:
    client = report["client"]
    return [
        f"{report['model']} at {report['url']}",
        f"{EngineAbout(**report['engine'])}; client's machine: {report['client_machine']}",
        traffic_line(report["traffic"]),
        *_doubts(report),
        *_server_lines(report),
        f"this client used {client['cpu_share']:.0%} of a core",
        *filter(None, [client["trouble"]]),
    ]


def _doubts(report: JsonObject) -> Iterator[str]:
    served, backlog = report["figures"]["served"], report["figures"]["backlog"]
    if 0 < served < ENOUGH_FOR_P99:
        yield f"p99 of {served} requests is nearly the slowest of them"
    if backlog is not None:
        yield str(QueueGrowth(**backlog))
    yield from _failures(report)


def _failures(report: JsonObject) -> Iterator[str]:
    for kind, error in report["errors"].items():
        sent = report["figures"]["requests"]
        yield f"failed with {kind}: {error['count']} of {sent}; {error['first']}"
    short = report["short_outputs"]
    if short:
        yield f"ended before their length: {short}; the endpoint does not ignore the end of a text"


def _server_lines(report: JsonObject) -> Iterator[str]:
    waited, cached = report["server_queue_mean_s"], report["cached_prompt_tokens"]
    if waited is not None:
        yield f"requests waited {1e3 * waited:.1f} ms in the server's queue, on average"
    if cached:
        yield f"{cached:,} prompt tokens were found in the server's prefix cache"


def _write_page(args: TrafficArguments, report: JsonObject, online: OnlineRun) -> None:
    """The HTML report: figures, curves, and the server's ledger if it has one."""
    from jitney.dashboard import Page

    sections = list(_sections(report, online))
    if online.bill is not None:
        sections.append(_ledger_section(online.bill, args.price_per_hour))
    Page(f"Traffic for {report['model']}", _summary(report), sections).write(args.html)


def _sections(report: JsonObject, online: OnlineRun) -> Iterator[PageSection]:
    from jitney.dashboard import PageSection, figures_table, latency_charts

    note = "Latencies count from the time a request should have been sent."
    yield PageSection("Figures", [note], [figures_table({"measured": report["figures"]})])
    charts = latency_charts({"measured": online.load.requests})
    yield PageSection("Distributions", charts=charts)


def _ledger_section(bill: Bill, price_per_hour: float | None) -> PageSection:
    from jitney.dashboard import PageSection, ledger_bars, ledger_table

    table = ledger_table(bill, price_per_hour)
    return PageSection("Ledger", [_LEDGER_NOTE], [table], [ledger_bars({"measured": bill})])
