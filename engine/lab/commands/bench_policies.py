"""`jitney bench policies`: static, dynamic and continuous batching on the same requests, one after
another, in this process: the same weights, the same compiled programs, the same prompts.

Without further flags it takes the three cases of `bench.compare` in turn; flags that say what
traffic comes make it one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.common.text_file import write_text
from jitney.engine.common.trace import Arrival
from jitney.engine.config import Command, Config, Flag, FlagGroup, say
from jitney.engine.core import load_llm
from jitney.engine.lab.bench.compare import (
    CASES,
    PUBLISHED,
    OfferedTraffic,
    TrafficCase,
    differences,
    ratios,
    waits_of,
)
from jitney.engine.lab.bench.offline import (
    NamedWatch,
    OfflineBench,
    OfflineRun,
    PolicyRuns,
    PromptedArrival,
)
from jitney.engine.lab.commands.bench_flags import TrafficArguments, progress, traffic_line
from jitney.engine.lab.simulation.accuracy import cross_errors
from jitney.engine.lab.simulation.simulator import simulate
from jitney.engine.lab.simulation.step_table import StepTable
from jitney.engine.lab.simulation.verdicts import PolicyErrors

if TYPE_CHECKING:
    from jitney.dashboard import Table
    from jitney.engine.common.engine_info import EngineInfo

#: A little more than can be served, so that there is always a queue.
_DEFAULT_LOAD = 1.15
_POLICIES = ("static", "dynamic", "continuous")
#: Requests of the one case that flags describe.
_DEFAULT_REQUESTS = 256
#: Requests of each point of the curve: enough that 1 % of them are more than a few.
_CURVE_REQUESTS = 1024
#: The case that flags describe.
_GIVEN = "given"
#: By the case's name.
_CaseRuns = Mapping[str, PolicyRuns]
#: Flags that say what traffic comes.
_TRAFFIC_FLAGS = (
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


_CASES_HELP = "; ".join(f"{name}: {case.what}" for name, case in CASES.items())
_COMPARISON = (
    Flag.of(
        "--cases",
        f"traffic to compare them on, one after another; {_CASES_HELP} [{','.join(CASES)}; "
        "none if flags say what traffic comes]",
        metavar="A,B",
    ),
    Flag.of("--policies", "policies to compare", ",".join(_POLICIES), metavar="A,B"),
    Flag.whole("--seats", "the same as --max-seats [the engine's]"),
    Flag.number("--rate", "requests a second, for poisson and gamma [from --load]"),
    Flag.number(
        "--load",
        "without --rate: times what continuous batching can serve, which is measured first",
        _DEFAULT_LOAD,
    ),
    Flag.of(
        "--measure-loads",
        "measure the waits at these loads too, besides simulating the curve; as --load",
        metavar="X,Y",
    ),
    Flag.whole("--concurrency", "closed arrivals: requests open at a time; 0: all", 0),
    Flag.number("--warmup-s", "seconds of work before anything is timed", 2.0),
)
_FILES = (
    Flag.of(
        "--records",
        "write step records, times and seats of all runs to an .npz file",
        metavar="FILE",
    ),
    Flag.of(
        "--errors",
        "write how far off it is to predict each policy from another's run, as the package "
        "ships it (engine/lab/simulation/policy_errors.json)",
        metavar="FILE",
    ),
    Flag.of(
        "--traces",
        "write PREFIX.POLICY.jsonl for jitney simulate --trace: what came, and what "
        "was measured; PREFIX.CASE.POLICY.jsonl if there are several cases",
        metavar="PREFIX",
    ),
)
_COMMAND = Command(
    "bench policies",
    "Compare the three ways to batch on the same requests, in this process.",
    (
        FlagGroup(_COMPARISON, "comparison"),
        TrafficArguments.traffic_flags(
            requests=None, arrivals="poisson", shown=str(_DEFAULT_REQUESTS)
        ),
        TrafficArguments.report_flags(),
        FlagGroup(_FILES, "files"),
    ),
    sections=("model", "engine"),
    leave_out=("policy", *Command.ONLY_SERVED),
)


@dataclass(slots=True)
class _Traffic:
    """A case with its requests."""

    #: The parsed arguments, as if this case had been asked for alone.
    args: TrafficArguments
    #: At one request a second if `open_loop`.
    arrivals: list[Arrival]
    #: The same with their prompts.
    requests: list[PromptedArrival]
    #: In words.
    what: str
    #: The policy that the load is a share of, "" if it is not.
    of: str
    load: float
    #: Requests a second; 0: they have none. `_set_rates` writes it where `of` is named.
    rate: float

    @property
    def open_loop(self) -> bool:
        return self.args.is_drawn

    @property
    def offered(self) -> OfferedTraffic:
        return OfferedTraffic(self.arrivals)

    @property
    def timed(self) -> list[Arrival]:
        """The arrivals at the rate of this case."""
        return self.offered.at_rate(self.rate) if self.open_loop else self.arrivals

    def paced(self, rate: float) -> list[PromptedArrival]:
        pairs = zip(self.offered.at_rate(rate), self.requests, strict=True)
        return [PromptedArrival(arrival, request.prompt) for arrival, request in pairs]

    def due(self) -> list[PromptedArrival]:
        if self.open_loop:
            return self.paced(self.rate)
        return self.requests


@dataclass(slots=True)
class _Comparison:
    """What runs on what, and what is called while it does."""

    bench: OfflineBench
    #: By the case's name.
    traffics: dict[str, _Traffic]
    policies: list[str]
    #: Loads whose waits are measured too, besides simulating the curve.
    loads: list[float]
    #: For how long static batching waits for a full batch, ms; 0: for ever.
    static_timeout_ms: float
    watch: NamedWatch

    @property
    def first(self) -> _Traffic:
        return next(iter(self.traffics.values()))

    def run_all(self) -> tuple[dict[str, dict[str, OfflineRun]], list[JsonDict]]:
        """(the runs by case and policy, the measured points of the curve)."""
        rate = self._pace()
        runs = {}
        for name, traffic in self.traffics.items():
            concurrency = traffic.args.concurrency
            runs[name] = self._run(traffic.due(), _named(self.watch, name), concurrency)
        return runs, [self._measure_load(load, rate) for load in self.loads]

    def _pace(self) -> float:
        """Give each open case its rate and say how long all will take.

        Returns the requests a second that continuous batching was measured to serve of the first
        case's lengths, 0 where no case has a rate to find.
        """
        if not any(traffic.open_loop for traffic in self.traffics.values()):
            return 0.0
        rate, measured = self._capacity()
        table = StepTable.from_records(measured.records)
        _set_rates(self.bench, self.traffics, table, rate)
        say(self._expectation(table))
        return rate

    def _capacity(self) -> tuple[float, OfflineRun]:
        """As `OfflineBench.capacity`."""
        first, seats = self.first, self.bench.limits.max_seats
        seed = first.args.seed
        return self.bench.capacity(first.arrivals, seats, seed=seed, watch=self.watch)

    def _expectation(self, table: StepTable) -> str:
        """How many runs come, and how long they will take."""
        pairs = list(itertools.product(self.traffics.values(), self.policies))
        seconds = sum(self._simulated_seconds(*pair, table) for pair in pairs)
        line = f"{len(pairs)} runs, about {seconds / 60:.1f} minutes by simulation"
        if self.loads:
            line += f"; beside them {len(self.loads) * len(self.policies)} at other loads"
        return line

    def _simulated_seconds(self, traffic: _Traffic, policy: str, table: StepTable) -> float:
        shape = self.bench.shape.open_to_all().under(policy, 0.0)
        concurrency = traffic.args.concurrency or None
        return simulate(traffic.timed, shape, table, concurrency=concurrency).seconds

    def _run(
        self, requests: list[PromptedArrival], watch: NamedWatch, concurrency: int = 0
    ) -> dict[str, OfflineRun]:
        return self.bench.run_policies(
            requests,
            self.policies,
            watch=watch,
            concurrency=concurrency,
            static_timeout_ms=self.static_timeout_ms,
        )

    def _measure_load(self, load: float, rate: float) -> JsonDict:
        """A point of `OfferedTraffic.load_curve`, measured on the first case; shares of
        capacity are not known here.
        """
        runs = self._run(self.first.paced(load * rate), _named(self.watch, f"load {load:g}"))
        waits = {policy: waits_of(run.figures(), None) for policy, run in runs.items()}
        return {"load": load, "rate": load * rate, "policies": waits}


def _named(watch: NamedWatch, case: str) -> NamedWatch:
    """The same, with the case before the policy's name where there are several."""
    if case == _GIVEN:
        return watch
    return lambda policy, done, total: watch(f"{case}, {policy}", done, total)


