"""`jitney bench policies`: static, dynamic and continuous batching on the same requests, one after another, in this
process: the same weights, the same compiled programs, the same prompts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from jitney.engine.accounts import as_json, bill
from jitney.engine.backlog import Backlog, backlog_of
from jitney.engine.bench.compare import (
    POLICIES,
    PUBLISHED,
    Watch,
    at_load,
    capacity,
    differences,
    ratios,
    run_policies,
)
from jitney.engine.bench.offline import Bench, Measured, Request
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
from jitney.engine.cli.display import load_llm
from jitney.engine.cli.flags import Parser, add_settings, config_from
from jitney.engine.config import Config
from jitney.engine.errors import ConfigError

if TYPE_CHECKING:
    from jitney.engine.bench.report import Section
    from jitney.engine.types import EngineInfo

#: A little more than can be served, so that there is always a queue.
DEFAULT_LOAD = 1.15


def run(arguments: Sequence[str]) -> int:
    """Serve the same requests under each policy and print the figures side by side; exit status 0."""
    known = make_parser().parse(arguments)
    policies = policies_of(known)
    check_writable(known, "json", "html", "records", "traces")
    check_numbers(known, rate=0.001, load=0.001, concurrency=0, warmup_s=0)
    slo_from(known)
    traffic_from(known, rate=known.rate or 1.0)  # bad flags are told before the model loads
    config = config_of(known)
    llm = load_llm(config)
    bench = Bench(llm.core, llm.tokenizer.encode)
    with progress() as watch:
        requests, rate = make_requests(bench, known, config.engine.max_seats, watch)
        runs = run_policies(bench, requests, policies, concurrency=known.concurrency, watch=watch)
    report = make_report(known, runs, requests, llm.info, rate)
    llm.close()
    deliver(known, report, runs)
    return 0


def make_parser() -> Parser:
    parser = Parser("bench policies", "Compare the three ways to batch on the same requests, in this process.")
    add = parser.add_argument_group("comparison").add_argument
    add("--policies", metavar="A,B", default=",".join(POLICIES), help=f"policies to compare [{','.join(POLICIES)}]")
    add("--seats", type=int, metavar="N", help="the same as --max-seats [the engine's]")
    add("--rate", type=float, metavar="X", help="requests a second, for poisson and gamma [from --load]")
    add("--load", type=float, default=DEFAULT_LOAD, metavar="X", help="without --rate: times what continuous batching "
        f"can serve, which is measured first [{DEFAULT_LOAD}]")
    add("--concurrency", type=int, default=0, metavar="N", help="closed arrivals: requests open at a time; 0: all [0]")
    add("--warmup-s", type=float, default=2.0, metavar="X", help="seconds of work before anything is timed [2]")
    add_traffic(parser, requests=256, arrivals="poisson")
    add_report(parser)
    add("--records", metavar="FILE", help="write step records, times and seats of all runs to an .npz file")
    add("--traces", metavar="PREFIX", help="write PREFIX.POLICY.jsonl for jitney simulate --trace: what came, and what "
        "was measured")
    add_settings(parser, ("model", "engine"), leave_out=("policy",))
    return parser


def policies_of(known: argparse.Namespace) -> list[str]:
    """The policies to run, each once."""
    names = list(dict.fromkeys(word.strip() for word in known.policies.split(",") if word.strip()))
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        raise ConfigError(f"--policies: {', '.join(unknown) or 'nothing'} is none of {', '.join(POLICIES)}")
    if known.concurrency and (known.trace or known.arrivals != "closed"):
        raise ConfigError("--concurrency is for --arrivals closed: other arrivals come at their own times")
    return names


def config_of(known: argparse.Namespace) -> Config:
    """The configuration, with the seats that were asked for and a queue that refuses nobody."""
    if known.seats is not None and "max_seats" in vars(known):
        raise ConfigError("--seats and --max-seats are the same setting: give one")
    if known.seats is not None:
        known.max_seats = str(known.seats)
    return config_from(known)


def make_requests(bench: Bench, known: argparse.Namespace, seats: int,
                  watch: Watch) -> tuple[list[Request], float]:
    """The requests with their texts, and their rate (0: they have none); warms up, and measures the capacity that the
    rate is a share of."""
    open_loop = not known.trace and known.arrivals != "closed"
    arrivals = traffic_from(known, rate=1.0 if open_loop else known.rate or 0.0)
    requests = bench.requests(arrivals, known.seed)
    bench.warm_up(requests, known.warmup_s)
    if not open_loop:
        return requests, known.rate or 0.0
    rate = known.rate or known.load * capacity(bench, requests, seats, watch)
    timed = zip(at_load(arrivals, rate), requests, strict=True)
    return [Request(arrival, request.prompt) for arrival, request in timed], rate


def is_closed(known: argparse.Namespace) -> bool:
    return not known.trace and known.arrivals == "closed"


def make_report(known: argparse.Namespace, runs: Mapping[str, Measured], requests: Sequence[Request],
                info: EngineInfo, rate: float) -> dict[str, Any]:
    """Everything that was found, ready for JSON."""
    price = known.price_per_hour
    figures = {name: run.figures(slo_from(known), price) | {
        "ledger": as_json(bill(run.records, run.seconds), price),
        "backlog": None if is_closed(known) else msgspec.to_builtins(backlog_of(run.times)),
        "request_shares": as_json(run.riders.bill(run.records)[0], price)} for name, run in runs.items()}
    unlike = differences(runs)
    return {"policies": figures, "ratios": ratios(figures), "published": PUBLISHED,
            "same_tokens": not unlike, "differences": [difference._asdict() for difference in unlike],
            "traffic": describe_traffic(known, [request.arrival for request in requests], rate),
            "engine": msgspec.to_builtins(info), "limits": {name: msgspec.to_builtins(run.limits)
                                                            for name, run in runs.items()}}


def deliver(known: argparse.Namespace, report: Mapping[str, Any], runs: Mapping[str, Measured]) -> None:
    """Print the tables and write the files that were asked for."""
    from jitney.engine.bench.saved import write_recording, write_records
    from jitney.engine.bench.tables import figures_table, ledgers_table, print_table, ratio_table

    if known.records:
        write_records(known.records, runs)
    for name, measured in runs.items() if known.traces else ():
        write_recording(f"{known.traces}.{name}.jsonl", measured.times, measured.started)
    if known.html:
        write_page(known, report, runs)
    if known.json:
        write_json(known.json, report)
    if known.json == "-":
        return
    for line in summary(report):
        print(line)
    print_table(figures_table(report["policies"]))
    if report["ratios"]:
        print_table(ratio_table(report["ratios"]))
    print_table(ledgers_table({name: bill(measured.records, measured.seconds) for name, measured in runs.items()},
                              known.price_per_hour), "Ledger")


def summary(report: Mapping[str, Any]) -> list[str]:
    """What ran on what, and whether the answers agree."""
    engine, unlike = report["engine"], report["differences"]
    same = "all policies gave every request the same tokens" if not unlike else (
        f"got other tokens under another policy: {len({d['request'] for d in unlike})}; " + ", ".join(
            f"request {d['request']} from token {d['at']} on ({' / '.join(d['policies'])})" for d in unlike[:5]))
    return [f"{engine['model']} in {engine['dtype']} on {engine['device']} ({engine['platform']}), "
            f"{engine['seats']} seats",
            traffic_line(report["traffic"]), same, *queue_lines(report["policies"])]


def queue_lines(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence for each policy under which the queue grew for the whole run."""
    known = {name: Backlog(**run["backlog"]) for name, run in figures.items() if run["backlog"]}
    return [f"{name}: {backlog}" for name, backlog in known.items() if backlog.grew]


