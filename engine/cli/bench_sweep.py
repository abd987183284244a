"""`jitney bench sweep`: the same traffic at growing concurrency, rate or load, in this process or
at an endpoint.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from jitney.engine.bench.sweep import knee_of, point_of
from jitney.engine.cli.bench_flags import (
    add_report,
    add_traffic,
    backlog_json,
    check_numbers,
    check_writable,
    describe_traffic,
    flag_of,
    numbers_from,
    progress,
    slo_from,
    traffic_from,
    traffic_line,
    write_report,
)
from jitney.engine.cli.bench_serve import ENOUGH_FOR_P99, add_endpoint, endpoint_from
from jitney.engine.cli.flags import Flag, Parser, add_flags, add_settings, config_from
from jitney.engine.errors import ConfigError
from jitney.engine.machine import cpu_name
from jitney.engine.simulation.workload import Arrival
from jitney.engine.telemetry.backlog import QueueGrowth
from jitney.engine.types import JsonDict, JsonObject

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from jitney.engine.bench.compare import NamedWatch
    from jitney.engine.bench.load import LoadResult, Watch
    from jitney.engine.bench.offline import PromptedArrival
    from jitney.engine.report.page import PageSection, Table

_DEFAULT_CONCURRENCIES = "1,2,4,8,16,32"
#: Requests at a point unless told otherwise: enough for a p99 where requests come at times of their
#: own.
_CLOSED_REQUESTS, _OPEN_REQUESTS = 32, 128
_REQUESTS_HELP = (
    f"{_CLOSED_REQUESTS} and four for each open one; with --rates and --loads {_OPEN_REQUESTS}"
)
_FLAGS = (
    Flag.of(
        "--concurrencies",
        f"requests open at a time: one point each, as closed loops [{_DEFAULT_CONCURRENCIES}]",
        metavar="A,B,...",
    ),
    Flag.of(
        "--rates",
        "requests a second instead: one point each, as --arrivals says",
        metavar="A,B,...",
    ),
    Flag.of(
        "--loads",
        "rates as shares of what continuous batching can serve, which is measured "
        "first; 0.25,0.5,0.75,0.9,1.1 shows how p99 depends on the load",
        metavar="A,B,...",
    ),
    Flag.whole(
        "--capacity-streams",
        "for --loads with --url: requests open while the capacity is measured; 0: twice the "
        "server's seats, 64 where it does not list them",
        0,
    ),
    Flag.whole("--warmup", "short requests before each point", 8),
)
_STEEPENS = "the knee is where the p99 end-to-end time steepens (Kneedle, Satopää et al. 2011)"
_METHODS = {
    "concurrency": "the knee is where output tokens/s flatten (Kneedle, Satopää et al. 2011)",
    "rate": _STEEPENS,
    "load": f"load 1 is what continuous batching served with a full queue; {_STEEPENS}",
}
_UNITS = {
    "concurrency": "requests open at a time",
    "rate": "requests a second",
    "load": "share of what continuous batching can serve",
}
#: Columns of the latencies in the table, by a point's figures.
_LATENCIES = {
    "ttft_p50_s": "TTFT p50",
    "ttft_p99_s": "TTFT p99",
    "itl_p50_s": "ITL p50",
    "itl_p99_s": "ITL p99",
    "e2e_p50_s": "e2e p50",
    "e2e_p99_s": "e2e p99",
}


def run(arguments: Sequence[str]) -> int:
    """Measure every point, print the curve and mark its knee; exit status 0."""
    args = _make_parser().parse(arguments)
    _check(args)
    axis, values = _axis_from(args)
    _arrivals_at(args, axis, values[0])  # bad flags are reported before anything is loaded
    engine = _AtEndpoint(args) if args.url else _InProcess(args, axis, values)
    report = _sweep(args, axis, values, engine)
    knee = knee_of(axis, report["points"])
    report["knee"] = None
    if knee is not None:
        report["knee"] = report["points"][knee][axis]
    _deliver(args, report, knee)
    return 0


def _check(args: Namespace) -> None:
    """Raise ConfigError for flags that no axis could go with."""
    check_writable(args, "json", "html")
    check_numbers(args, warmup=0, timeout_s=0.001, requests=1, capacity_streams=0)
    slo_from(args)
    if args.trace:
        raise ConfigError("a trace has its own times: --trace cannot be swept")
    if args.capacity_streams and not (args.loads and args.url):
        raise ConfigError("--capacity-streams is for --loads with --url")


def _make_parser() -> Parser:
    parser = Parser(
        "bench sweep",
        "Throughput and latency over concurrency, rate or load: of an engine in this "
        "process, or of an endpoint with --url.",
    )
    add_flags(parser, _FLAGS, "sweep")
    add_endpoint(parser, required=False)
    add_traffic(parser, requests=0, arrivals="poisson", requests_help=_REQUESTS_HELP)
    add_report(parser)
    add_settings(parser, ("model", "engine"))
    return parser


def _axis_from(args: Namespace) -> tuple[str, list[float]]:
    """What grows, and its values, ascending."""
    given = [name for name in ("concurrencies", "rates", "loads") if getattr(args, name)]
    if len(given) > 1:
        raise ConfigError(f"give --{given[0]} or --{given[1]}, not both")
    if given in ([], ["concurrencies"]):
        text = args.concurrencies or _DEFAULT_CONCURRENCIES
        return "concurrency", sorted(numbers_from("--concurrencies", text, int))
    name = given[0]
    if args.arrivals == "closed":
        raise ConfigError(f"--{name} needs --arrivals poisson or gamma")
    return name.removesuffix("s"), sorted(numbers_from(f"--{name}", getattr(args, name), float))


def _arrivals_at(args: Namespace, axis: str, value: float) -> list[Arrival]:
    """The requests of one point, where `value` requests are open or come a second: the same lengths
    at every point, more of them at a high concurrency.
    """
    return traffic_from(_args_at(args, axis, value), _rate_at(axis, value))


def _rate_at(axis: str, value: float) -> float:
    return 0.0 if axis == "concurrency" else value


def _args_at(args: Namespace, axis: str, value: float) -> Namespace:
    if axis == "concurrency":
        requests = max(args.requests or _CLOSED_REQUESTS, 4 * int(value))
        changes = {"arrivals": "closed", "requests": requests}
    else:
        changes = {"requests": args.requests or _OPEN_REQUESTS}
    return Namespace(**vars(args) | changes)


class _Engine(Protocol):
    """What is swept."""

    def capacity(self, first: list[Arrival], watch: Watch) -> float:
        """Requests a second at load 1."""
        ...

    def measure(self, arrivals: list[Arrival], concurrency: int, watch: Watch) -> JsonDict:
        """The figures of one point; concurrency 0: requests come at their own times."""
        ...

    def close(self) -> dict[str, str]:
        """Stop it; returns what it is."""
        ...


def _sweep(args: Namespace, axis: str, values: Sequence[float], engine: _Engine) -> JsonDict:
    """Measure every point; everything but the knee, ready for JSON."""
    capacity = None
    with progress() as watch:
        if axis == "load":
            first = _arrivals_at(args, axis, values[0])
            capacity = engine.capacity(first, partial(watch, "capacity"))
        points = [_measured(args, axis, value, capacity, engine, watch) for value in values]
    return {
        "points": points,
        "capacity_req_s": capacity,
        "engine": engine.close(),
        "axis": axis,
        "method": _METHODS[axis],
        "target": args.url or "this process",
        "client_machine": cpu_name(),
        "traffic": _last_traffic(args, axis, values[-1] * (capacity or 1.0)),
    }


def _measured(
    args: Namespace,
    axis: str,
    value: float,
    capacity: float | None,
    engine: _Engine,
    watch: NamedWatch,
) -> JsonDict:
    """One point."""
    arrivals = _arrivals_at(args, axis, value * (capacity or 1.0))
    concurrency = int(value) if axis == "concurrency" else 0
    figures = engine.measure(arrivals, concurrency, partial(watch, f"{axis} {value:g}"))
    return _point(axis, value, capacity, figures)


def _point(axis: str, value: float, capacity: float | None, figures: JsonDict) -> JsonDict:
    point = {axis: value, **point_of(figures), "figures": figures}
    if capacity is not None:
        point["rate"] = value * capacity
    return point


def _last_traffic(args: Namespace, axis: str, value: float) -> JsonDict:
    arrivals = _arrivals_at(args, axis, value)
    return describe_traffic(_args_at(args, axis, value), arrivals, _rate_at(axis, value))


class _InProcess:
    """An engine in this process, with as many seats as the highest concurrency unless told
    otherwise.
    """

    def __init__(self, args: Namespace, axis: str, values: Sequence[float]):
        from jitney.engine.bench.offline import OfflineBench
        from jitney.engine.cli.display import load_llm

        if axis == "concurrency" and "max_seats" not in vars(args):
            args.max_seats = str(int(values[-1]))
        self._args = args
        self._llm = load_llm(config_from(args))
        self._bench = OfflineBench(self._llm.core, self._llm.tokenizer.encode)
        self._bench.warm_up(self._requests(_arrivals_at(args, axis, values[0])))

    def _requests(self, arrivals: list[Arrival]) -> list[PromptedArrival]:
        return self._bench.requests(arrivals, self._args.seed)

    def capacity(self, first: list[Arrival], watch: Watch) -> float:
        from jitney.engine.bench.compare import capacity

        def without_name(name: str, done: int, total: int) -> None:
            watch(done, total)

        requests = self._requests(first)
        rate, _ = capacity(self._bench, requests, self._bench.limits.max_seats, without_name)
        return rate

    def measure(self, arrivals: list[Arrival], concurrency: int, watch: Watch) -> JsonDict:
        requests = self._requests(arrivals)
        run = self._bench.run(requests, concurrency=concurrency, watch=watch)
        figures = run.figures(slo_from(self._args), self._args.price_per_hour)
        figures["backlog"] = backlog_json(run.requests, concurrency > 0)
        return figures

    def close(self) -> dict[str, str]:
        info = self._llm.info
        self._llm.close()
        names = ("version", "device", "platform", "kernels", "dtype", "policy")
        return {name: getattr(info, name) for name in names}


class _AtEndpoint:
    """A server elsewhere."""

    def __init__(self, args: Namespace):
        from jitney.engine.bench.online import UNKNOWN_ENGINE

        for name in ("max_seats", "policy", "order"):
            if name in vars(args):
                raise ConfigError(
                    f"{flag_of(name)} is the server's business: leave it out with --url"
                )
        self._args = args
        self._endpoint = endpoint_from(args)
        self._about = UNKNOWN_ENGINE

    def capacity(self, first: list[Arrival], watch: Watch) -> float:
        from jitney.engine.bench.online import capacity_at

        measuring = capacity_at(
            self._endpoint,
            first,
            streams=self._args.capacity_streams,
            warmup=self._args.warmup,
            watch=watch,
        )
        return asyncio.run(measuring)

    def measure(self, arrivals: list[Arrival], concurrency: int, watch: Watch) -> JsonDict:
        from jitney.engine.bench.online import measure

        measuring = measure(
            self._endpoint,
            arrivals,
            concurrency=concurrency,
            closed=concurrency > 0,
            warmup=self._args.warmup,
            watch=watch,
        )
        online = asyncio.run(measuring)
        self._about = online.about
        return self._figures(online.load, concurrency)

    def _figures(self, load: LoadResult, concurrency: int) -> JsonDict:
        figures = load.figures(slo_from(self._args), self._args.price_per_hour)
        figures["client"] = load.sender.as_json()
        figures["backlog"] = backlog_json(load.requests, concurrency > 0)
        return figures

    def close(self) -> dict[str, str]:
        return self._about._asdict()


def _deliver(args: Namespace, report: JsonObject, knee: int | None) -> None:
    from jitney.engine.report.page import write_page
    from jitney.engine.report.tables import print_table

    table, summary = _curve_table(report, knee), _summary(report)
    if args.html:
        title = f"Throughput and latency over {report['axis']}"
        write_page(args.html, title, summary, _sections(report, table, knee))
    if write_report(args, report):
        for line in summary:
            print(line)
        print_table(table)


def _summary(report: JsonObject) -> list[str]:
    lines = [
        f"{report['target']}; {_engine_line(report)}",
        f"{traffic_line(report['traffic'])} (the last point)",
        report["method"],
    ]
    if report["capacity_req_s"] is not None:
        lines.append(f"load 1: {report['capacity_req_s']:.3g} requests a second")
    return [*lines, *_doubts(report), *_client_lines(report["points"])]


def _doubts(report: JsonObject) -> Iterator[str]:
    axis, points = report["axis"], report["points"]
    figures = [point["figures"] for point in points]
    served = [each["served"] for each in figures]
    if min(served) < ENOUGH_FOR_P99:
        yield f"p99 of {min(served)} requests is nearly the slowest of them: give more --requests"
    for point in points:
        if _grew(point):
            yield f"{axis} {point[axis]:g}: {QueueGrowth(**point['figures']['backlog'])}"
    failed = sum(each["requests"] for each in figures) - sum(served)
    if failed:
        yield f"failed requests: {failed}, in no percentile"


def _client_lines(points: Sequence[JsonObject]) -> Iterator[str]:
    clients = [point["figures"].get("client") for point in points]
    seen = [client for client in clients if client is not None]
    if seen:
        busiest = max(client["cpu_share"] for client in seen)
        yield f"this client used at most {busiest:.0%} of a core"
    yield from sorted({client["trouble"] for client in seen} - {None})


def _engine_line(report: JsonObject) -> str:
    """What the engine runs on; beside it, for an endpoint, what this client runs on."""
    from jitney.engine.bench.online import EngineAbout

    facts = dict(report["engine"])
    policy = facts.pop("policy", None)
    about = EngineAbout(**facts)
    if policy is not None:
        return f"{about}, {policy} batching"
    return f"{about}; client's machine: {report['client_machine']}"


def _grew(point: JsonObject) -> bool:
    backlog = point["figures"]["backlog"]
    return backlog is not None and backlog["grew"]


def _curve_table(report: JsonObject, knee: int | None) -> Table:
    from jitney.engine.report.page import Table

    cells: dict[str, str] = {}
    rows = []
    for point in report["points"]:
        cells = _cells(report["axis"], point)
        rows.append(list(cells.values()))
    if knee is not None:
        rows[knee][0] += " knee"
    return Table(list(cells), rows)


def _cells(axis: str, point: JsonObject) -> dict[str, str]:
    from jitney.engine.report.tables import duration, number, queue

    cells = {"open" if axis == "concurrency" else axis: f"{point[axis]:g}"}
    if axis == "load":
        cells["rate"] = f"{point['rate']:.3g}"
    cells["output tok/s"] = number(point["output_tok_s"])
    cells["req/s"] = number(point["req_s"])
    cells |= {head: duration(point[name]) for name, head in _LATENCIES.items()}
    if axis != "concurrency":
        cells["queue"] = queue(point["figures"]["backlog"], grew="grew")
    return cells


def _sections(report: JsonObject, table: Table, knee: int | None) -> list[PageSection]:
    from jitney.engine.report.page import PageSection

    return [
        PageSection("Points", tables=[table]),
        PageSection("Curves", charts=_charts(report["axis"], report["points"], knee)),
    ]


def _charts(axis: str, points: Sequence[JsonObject], knee: int | None) -> list[go.Figure]:
    from jitney.engine.report import figures

    def column(name: str) -> list[Any]:
        return [point[name] for point in points]

    unit, values, throughput = _UNITS[axis], column(axis), column("output_tok_s")
    waits = {"p50": column("ttft_p50_s"), "p99": column("ttft_p99_s")}
    return [
        figures.curve("Throughput", unit, "output tokens/s", values, throughput, knee),
        figures.waits_over(unit, values, waits, [_grew(point) for point in points]),
        figures.curve("Between tokens, p99", unit, "s", values, column("itl_p99_s"), knee),
        figures.curve(
            "What throughput costs in latency",
            "output tokens/s",
            "end to end p99, s",
            throughput,
            column("e2e_p99_s"),
            knee,
        ),
    ]