def _set_rates(
    bench: OfflineBench, traffics: Mapping[str, _Traffic], table: StepTable, rate: float
) -> None:
    """Give each open case its rate: of what continuous batching was measured to serve of the first
    one's lengths, and of what the simulator says for other lengths and policies.
    """
    shape = bench.shape.open_to_all()
    lengths = next(iter(traffics.values())).args.output
    for traffic in traffics.values():
        if traffic.of == "continuous" and traffic.args.output == lengths:
            traffic.rate = traffic.load * rate
        elif traffic.of:
            able = traffic.offered.capacity(shape.under(traffic.of, 0.0), table)
            traffic.rate = traffic.load * able


def bench_policies(arguments: Sequence[str]) -> int:
    """Serve the same requests under each policy and print the figures side by side; exit status
    0.
    """
    args = _COMMAND.parse_as(TrafficArguments, arguments)
    policies, loads = _policies_from(args), _loads_from(args)
    cases = _cases_from(args)
    _check(args, cases)
    config = _config_from(args)
    llm = load_llm(config)
    bench = OfflineBench(llm.core, llm.tokenizer.encode)
    traffics = {name: _draw(bench, flags, case) for name, (flags, case) in cases.items()}
    with progress() as watch:
        timeout_ms = _static_timeout_ms(args, config)
        comparison = _Comparison(bench, traffics, policies, loads, timeout_ms, watch)
        bench.warm_up(comparison.first.requests, args.warmup_s)
        runs, measured_loads = comparison.run_all()
    report = _make_report(args, traffics, runs, llm.info)
    report["measured_loads"] = measured_loads
    llm.close()
    _deliver(args, report, runs)
    return 0