def write_page(known: argparse.Namespace, report: Mapping[str, Any], runs: Mapping[str, Measured]) -> None:
    """The HTML report."""
    from jitney.engine.bench.report import write_report

    write_report(known.html, "Static, dynamic and continuous batching on the same requests", summary(report),
                 sections(known, report, runs))


def sections(known: argparse.Namespace, report: Mapping[str, Any], runs: Mapping[str, Measured]) -> list[Section]:
    """The page's parts: figures, seats, curves, ledger."""
    from jitney.engine.bench import charts, tables
    from jitney.engine.bench.report import Section

    until, price = max(run.seconds for run in runs.values()), known.price_per_hour
    bills = {name: bill(run.records, run.seconds) for name, run in runs.items()}
    timelines = [charts.seat_timeline(name, run.rides, run.started, run.limits.max_seats, until,
                                      held=name != "continuous") for name, run in runs.items()]
    ends = {name: (np.array([(t.finished, t.n_output) for t in run.times]), run.started) for name, run in runs.items()}
    best = "continuous" if "continuous" in runs else next(iter(runs))
    shares, _ = runs[best].riders.bill(runs[best].records)
    return [
        Section("Figures", ["Latencies count from the time a request should have come."],
                [tables.figures_table(report["policies"]), *(
                    [tables.ratio_table(report["ratios"])] if report["ratios"] else [])]),
        Section("Seats", ["All runs share one time scale. White: the seat is empty."], charts=timelines),
        Section("Over time", charts=[charts.tokens_over_time(ends), *charts.latency_charts(
            {name: run.times for name, run in runs.items()})]),
        Section("Ledger", ["Where every computed row went. A step's time is split evenly over its rows, padding "
                           "included."],
                [tables.ledgers_table(bills, price)], [charts.ledger_bars(bills)]),
        Section(f"What each request took ({best})", ["Its rows' share of the steps they were computed in; padding is "
                                                     "nobody's and stands in the ledger."],
                [tables.costliest_table(shares, price)], [charts.request_costs(shares, price)]),
    ]


