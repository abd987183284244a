"""`jitney bench sweep`: the same traffic at growing concurrency, rate or load, in this process or
at an endpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.machine import cpu_name
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.common.terminal import visible
from jitney.engine.common.trace import Arrival
from jitney.engine.config import Command, Flag, FlagGroup
from jitney.engine.lab.backlog import QueueGrowth
from jitney.engine.lab.bench.online import EngineAbout
from jitney.engine.lab.bench.sweep import knee_of, point_of
from jitney.engine.lab.commands.bench_flags import TrafficArguments, progress, traffic_line
from jitney.engine.lab.commands.bench_serve import ENOUGH_FOR_P99, EndpointArguments

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from jitney.dashboard import PageSection, Table
    from jitney.engine.lab.bench.load import Watch
    from jitney.engine.lab.bench.offline import NamedWatch, PromptedArrival

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
_COMMAND = Command(
    "bench sweep",
    "Throughput and latency over concurrency, rate or load: of an engine in this "
    "process, or of an endpoint with --url.",
    (
        FlagGroup(_FLAGS, "sweep"),
        EndpointArguments.endpoint_flags(model=False),
        TrafficArguments.traffic_flags(requests=None, arrivals="poisson", shown=_REQUESTS_HELP),
        TrafficArguments.report_flags(),
    ),
    sections=("model", "engine"),
    leave_out=Command.ONLY_SERVED,
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
#: Columns of what one in a thousand is slower than, by a run's figures.
_TAILS = {"ttft_s": "TTFT p99.9", "itl_s": "ITL p99.9"}
#: And of the speeds.
_SPEEDS = {"output_tok_s": "output tok/s", "req_s": "req/s"}
#: What of an engine in this process stands in the report.
_FACTS = ("version", "device", "platform", "kernels", "dtype", "policy")
#: Settings that an endpoint has already.
_OF_A_SERVER = ("max_seats", "policy", "order")


def bench_sweep(arguments: Sequence[str]) -> int:
    """Measure every point, print the curve and mark its knee; exit status 0."""
    args = _COMMAND.parse_as(EndpointArguments, arguments)
    _check(args)
    axis, values = _axis_from(args)
    _arrivals_at(args, axis, values[0])  # bad flags are reported before anything is loaded
    engine = _AtEndpoint(args) if args.url else _InProcess(args, axis, values)
    report = _sweep(args, axis, values, engine)
    _deliver(args, report, knee_of(axis, report["points"]))
    return 0


def _check(args: TrafficArguments) -> None:
    """Raise ConfigError for flags that no axis could go with."""
    args.check_writable("json", "html")
    args.check_numbers(warmup=0, timeout_s=0.001, requests=1, capacity_streams=0)
    args.slo()
    if args.trace:
        raise ConfigError("a trace has its own times: --trace cannot be swept")
    if args.capacity_streams and not (args.loads and args.url):
        raise ConfigError("--capacity-streams is for --loads with --url")


#: The flag that gives an axis' values -> the axis.
_AXES = {"concurrencies": "concurrency", "rates": "rate", "loads": "load"}


def _axis_from(args: TrafficArguments) -> tuple[str, list[float]]:
    """What grows, and its values, ascending."""
    given = [name for name in _AXES if getattr(args, name)] or ["concurrencies"]
    if len(given) > 1:
        raise ConfigError(f"give --{given[0]} or --{given[1]}, not both")
    (name,) = given
    if name != "concurrencies" and args.arrivals == "closed":
        raise ConfigError(f"--{name} needs --arrivals poisson or gamma")
    return _AXES[name], _values_of(args, name)


def _values_of(args: TrafficArguments, name: str) -> list[float]:
    kind = int if name == "concurrencies" else float
    return sorted(args.numbers_of(name, kind, _DEFAULT_CONCURRENCIES))


def _arrivals_at(args: TrafficArguments, axis: str, value: float) -> list[Arrival]:
    """The requests of one point, where `value` requests are open or come a second: the same lengths
    at every point, more of them at a high concurrency.
    """
    return _args_at(args, axis, value).draw(_rate_at(axis, value))


def _rate_at(axis: str, value: float) -> float:
    return 0.0 if axis == "concurrency" else value


def _args_at(args: TrafficArguments, axis: str, value: float) -> TrafficArguments:
    changes = {"requests": args.requests or _OPEN_REQUESTS}
    if axis == "concurrency":
        requests = max(args.requests or _CLOSED_REQUESTS, 4 * int(value))
        changes = {"arrivals": "closed", "requests": requests}
    return args.changed(**changes)


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


def _sweep(args: TrafficArguments, axis: str, values: Sequence[float], engine: _Engine) -> JsonDict:
    """Measure every point; everything but the knee, ready for JSON."""
    with progress() as watch:
        capacity = _capacity(args, axis, values[0], engine, watch)
        steps = _Steps(args, axis, capacity, engine, watch)
        points = [steps.measured(value) for value in values]
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


def _capacity(
    args: TrafficArguments, axis: str, least: float, engine: _Engine, watch: NamedWatch
) -> float | None:
    """Requests a second at load 1; None where nothing is a share of it."""
    if axis != "load":
        return None
    return engine.capacity(_arrivals_at(args, axis, least), partial(watch, "capacity"))


@dataclass(frozen=True, slots=True)
class _Steps:
    """What the points of a sweep have in common."""

    args: TrafficArguments
    axis: str
    capacity: float | None
    engine: _Engine
    watch: NamedWatch

    def measured(self, value: float) -> JsonDict:
        """One point."""
        arrivals = _arrivals_at(self.args, self.axis, value * (self.capacity or 1.0))
        concurrency = int(value) if self.axis == "concurrency" else 0
        watch = partial(self.watch, f"{self.axis} {value:g}")
        figures = self.engine.measure(arrivals, concurrency, watch)
        point = {self.axis: value, **point_of(figures), "figures": figures}
        return point | self._rate(value)

    def _rate(self, value: float) -> JsonDict:
        return {} if self.capacity is None else {"rate": value * self.capacity}


def _last_traffic(args: TrafficArguments, axis: str, value: float) -> JsonDict:
    arrivals = _arrivals_at(args, axis, value)
    return _args_at(args, axis, value).describe(arrivals, _rate_at(axis, value))


class _InProcess:
    """An engine in this process, with as many seats as the highest concurrency unless told
    otherwise.
    """

    def __init__(self, args: TrafficArguments, axis: str, values: Sequence[float]):
        from jitney.engine.core import load_llm
        from jitney.engine.lab.bench.offline import OfflineBench

        if axis == "concurrency" and "max_seats" not in vars(args):
            args.max_seats = str(int(values[-1]))
        self._args = args
        self._llm = load_llm(args.load_config())
        self._bench = OfflineBench(self._llm.core, self._llm.tokenizer.encode)
        self._bench.warm_up(self._requests(_arrivals_at(args, axis, values[0])))

    def _requests(self, arrivals: list[Arrival]) -> list[PromptedArrival]:
        return self._bench.requests(arrivals, self._args.seed)

    def capacity(self, first: list[Arrival], watch: Watch) -> float:
        rate, _ = self._bench.capacity(
            first,
            self._bench.limits.max_seats,
            seed=self._args.seed,
            watch=lambda name, *counts: watch(*counts),
        )
        return rate

    def measure(self, arrivals: list[Arrival], concurrency: int, watch: Watch) -> JsonDict:
        run = self._bench.run(self._requests(arrivals), concurrency=concurrency, watch=watch)
        return self._args.figures_of(run, closed=concurrency > 0)

    def close(self) -> dict[str, str]:
        info = self._llm.info.flat()
        self._llm.close()
        return {name: info[name] for name in _FACTS}


class _AtEndpoint:
    """A server elsewhere."""

    def __init__(self, args: EndpointArguments):
        given = [args.flag_of(name) for name in _OF_A_SERVER if name in vars(args)]
        if given:
            raise ConfigError(f"{given[0]} is the server's business: leave it out with --url")
        self._args = args
        self._endpoint = args.endpoint()
        self._about = EngineAbout()

    def capacity(self, first: list[Arrival], watch: Watch) -> float:
        from jitney.engine.lab.bench.online import OnlineBench, Sending

        sending = Sending(0, True, self._args.warmup, watch)
        streams = self._args.capacity_streams
        return asyncio.run(OnlineBench(self._endpoint).capacity(first, streams, sending))

    def measure(self, arrivals: list[Arrival], concurrency: int, watch: Watch) -> JsonDict:
        from jitney.engine.lab.bench.online import OnlineBench, Sending

        sending = Sending(concurrency, concurrency > 0, self._args.warmup, watch)
        online = asyncio.run(OnlineBench(self._endpoint).measure(arrivals, sending))
        self._about = online.about
        figures = self._args.figures_of(online.load, closed=concurrency > 0)
        return figures | {"client": online.load.sender.as_json()}

    def close(self) -> dict[str, str]:
        return self._about._asdict()


def _deliver(args: TrafficArguments, report: JsonDict, knee: int | None) -> None:
    from jitney.dashboard import Page

    axis, points = report["axis"], report["points"]
    report["knee"] = None if knee is None else points[knee][axis]
    table, summary = _curve_table(report, knee), _summary(report)
    if args.html:
        title = f"Throughput and latency over {axis}"
        Page(title, summary, _sections(report, table, knee)).write(args.html)
    if args.write_report(report):
        print(visible("\n".join(summary)))
        table.print()


def _summary(report: JsonObject) -> list[str]:
    return [
        f"{report['target']}; {_engine_line(report)}",
        f"{traffic_line(report['traffic'])} (the last point)",
        report["method"],
        *_capacity_lines(report["capacity_req_s"]),
        *_doubts(report),
        *_client_lines(report["points"]),
    ]


def _capacity_lines(capacity: float | None) -> Iterator[str]:
    if capacity is not None:
        yield f"load 1: {capacity:.3g} requests a second"


def _doubts(report: JsonObject) -> Iterator[str]:
    figures = [point["figures"] for point in report["points"]]
    least = min(each["served"] for each in figures)
    if least < ENOUGH_FOR_P99:
        yield f"p99 of {least} requests is nearly the slowest of them: give more --requests"
    yield from _queues_that_grew(report)
    failed = sum(each["requests"] - each["served"] for each in figures)
    if failed:
        yield f"failed requests: {failed}, in no percentile"


def _queues_that_grew(report: JsonObject) -> Iterator[str]:
    axis = report["axis"]
    for point in filter(_grew, report["points"]):
        yield f"{axis} {point[axis]:g}: {QueueGrowth(**point['figures']['backlog'])}"


def _client_lines(points: Sequence[JsonObject]) -> Iterator[str]:
    clients = list(filter(None, [point["figures"].get("client") for point in points]))
    if clients:
        busiest = max(client["cpu_share"] for client in clients)
        yield f"this client used at most {busiest:.0%} of a core"
    yield from sorted({client["trouble"] for client in clients} - {None})


def _engine_line(report: JsonObject) -> str:
    """What the engine runs on; beside it, for an endpoint, what this client runs on."""
    about = dict(report["engine"])
    policy = about.pop("policy", None)
    if policy is not None:
        return f"{EngineAbout(**about)}, {policy} batching"
    return f"{EngineAbout(**about)}; client's machine: {report['client_machine']}"


def _grew(point: JsonObject) -> bool:
    backlog = point["figures"]["backlog"]
    return backlog is not None and backlog["grew"]


def _curve_table(report: JsonObject, knee: int | None) -> Table:
    from jitney.dashboard import Table

    cells = [_cells(report["axis"], point) for point in report["points"]]
    rows = [list(each.values()) for each in cells]
    if knee is not None:
        rows[knee][0] += " knee"
    return Table(list(cells[0]), rows)


def _cells(axis: str, point: JsonObject) -> dict[str, str]:
    from jitney.dashboard import duration, number, quantile_cell, queue

    cells = _place_cells(axis, point)
    cells |= {head: number(point[name]) for name, head in _SPEEDS.items()}
    cells |= {head: duration(point[name]) for name, head in _LATENCIES.items()}
    for name, head in _TAILS.items():
        cells[head] = quantile_cell(point["figures"][name] or {}, "p999")
    if axis != "concurrency":
        cells["queue"] = queue(point["figures"]["backlog"], grew="grew")
    return cells


def _place_cells(axis: str, point: JsonObject) -> dict[str, str]:
    """Where on the axis the point is."""
    cells = {"open" if axis == "concurrency" else axis: f"{point[axis]:g}"}
    if axis == "load":
        cells["rate"] = f"{point['rate']:.3g}"
    return cells


def _sections(report: JsonObject, table: Table, knee: int | None) -> list[PageSection]:
    from jitney.dashboard import PageSection

    return [
        PageSection("Points", tables=[table]),
        PageSection("Curves", charts=_charts(report["axis"], report["points"], knee)),
    ]


def _charts(axis: str, points: Sequence[JsonObject], knee: int | None) -> list[go.Figure]:
    from jitney.dashboard import waits_over

    shown = _Shown(axis, points, knee)
    waits = {quantile: shown.column(f"ttft_{quantile}_s") for quantile in ("p50", "p99")}
    return [
        shown.curve("Throughput", "output_tok_s"),
        waits_over(_UNITS[axis], shown.column(axis), waits, list(map(_grew, points))),
        shown.curve("Between tokens, p99", "itl_p99_s"),
        shown.curve("What throughput costs in latency", "e2e_p99_s", over="output_tok_s"),
    ]


#: What charts call the figures of a point.
_AXIS_TITLES = {
    **_UNITS,
    "output_tok_s": "output tokens/s",
    "itl_p99_s": "s",
    "e2e_p99_s": "end to end p99, s",
}


@dataclass(frozen=True, slots=True)
class _Shown:
    """The points of a sweep as charts show them."""

    axis: str
    points: Sequence[JsonObject]
    #: Which of them is the knee.
    knee: int | None

    def column(self, name: str) -> list[Any]:
        return [point[name] for point in self.points]

    def curve(self, title: str, name: str, over: str = "") -> go.Figure:
        """A figure of the points over another, or over the axis."""
        from jitney.dashboard import curve

        over = over or self.axis
        x, y = _AXIS_TITLES[over], _AXIS_TITLES[name]
        return curve(title, x, y, self.column(over), self.column(name), self.knee)