def _static_timeout_ms(args: TrafficArguments, config: Config) -> float:
    """For ever, 0, unless the flags say otherwise."""
    if "static_timeout_ms" in vars(args):
        return config.engine.static_timeout_ms
    return 0.0


def _check(args: TrafficArguments, cases: _Cases) -> None:
    """Bad flags are reported before the model loads."""
    args.check_writable("json", "html", "records", "errors", "traces")
    args.check_numbers(rate=0.001, load=0.001, concurrency=0, warmup_s=0)
    args.slo()
    for flags, _ in cases.values():
        _check_case(flags)


def _check_case(flags: TrafficArguments) -> None:
    if flags.measure_loads and not flags.is_drawn:
        raise ConfigError("--measure-loads is for traffic with a rate: poisson or gamma arrivals")
    flags.draw(rate=flags.rate or 1.0)


def _policies_from(args: TrafficArguments) -> list[str]:
    names = args.names_of("policies", _POLICIES)
    args.check_concurrency()
    return names


def _loads_from(args: TrafficArguments) -> list[float]:
    if args.measure_loads is None:
        return []
    return args.numbers_of("measure_loads", float)


#: By name: the flags that describe the case, and None for the one that the given flags describe.
_Cases = dict[str, tuple[TrafficArguments, TrafficCase | None]]


