"""`jitney bench policies`: static, dynamic and continuous batching on the same requests, one after
another, in this process: the same weights, the same compiled programs, the same prompts.

Without further flags it takes the three cases of `bench.cases` in turn; flags that say what traffic
comes make it one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from jitney.engine.bench.cases import (
    CASES,
    CURVE_REQUESTS,
    Case,
    at_load,
    case_lines,
    lengths_of,
    load_curve,
    open_to_all,
    point_of,
    simulated_capacity,
)
from jitney.engine.bench.compare import (
    POLICIES,
    PUBLISHED,
    Watch,
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
from jitney.engine.config.schema import Config
from jitney.engine.errors import ConfigError
from jitney.engine.simulation.accuracy import cross_errors
from jitney.engine.simulation.simulator import simulate
from jitney.engine.simulation.step_table import StepTable
from jitney.engine.simulation.workload import Arrival
from jitney.engine.telemetry.backlog import Backlog, backlog_of
from jitney.engine.telemetry.cost import as_json, bill

if TYPE_CHECKING:
    from jitney.engine.types import EngineInfo

#: A little more than can be served, so that there is always a queue.
DEFAULT_LOAD = 1.15
#: Requests of the one case that flags describe.
DEFAULT_REQUESTS = 256
#: The case that flags describe.
GIVEN = "given"
#: Flags that say what traffic comes.
TRAFFIC_FLAGS = (
    "trace",
    "rate",
    "load",
    "preset",
    "prompt",
    "output",
    "arrivals",
    "concurrency",
    "burst_shape",
)


@dataclass(slots=True)
class Traffic:
    """A case with its requests. flags: as if it had been asked for alone.

    arrivals: at one request a second if `open_loop`. rate: requests a second, 0: they have none.
    of: the policy that the load is a share of, "" if it is not.
    """

    flags: argparse.Namespace
    arrivals: list[Arrival]
    requests: list[Request]
    what: str
    of: str
    load: float
    rate: float

    @property
    def open_loop(self) -> bool:
        """True when they come at times that were drawn for a rate."""
        return not self.flags.trace and self.flags.arrivals != "closed"

    def paced(self, rate: float) -> list[Request]:
        """The requests at so many a second."""
        pairs = zip(at_load(self.arrivals, rate), self.requests, strict=True)
        return [Request(arrival, request.prompt) for arrival, request in pairs]


def run(arguments: Sequence[str]) -> int:
    """Serve the same requests under each policy and print the figures side by side; exit status
    0.
    """
    known = make_parser().parse(arguments)
    policies = policies_of(known)
    wanted = cases_of(known)
    loads = loads_of(known)
    check_writable(known, "json", "html", "records", "traces")
    if loads and any(
        traffic.trace or traffic.arrivals == "closed" for traffic, _ in wanted.values()
    ):
        raise ConfigError("--measure-loads is for traffic with a rate: poisson or gamma arrivals")
    check_numbers(known, rate=0.001, load=0.001, concurrency=0, warmup_s=0)
    slo_from(known)
    for flags, _ in wanted.values():
        traffic_from(flags, rate=flags.rate or 1.0)  # bad flags are told before the model loads
    config = config_of(known)
    timeout_ms = config.engine.static_timeout_ms if "static_timeout_ms" in vars(known) else 0.0
    llm = load_llm(config)
    bench = Bench(llm.core, llm.tokenizer.encode)
    traffics = {name: draw(bench, flags, case) for name, (flags, case) in wanted.items()}
    with progress() as watch:
        bench.warm_up(next(iter(traffics.values())).requests, known.warmup_s)
        rate = pace(bench, traffics, policies, loads, watch)
        runs = {
            name: serve(bench, traffic, policies, timeout_ms, named(watch, name))
            for name, traffic in traffics.items()
        }
        at_loads = measure_loads(bench, traffics, policies, loads, rate, watch)
    report = make_report(known, traffics, runs, llm.info, at_loads)
    llm.close()
    deliver(known, report, runs)
    return 0


def make_parser() -> Parser:
    parser = Parser(
        "bench policies", "Compare the three ways to batch on the same requests, in this process."
    )
    add = parser.add_argument_group("comparison").add_argument
    cases = "; ".join(f"{name}: {case.what}" for name, case in CASES.items())
    add(
        "--cases",
        metavar="A,B",
        help=f"traffic to compare them on, one after another; {cases} [{','.join(CASES)}; "
        "none if flags say what traffic comes]",
    )
    add(
        "--policies",
        metavar="A,B",
        default=",".join(POLICIES),
        help=f"policies to compare [{','.join(POLICIES)}]",
    )
    add("--seats", type=int, metavar="N", help="the same as --max-seats [the engine's]")
    add(
        "--rate",
        type=float,
        metavar="X",
        help="requests a second, for poisson and gamma [from --load]",
    )
    add(
        "--load",
        type=float,
        default=DEFAULT_LOAD,
        metavar="X",
        help="without --rate: times what continuous batching "
        f"can serve, which is measured first [{DEFAULT_LOAD}]",
    )
    add(
        "--measure-loads",
        metavar="X,Y",
        help="measure the waits at these loads too, besides simulating the curve; as --load",
    )
    add(
        "--concurrency",
        type=int,
        default=0,
        metavar="N",
        help="closed arrivals: requests open at a time; 0: all [0]",
    )
    add(
        "--warmup-s",
        type=float,
        default=2.0,
        metavar="X",
        help="seconds of work before anything is timed [2]",
    )
    add_traffic(parser, requests=DEFAULT_REQUESTS, arrivals="poisson")
    parser.set_defaults(requests=None)
    add_report(parser)
    add(
        "--records",
        metavar="FILE",
        help="write step records, times and seats of all runs to an .npz file",
    )
    add(
        "--traces",
        metavar="PREFIX",
        help="write PREFIX.POLICY.jsonl for jitney simulate --trace: what came, and what "
        "was measured; PREFIX.CASE.POLICY.jsonl if there are several cases",
    )
    add_settings(parser, ("model", "engine"), leave_out=("policy",))
    return parser


def policies_of(known: argparse.Namespace) -> list[str]:
    """The policies to run, each once."""
    names = words_of(known.policies)
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        raise ConfigError(
            f"--policies: {', '.join(unknown) or 'nothing'} is none of {', '.join(POLICIES)}"
        )
    if known.concurrency and (known.trace or known.arrivals != "closed"):
        raise ConfigError(
            "--concurrency is for --arrivals closed: other arrivals come at their own times"
        )
    return names


def words_of(text: str) -> list[str]:
    """Words between commas, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def cases_of(known: argparse.Namespace) -> dict[str, tuple[argparse.Namespace, Case | None]]:
    """The cases by name: the flags that describe each, and None for the one that the flags given
    describe.
    """
    defaults = make_parser().parse([])
    told = [name for name in TRAFFIC_FLAGS if getattr(known, name) != getattr(defaults, name)]
    if known.cases is None and told:
        return {GIVEN: (with_flags(known, requests=requests_of(known, DEFAULT_REQUESTS)), None)}
    if told and known.cases is not None:
        raise ConfigError(
            f"--cases has traffic of its own: give no --{told[0].replace('_', '-')} with it"
        )
    names = words_of(known.cases) if known.cases is not None else list(CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown or not names:
        raise ConfigError(
            f"--cases: {', '.join(unknown) or 'nothing'} is none of {', '.join(CASES)}"
        )
    found = {}
    for name in names:
        case = CASES[name]
        found[name] = (
            with_flags(known, requests=requests_of(known, case.requests), output=case.output),
            case,
        )
    return found


def requests_of(known: argparse.Namespace, default: int) -> int:
    return default if known.requests is None else known.requests


def with_flags(known: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**(vars(known) | changes))


def loads_of(known: argparse.Namespace) -> list[float]:
    """The loads to measure beside the simulated curve."""
    try:
        loads = [float(word) for word in words_of(known.measure_loads or "")]
    except ValueError:
        loads = [0.0]
    if not all(0 < load < float("inf") for load in loads):
        raise ConfigError(
            f"--measure-loads: {known.measure_loads!r} must be numbers above 0, separated by commas"
        )
    return loads


def config_of(known: argparse.Namespace) -> Config:
    """The configuration, with the seats that were asked for and a queue that refuses nobody."""
    if known.seats is not None and "max_seats" in vars(known):
        raise ConfigError("--seats and --max-seats are the same setting: give one")
    if known.seats is not None:
        known.max_seats = str(known.seats)
    return config_from(known)


def draw(bench: Bench, flags: argparse.Namespace, case: Case | None) -> Traffic:
    """The requests of a case, with their texts."""
    open_loop = not flags.trace and flags.arrivals != "closed"
    arrivals = traffic_from(flags, rate=1.0 if open_loop else flags.rate or 0.0)
    requests = bench.requests(arrivals, flags.seed)
    if case is not None:
        return Traffic(flags, arrivals, requests, case.what, case.of, case.load, 0.0)
    of = "continuous" if open_loop and not flags.rate else ""
    return Traffic(flags, arrivals, requests, "as the flags say", of, flags.load, flags.rate or 0.0)


def is_closed(known: argparse.Namespace) -> bool:
    return not known.trace and known.arrivals == "closed"


def pace(
    bench: Bench,
    traffics: Mapping[str, Traffic],
    policies: Sequence[str],
    loads: Sequence[float],
    watch: Watch,
) -> float:
    """Give each open case its rate and say how long all will take; returns the requests a second
    that continuous batching was measured to serve of the first case's lengths, 0 where no case has
    a rate to find."""
    if not any(traffic.open_loop for traffic in traffics.values()):
        return 0.0
    rate, measured = capacity(
        bench, next(iter(traffics.values())).requests, bench.limits.max_seats, watch
    )
    table = StepTable.from_records(measured.records)
    set_rates(bench, traffics, table, rate)
    tell_duration(traffics, policies, bench, table, loads)
    return rate


def set_rates(bench: Bench, traffics: Mapping[str, Traffic], table: StepTable, rate: float) -> None:
    """Give each open case its rate: of what continuous batching was measured to serve of the first
    one's lengths, and of what the simulator says for other lengths and policies."""
    shape = open_to_all(bench.shape)
    lengths = next(iter(traffics.values())).flags.output
    for traffic in traffics.values():
        if not traffic.of:
            continue
        able = rate
        if traffic.of != "continuous" or traffic.flags.output != lengths:
            able = simulated_capacity(traffic.arrivals, shape.under(traffic.of, 0.0), table)
        traffic.rate = traffic.load * able


def tell_duration(
    traffics: Mapping[str, Traffic],
    policies: Sequence[str],
    bench: Bench,
    table: StepTable,
    loads: Sequence[float],
) -> None:
    """Say on standard error how long all runs should take, by simulation."""
    shape, seconds, count = open_to_all(bench.shape), 0.0, 0
    for traffic in traffics.values():
        coming = at_load(traffic.arrivals, traffic.rate) if traffic.open_loop else traffic.arrivals
        for policy in policies:
            run = simulate(
                coming,
                shape.under(policy, 0.0),
                table,
                concurrency=traffic.flags.concurrency or None,
            )
            seconds += run.seconds
            count += 1
    more = f"; beside them {len(loads) * len(policies)} at other loads" if loads else ""
    print(
        f"{count} runs, about {seconds / 60:.1f} minutes by simulation{more}",
        file=sys.stderr,
        flush=True,
    )


def named(watch: Watch, case: str) -> Watch:
    """The same, with the case before the policy's name."""
    return (
        watch if case == GIVEN else lambda what, done, total: watch(f"{case}, {what}", done, total)
    )


def serve(
    bench: Bench, traffic: Traffic, policies: Sequence[str], timeout_ms: float, watch: Watch
) -> dict[str, Measured]:
    """The case under each policy."""
    requests = traffic.paced(traffic.rate) if traffic.open_loop else traffic.requests
    return run_policies(
        bench,
        requests,
        policies,
        concurrency=traffic.flags.concurrency,
        watch=watch,
        static_timeout_ms=timeout_ms,
    )


def measure_loads(
    bench: Bench,
    traffics: Mapping[str, Traffic],
    policies: Sequence[str],
    loads: Sequence[float],
    rate: float,
    watch: Watch,
) -> list[dict[str, Any]]:
    """The points of `cases.load_curve`, measured on the first case; shares of capacity are not
    known here.
    """
    first, points = next(iter(traffics.values())), []
    for load in loads:
        runs = run_policies(
            bench,
            first.paced(load * rate),
            policies,
            watch=named(watch, f"load {load:g}"),
            static_timeout_ms=0.0,
        )
        told = {policy: point_of(run.figures(), None) for policy, run in runs.items()}
        points.append({"load": load, "rate": load * rate, "policies": told})
    return points


def make_report(
    known: argparse.Namespace,
    traffics: Mapping[str, Traffic],
    runs: Mapping[str, Mapping[str, Measured]],
    info: EngineInfo,
    at_loads: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Everything that was found, ready for JSON."""
    cases = {name: case_report(known, traffics[name], found) for name, found in runs.items()}
    first = next(iter(traffics))
    curve = curve_of(traffics[first], runs[first]) if traffics[first].open_loop else []
    return {
        "cases": cases,
        "load_curve": curve,
        "measured_loads": list(at_loads),
        "published": PUBLISHED,
        "engine": msgspec.to_builtins(info),
    }


def case_report(
    known: argparse.Namespace, traffic: Traffic, runs: Mapping[str, Measured]
) -> dict[str, Any]:
    """What was found of one case."""
    price = known.price_per_hour
    figures = {
        name: run.figures(slo_from(known), price)
        | {
            "ledger": as_json(bill(run.records, run.seconds), price),
            "backlog": None if is_closed(known) else msgspec.to_builtins(backlog_of(run.times)),
            "request_shares": as_json(run.riders.bill(run.records)[0], price),
        }
        for name, run in runs.items()
    }
    unlike = differences(runs)
    arrivals = [request.arrival for request in traffic.requests]
    described = describe_traffic(traffic.flags, arrivals, traffic.rate)
    return {
        "what": f"{traffic_line(described)}: {traffic.what}",
        "policies": figures,
        "ratios": ratios(figures),
        "same_tokens": not unlike,
        "differences": [difference._asdict() for difference in unlike],
        "traffic": described,
        "lengths": {
            "prompts": lengths_of([a.n_prompt for a in arrivals]),
            "outputs": lengths_of([a.n_output for a in arrivals]),
        },
        "share_of_capacity": shares_of_capacity(traffic, runs),
        "cross_errors": cross_errors({name: run.as_measured for name, run in runs.items()}),
        "limits": {name: msgspec.to_builtins(run.limits) for name, run in runs.items()},
    }


def shares_of_capacity(traffic: Traffic, runs: Mapping[str, Measured]) -> dict[str, float]:
    """For each policy the load over what it can serve, simulated with its own run's steps; empty
    without a rate.
    """
    if not traffic.rate:
        return {}
    return {
        name: traffic.rate
        / simulated_capacity(
            traffic.arrivals, open_to_all(run.shape), StepTable.from_records(run.records)
        )
        for name, run in runs.items()
    }


def curve_of(traffic: Traffic, runs: Mapping[str, Measured]) -> list[dict[str, Any]]:
    """Waits over the load, simulated with the steps of all runs together."""
    import numpy as np

    table = StepTable.from_records(np.concatenate([run.records for run in runs.values()]))
    arrivals = traffic_from(with_flags(traffic.flags, requests=CURVE_REQUESTS), rate=1.0)
    return load_curve(arrivals, open_to_all(next(iter(runs.values())).shape), table, list(runs))


def deliver(
    known: argparse.Namespace, report: Mapping[str, Any], runs: Mapping[str, Mapping[str, Measured]]
) -> None:
    """Print the tables and write the files that were asked for."""
    from jitney.engine.bench.policies_page import write_policies_page
    from jitney.engine.bench.saved import write_recording, write_records
    from jitney.engine.report import tables

    everything = {
        policy if case == GIVEN else f"{case}.{policy}": run
        for case, found in runs.items()
        for policy, run in found.items()
    }
    if known.records:
        write_records(known.records, everything)
    for name, measured in everything.items() if known.traces else ():
        write_recording(f"{known.traces}.{name}.jsonl", measured.times, measured.started)
    if known.html:
        write_policies_page(known.html, report, runs, summary(report), known.price_per_hour)
    if known.json:
        write_json(known.json, report)
    if known.json == "-":
        return
    print(engine_line(report["engine"]))
    for case, found in report["cases"].items():
        print_case(case, found, runs[case], known.price_per_hour)
    if report["load_curve"]:
        tables.print_table(
            tables.curve_table(report["load_curve"]),
            "p99 time to first token over the load, simulated",
        )
    if report["measured_loads"]:
        tables.print_table(tables.curve_table(report["measured_loads"]), "the same, measured")


def print_case(
    case: str, found: Mapping[str, Any], runs: Mapping[str, Measured], price_per_hour: float | None
) -> None:
    """What was found of one case."""
    from jitney.engine.report import tables

    print(f"\n{case}")
    for line in (*case_lines(found), *queue_lines(found["policies"])):
        print(line)
    tables.print_table(tables.figures_table(found["policies"]))
    if found["ratios"]:
        tables.print_table(tables.ratio_table(found["ratios"]))
    bills = {name: bill(measured.records, measured.seconds) for name, measured in runs.items()}
    tables.print_table(tables.ledgers_table(bills, price_per_hour), "Ledger")
    tables.print_table(tables.cross_table(found["cross_errors"]), tables.CROSS_TITLE)


def engine_line(engine: Mapping[str, Any]) -> str:
    return (
        f"{engine['model']} in {engine['dtype']} on {engine['device']} ({engine['platform']}), "
        f"{engine['seats']} seats"
    )


def summary(report: Mapping[str, Any]) -> list[str]:
    """What ran on what, for the head of the page, and whose queue grew for the whole run."""
    lines = [engine_line(report["engine"])]
    for name, case in report["cases"].items():
        prefix = "" if name == GIVEN else f"{name}, "
        lines += [f"{prefix}{line}" for line in queue_lines(case["policies"])]
    return lines


def queue_lines(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence for each policy under which the queue grew for the whole run."""
    known = {name: Backlog(**run["backlog"]) for name, run in figures.items() if run["backlog"]}
    return [f"{name}: {backlog}" for name, backlog in known.items() if backlog.grew]
