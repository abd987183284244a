"""`jitney bench policies`: runs static, dynamic and continuous batching on the same requests, one
after another, in this process, with the same weights, compiled programs and prompts.

By default it runs the three cases of `bench.compare`; with flags for the traffic it runs one case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.common.terminal import say
from jitney.engine.common.trace import Arrival
from jitney.engine.config import Command, Config, Flag, FlagGroup
from jitney.engine.core import load_llm
from jitney.engine.lab.backlog import QueueGrowth
from jitney.engine.lab.bench.compare import (
    CASES,
    TrafficCase,
    at_rate,
    capacity,
    differences,
    load_curve,
    prediction_errors,
    ratios,
    waits_of,
)
from jitney.engine.lab.bench.offline import (
    NamedWatch,
    OfflineBench,
    PolicyRuns,
    PromptedArrival,
    bill_of,
)
from jitney.engine.lab.commands.bench_flags import TrafficArguments, progress, traffic_line
from jitney.engine.lab.simulation.engine_run import EngineRun
from jitney.engine.lab.simulation.recordings import write_recording
from jitney.engine.lab.simulation.simulator import simulate
from jitney.engine.lab.simulation.step_table import StepTable

if TYPE_CHECKING:
    from jitney.engine.common.engine_info import EngineInfo
    from jitney.engine.common.reports.page import Page, PageSection

#: Load slightly above the capacity, so that there is always a queue.
_DEFAULT_LOAD = 1.15
_POLICIES = ("static", "dynamic", "continuous")
#: Default requests of the case in the flags.
_DEFAULT_REQUESTS = 256
#: Requests of each point of the curve: enough for a p99.9.
_CURVE_REQUESTS = 1024
#: Name of the case in the flags.
_GIVEN = "given"
#: Name of the case -> its runs.
_CaseRuns = Mapping[str, PolicyRuns]
#: Names of the flags for the traffic.
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
    Flag.number("--rate", "requests a second, for poisson and gamma [from --load]", least=0.001),
    Flag.number(
        "--load",
        "without --rate: times what continuous batching can serve, which is measured first",
        _DEFAULT_LOAD,
        least=0.001,
    ),
    Flag.of(
        "--measure-loads",
        "measure the waits at these loads too, besides simulating the curve; as --load",
        metavar="X,Y",
    ),
    Flag.whole("--concurrency", "closed arrivals: requests open at a time; 0: all", 0, least=0),
    Flag.number("--warmup-s", "seconds of work before anything is timed", 2.0, least=0),
)
_FILES = (
    Flag.output("--records", "write step records, times and seats of all runs to an .npz file"),
    Flag.output(
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
    #: The parsed arguments as if only this case were requested.
    args: TrafficArguments
    #: Arrivals, at one request a second if their times are drawn.
    arrivals: list[Arrival]
    #: The arrivals with their prompts.
    requests: list[PromptedArrival]
    #: Description of the case.
    what: str
    #: The policy whose capacity the load is relative to; "" for none.
    of: str
    load: float
    #: Requests a second; 0: no rate.
    rate: float

    @classmethod
    def of_flags(
        cls, bench: OfflineBench, args: TrafficArguments, case: TrafficCase | None
    ) -> _Traffic:
        """The requests of a case with their texts. case: None: the case in the flags."""
        rate = args.rate or 0.0
        arrivals = args.draw(rate=1.0 if args.is_drawn else rate)
        requests = bench.requests(arrivals, args.seed)
        if case is not None:
            return cls(args, arrivals, requests, case.what, case.of, case.load, 0.0)
        of = "continuous" if args.is_drawn and not rate else ""
        return cls(args, arrivals, requests, "as the flags say", of, args.load, rate)

    def paced(self, rate: float) -> list[PromptedArrival]:
        """The requests at `rate` a second; unchanged for a trace or a closed loop."""
        if not self.args.is_drawn:
            return self.requests
        pairs = zip(at_rate(self.arrivals, rate), self.requests, strict=True)
        return [PromptedArrival(arrival, request.prompt) for arrival, request in pairs]

    def set_rate(
        self, bench: OfflineBench, table: StepTable, measured: float, lengths: str | None
    ) -> None:
        """Set the rate of an open-loop case. measured: measured capacity of continuous batching for
        these output lengths; the simulator computes it for other lengths and policies.
        """
        if not self.of:
            return
        able = measured
        if self.of != "continuous" or self.args.output != lengths:
            shape = bench.shape.open_to_all().under(self.of, 0.0)
            able = capacity(self.arrivals, shape, table)
        self.rate = self.load * able


@dataclass(slots=True)
class _Comparison:
    bench: OfflineBench
    #: Name of the case -> its traffic.
    traffics: dict[str, _Traffic]
    policies: list[str]
    #: Loads at which the waits of the simulated curve are also measured.
    loads: list[float]
    #: Time for which static batching waits for a full batch, ms; 0: for ever.
    static_timeout_ms: float
    watch: NamedWatch

    def run_all(self) -> tuple[dict[str, dict[str, EngineRun]], list[JsonDict]]:
        """(the runs by case and policy, the measured points of the curve)."""
        rate = self._pace()
        runs = {}
        for name, traffic in self.traffics.items():
            prefix = "" if name == _GIVEN else f"{name}, "
            requests = traffic.paced(traffic.rate)
            runs[name] = self._run(requests, prefix, traffic.args.concurrency)
        return runs, [self._measure_load(load, rate) for load in self.loads]

    def _pace(self) -> float:
        """Set the rate of each open-loop case, and print the expected time of all cases.

        Returns the measured requests a second of continuous batching for the first case's lengths;
        0 if no case needs a rate.
        """
        traffics = self.traffics.values()
        if not any(traffic.args.is_drawn for traffic in traffics):
            return 0.0
        first = next(iter(traffics))
        rate, measured = self.bench.capacity(
            first.arrivals, seed=first.args.seed, watch=partial(self.watch, "capacity")
        )
        table = StepTable.from_records(measured.records)
        seconds = 0.0
        for traffic in traffics:
            traffic.set_rate(self.bench, table, rate, first.args.output)
            for policy in self.policies:
                arrivals = [each.arrival for each in traffic.paced(traffic.rate)]
                shape = self.bench.shape.open_to_all().under(policy, 0.0)
                n_open = traffic.args.concurrency or None
                seconds += simulate(arrivals, shape, table, concurrency=n_open).seconds
        runs = len(traffics) * len(self.policies)
        line = f"{runs} runs, about {seconds / 60:.1f} minutes by simulation"
        if self.loads:
            line += f"; beside them {len(self.loads) * len(self.policies)} at other loads"
        say(line)
        return rate

    def _run(
        self, requests: list[PromptedArrival], prefix: str, concurrency: int = 0
    ) -> dict[str, EngineRun]:
        """Run the policies. prefix: put before their names on the progress bar."""
        return self.bench.run_policies(
            requests,
            self.policies,
            watch=lambda policy, done, total: self.watch(prefix + policy, done, total),
            concurrency=concurrency,
            static_timeout_ms=self.static_timeout_ms,
        )

    def _measure_load(self, load: float, rate: float) -> JsonDict:
        """Measure a point of `load_curve` on the first case, without shares of capacity."""
        first = next(iter(self.traffics.values()))
        runs = self._run(first.paced(load * rate), f"load {load:g}, ")
        waits = {policy: waits_of(run.figures(), None) for policy, run in runs.items()}
        return {"load": load, "rate": load * rate, "policies": waits}


def bench_policies(arguments: Sequence[str]) -> int:
    """Serve the same requests under each policy and print the figures; exit status 0."""
    args = _COMMAND.parse_as(TrafficArguments, arguments)
    policies = args.names_of("policies", _POLICIES)
    args.check_concurrency()
    loads = [] if args.measure_loads is None else args.numbers_of("measure_loads", float)
    cases = _cases_from(args)
    _check(args, cases)
    config = _config_from(args)
    llm = load_llm(config)
    bench = OfflineBench(llm.core, llm.tokenizer.encode)
    traffics = {name: _Traffic.of_flags(bench, *flags) for name, flags in cases.items()}
    with progress() as watch:
        # By default 0: static batching waits for ever.
        is_given = "static_timeout_ms" in vars(args)
        timeout_ms = config.engine.static_timeout_ms if is_given else 0.0
        comparison = _Comparison(bench, traffics, policies, loads, timeout_ms, watch)
        bench.warm_up(next(iter(traffics.values())).requests, args.warmup_s)
        runs, measured_loads = comparison.run_all()
    report = _make_report(args, traffics, runs, llm.info)
    report["measured_loads"] = measured_loads
    llm.close()
    _write_runs(args, runs)
    args.deliver(report, partial(_page, args, report, runs))
    return 0


def _check(args: TrafficArguments, cases: _Cases) -> None:
    """Report invalid flags before the model is loaded."""
    for flags, _ in cases.values():
        if flags.measure_loads and not flags.is_drawn:
            raise ConfigError(
                "--measure-loads is for traffic with a rate: poisson or gamma arrivals"
            )
        flags.draw(rate=flags.rate or 1.0)


#: Name of the case -> (its flags, its definition; None for the case in the flags).
_Cases = dict[str, tuple[TrafficArguments, TrafficCase | None]]


def _cases_from(args: TrafficArguments) -> _Cases:
    usual = _COMMAND.parse([])
    own_traffic = [name for name in _TRAFFIC_FLAGS if getattr(args, name) != getattr(usual, name)]
    if own_traffic and args.cases is not None:
        raise ConfigError(
            f"--cases has traffic of its own: give no {args.flag_of(own_traffic[0])} with it"
        )
    if own_traffic:
        return {_GIVEN: (args.changed(requests=_requests(args, _DEFAULT_REQUESTS)), None)}
    chosen = list(CASES) if args.cases is None else args.names_of("cases", CASES)
    cases: _Cases = {}
    for name in chosen:
        case = CASES[name]
        requests = _requests(args, case.requests)
        cases[name] = args.changed(requests=requests, output=case.output), case
    return cases


def _requests(args: TrafficArguments, default: int) -> int:
    return default if args.requests is None else args.requests


def _config_from(args: TrafficArguments) -> Config:
    args.check_seats()
    if args.seats is not None:
        args.max_seats = str(args.seats)
    return args.load_config()


def _make_report(
    args: TrafficArguments, traffics: Mapping[str, _Traffic], runs: _CaseRuns, info: EngineInfo
) -> JsonDict:
    first = next(iter(traffics))
    return {
        "cases": {name: _case_report(args, traffics[name], runs[name]) for name in runs},
        "load_curve": _curve(traffics[first], runs[first]),
        "date": date.today().isoformat(),
        "engine": info.flat(),
    }


def _case_report(args: TrafficArguments, traffic: _Traffic, runs: PolicyRuns) -> JsonDict:
    arrivals = [request.arrival for request in traffic.requests]
    described = traffic.args.describe(arrivals, traffic.rate)
    unlike = [difference._asdict() for difference in differences(runs)]
    figures = {}
    for name, run in runs.items():
        ledger = bill_of(run).as_json(args.price_per_hour)
        figures[name] = args.figures_of(run, closed=args.is_closed) | {"ledger": ledger}
    return {
        "what": f"{traffic_line(described)}: {traffic.what}",
        "traffic": described,
        "same_tokens": not unlike,
        "differences": unlike,
        "prediction_errors": prediction_errors(runs),
        "policies": figures,
        "ratios": ratios(figures),
        "share_of_capacity": _shares_of_capacity(traffic, runs),
        "limits": {name: msgspec.to_builtins(run.shape.limits) for name, run in runs.items()},
    }


def _shares_of_capacity(traffic: _Traffic, runs: PolicyRuns) -> dict[str, float]:
    """The load divided by the simulated capacity of each policy; empty without a rate."""
    shares: dict[str, float] = {}
    for name, run in runs.items() if traffic.rate else ():
        table = StepTable.from_records(run.records)
        shares[name] = traffic.rate / capacity(traffic.arrivals, run.shape.open_to_all(), table)
    return shares


def _curve(traffic: _Traffic, runs: PolicyRuns) -> list[JsonDict]:
    """Waits over the load, simulated with the step times of all runs; empty without a rate."""
    if not traffic.args.is_drawn:
        return []
    arrivals = traffic.args.changed(requests=_CURVE_REQUESTS).draw(rate=1.0)
    shape = next(iter(runs.values())).shape.open_to_all()
    table = StepTable.from_records(np.concatenate([run.records for run in runs.values()]))
    return load_curve(arrivals, shape, table, list(runs))


def _write_runs(args: TrafficArguments, runs: _CaseRuns) -> None:
    """Write step records and traces for the simulator, named by case and policy."""
    named = {}
    for case, by_policy in runs.items():
        prefix = "" if case == _GIVEN else f"{case}."
        named |= {prefix + policy: run for policy, run in by_policy.items()}
    if args.records:
        EngineRun.write_all(args.records, named)
    if args.traces:
        for name, run in named.items():
            write_recording(f"{args.traces}.{name}.jsonl", run.requests, run.started)


def _page(args: TrafficArguments, report: JsonObject, runs: _CaseRuns, charts: bool) -> Page:
    """The page for people: figures, prediction errors and ledger of each case; the curve."""
    from jitney.engine.common.reports.page import Page

    engine = "{model} in {dtype} on {device} ({platform}), {seats} seats"
    sections: list[PageSection] = []
    for name, case in report["cases"].items():
        sections += _case_sections(name, case, runs[name], args.price_per_hour, charts)
    sections += _curve_sections(report, charts)
    title = "Static, dynamic and continuous batching on the same requests"
    return Page(title, [engine.format_map(report["engine"])], sections)


def _case_sections(
    name: str, case: JsonObject, runs: PolicyRuns, price: float | None, charts: bool
) -> Iterator[PageSection]:
    from jitney.engine.common.reports.page import PageSection
    from jitney.engine.lab.bench.charts import latency_charts, ledger_bars
    from jitney.engine.lab.bench.tables import (
        errors_table,
        figures_table,
        ledger_table,
        ratio_table,
    )

    requests = {policy: run.requests for policy, run in runs.items()}
    bills = {policy: bill_of(run) for policy, run in runs.items()}
    tables = [figures_table(case["policies"], case["share_of_capacity"])]
    if case["ratios"]:
        tables.append(ratio_table(case["ratios"]))
    notes = [*_case_lines(case), "Latencies count from the time a request should have come."]
    yield PageSection(f"Figures: {name}", notes, tables, latency_charts(requests) if charts else ())
    bars = [ledger_bars(bills)] if charts else ()
    yield PageSection(f"Ledger: {name}", [_LEDGER_NOTE], [ledger_table(bills, price)], bars)
    table = errors_table(case["prediction_errors"])
    yield PageSection(f"Error of prediction: {name}", [_ERRORS_NOTE], [table])


_LEDGER_NOTE = (
    "Where every computed row went. A step's time is split evenly over its rows, padding included."
)
_ERRORS_NOTE = (
    "Step times are learned from the steps of continuous batching; the error is that of the "
    "simulated figure beside the measured one."
)


def _curve_sections(report: JsonObject, charts: bool) -> Iterator[PageSection]:
    from jitney.engine.common.reports.page import PageSection
    from jitney.engine.lab.bench.charts import load_curve as curve_chart
    from jitney.engine.lab.bench.tables import curve_table

    simulated, measured = report["load_curve"], report["measured_loads"]
    if simulated:
        tables = [curve_table(points) for points in (simulated, measured) if points]
        drawn = [curve_chart(simulated, measured)] if charts else ()
        title = "p99 / p99.9 of the time to first token over the load, simulated"
        if measured:
            title += ", then measured"
        yield PageSection(title, [_CURVE_NOTE], tables, drawn)


_CURVE_NOTE = (
    "Load: times what continuous batching can serve. A wait in brackets is that of a queue that "
    "grows without bound: it says how long the run was."
)


def _case_lines(case: JsonObject) -> Iterator[str]:
    """Lines about a case: its traffic, whether answers agree, and policies whose queue grew for the
    whole run.
    """
    yield case["what"]
    unlike = case["differences"]
    if unlike:
        requests = {difference["request"] for difference in unlike}
        first = "request {request} from token {at} ({policies[0]} / {policies[1]})"
        examples = ", ".join(first.format_map(difference) for difference in unlike[:5])
        yield f"got other tokens under another policy: {len(requests)}; {examples}"
    else:
        yield "all policies gave every request the same tokens"
    for policy, figures in case["policies"].items():
        backlog, share = figures["backlog"], case["share_of_capacity"].get(policy)
        if backlog and backlog["grew"]:
            offered = f"; it was offered {share:.2f} times what it can serve" if share else ""
            yield f"{policy}: {QueueGrowth(**backlog)}{offered}"