def _cases_from(args: TrafficArguments) -> _Cases:
    """The cases that the flags ask for."""
    given = _given_traffic(args)
    if given and args.cases is not None:
        raise ConfigError(
            f"--cases has traffic of its own: give no {args.flag_of(given[0])} with it"
        )
    if given:
        return {_GIVEN: (args.changed(requests=_requests(args, _DEFAULT_REQUESTS)), None)}
    chosen = list(CASES)
    if args.cases is not None:
        chosen = args.names_of("cases", CASES)
    return {name: _case_with(args, CASES[name]) for name in chosen}


def _given_traffic(args: TrafficArguments) -> list[str]:
    """Names of the flags of traffic that were given."""
    defaults = _COMMAND.parse([])
    return [name for name in _TRAFFIC_FLAGS if getattr(args, name) != getattr(defaults, name)]


def _case_with(args: TrafficArguments, case: TrafficCase) -> tuple[TrafficArguments, TrafficCase]:
    requests = _requests(args, case.requests)
    return args.changed(requests=requests, output=case.output), case


def _requests(args: TrafficArguments, default: int) -> int:
    return default if args.requests is None else args.requests


def _config_from(args: TrafficArguments) -> Config:
    args.check_seats()
    if args.seats is not None:
        args.max_seats = str(args.seats)
    return args.load_config()


def _draw(bench: OfflineBench, args: TrafficArguments, case: TrafficCase | None) -> _Traffic:
    """The requests of a case, with their texts."""
    rate = args.rate or 0.0
    arrivals = args.draw(rate=1.0 if args.is_drawn else rate)
    requests = bench.requests(arrivals, args.seed)
    if case is not None:
        return _Traffic(args, arrivals, requests, case.what, case.of, case.load, 0.0)
    of = "continuous" if args.is_drawn and not rate else ""
    return _Traffic(args, arrivals, requests, "as the flags say", of, args.load, rate)


def _make_report(
    args: TrafficArguments, traffics: Mapping[str, _Traffic], runs: _CaseRuns, info: EngineInfo
) -> JsonDict:
    first = next(iter(traffics))
    return {
        "cases": {name: _case_report(args, traffics[name], runs[name]) for name in runs},
        "load_curve": _curve(traffics[first], runs[first]),
        "published": PUBLISHED,
        "date": date.today().isoformat(),
        "engine": info.flat(),
    }


def _case_report(args: TrafficArguments, traffic: _Traffic, runs: PolicyRuns) -> JsonDict:
    figures = {name: _run_figures(args, run) for name, run in runs.items()}
    return {
        **_described(traffic),
        **_compared(runs),
        "policies": figures,
        "ratios": ratios(figures),
        "share_of_capacity": _shares_of_capacity(traffic, runs),
        "limits": {name: msgspec.to_builtins(run.limits) for name, run in runs.items()},
    }


def _described(traffic: _Traffic) -> JsonDict:
    """What came."""
    arrivals = [request.arrival for request in traffic.requests]
    described = traffic.args.describe(arrivals, traffic.rate)
    return {"what": f"{traffic_line(described)}: {traffic.what}", "traffic": described}


def _compared(runs: PolicyRuns) -> JsonDict:
    """Whether answers differ, and how well each run predicts the others."""
    unlike = [difference._asdict() for difference in differences(runs)]
    cross = cross_errors({name: run.as_measured for name, run in runs.items()})
    return {"same_tokens": not unlike, "differences": unlike, "cross_errors": cross}


def _run_figures(args: TrafficArguments, run: OfflineRun) -> JsonDict:
    price = args.price_per_hour
    return args.figures_of(run, closed=args.is_closed) | {
        "ledger": run.costs.as_json(price),
        "request_shares": run.request_shares.as_json(price),
    }


def _shares_of_capacity(traffic: _Traffic, runs: PolicyRuns) -> dict[str, float]:
    """For each policy the load over what it can serve, simulated with its own run's steps; empty
    without a rate.
    """
    if not traffic.rate:
        return {}
    return {name: traffic.rate / _able(traffic, run) for name, run in runs.items()}


def _able(traffic: _Traffic, run: OfflineRun) -> float:
    """Requests of this case a second that the run's engine could serve."""
    table = StepTable.from_records(run.records)
    return traffic.offered.capacity(run.shape.open_to_all(), table)


def _curve(traffic: _Traffic, runs: PolicyRuns) -> list[JsonDict]:
    """Waits over the load, simulated with the steps of all runs together; empty without a rate."""
    if not traffic.open_loop:
        return []
    arrivals = traffic.args.changed(requests=_CURVE_REQUESTS).draw(rate=1.0)
    shape = next(iter(runs.values())).shape.open_to_all()
    table = StepTable.from_records(np.concatenate([run.records for run in runs.values()]))
    return OfferedTraffic(arrivals).load_curve(shape, table, list(runs))


def _deliver(args: TrafficArguments, report: JsonObject, runs: _CaseRuns) -> None:
    from jitney.engine.lab.bench.policies_page import write_policies_page

    _write_runs(args, _by_file_name(runs))
    if args.errors:
        found = msgspec.json.encode(PolicyErrors.of_report(report))
        write_text("--errors", args.errors, msgspec.json.format(found).decode() + "\n")
    if args.html:
        summary = [_engine_line(report["engine"])]
        write_policies_page(args.html, report, runs, summary, args.price_per_hour)
    if args.write_report(report):
        _print_report(args, report, runs)


def _by_file_name(runs: _CaseRuns) -> dict[str, OfflineRun]:
    """All runs, by the policy's name; the case stands before it where there are several."""
    named = {}
    for case, by_policy in runs.items():
        prefix = "" if case == _GIVEN else f"{case}."
        named |= {prefix + policy: run for policy, run in by_policy.items()}
    return named


def _write_runs(args: TrafficArguments, runs: PolicyRuns) -> None:
    """Step records and traces, for the simulator."""
    from jitney.engine.lab.bench.saved import write_recording, write_records

    if args.records:
        write_records(args.records, runs)
    if args.traces:
        for name, run in runs.items():
            write_recording(f"{args.traces}.{name}.jsonl", run.requests, run.started)


def _print_report(args: TrafficArguments, report: JsonObject, runs: _CaseRuns) -> None:
    print(_engine_line(report["engine"]))
    for name, case in report["cases"].items():
        _print_case(name, case, runs[name], args.price_per_hour)
    _print_curve(report["load_curve"], "p99 time to first token over the load, simulated")
    _print_curve(report["measured_loads"], "the same, measured")


def _print_curve(points: Sequence[JsonObject], title: str) -> None:
    from jitney.dashboard import curve_table

    if points:
        curve_table(points).print(title)


def _print_case(name: str, case: JsonObject, runs: PolicyRuns, price: float | None) -> None:
    from jitney.engine.lab.bench.policies_page import case_lines

    print("\n".join([f"\n{name}", *case_lines(case)]))
    for title, table in _case_tables(case, runs, price):
        table.print(title)


def _case_tables(
    case: JsonObject, runs: PolicyRuns, price_per_hour: float | None
) -> Iterator[tuple[str, Table]]:
    """(title, table)."""
    from jitney.dashboard import CROSS_TITLE, cross_table, figures_table, ledgers_table, ratio_table

    yield "", figures_table(case["policies"], case["share_of_capacity"])
    if case["ratios"]:
        yield "", ratio_table(case["ratios"])
    bills = {policy: run.costs for policy, run in runs.items()}
    yield "Ledger", ledgers_table(bills, price_per_hour)
    yield CROSS_TITLE, cross_table(case["cross_errors"])


def _engine_line(engine: JsonObject) -> str:
    return "{model} in {dtype} on {device} ({platform}), {seats} seats".format_map(engine)
