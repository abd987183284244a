"""`jitney bench sweep`: measures the same traffic at growing concurrency, rate or load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.machine import cpu_name
from jitney.engine.common.requests import JsonObject
from jitney.engine.common.trace import Arrival
from jitney.engine.config import Command, Flag, FlagGroup
from jitney.engine.lab.backlog import QueueGrowth
from jitney.engine.lab.bench.online import EngineAbout, OnlineBench
from jitney.engine.lab.commands.bench_flags import TrafficArguments, progress, traffic_line
from jitney.engine.lab.commands.bench_serve import ENOUGH_FOR_P99, EndpointArguments
from jitney.engine.lab.figures import cell

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from jitney.engine.common.reports.page import Page, Table
    from jitney.engine.lab.bench.sweep import Target

_DEFAULT_CONCURRENCIES = "1,2,4,8,16,32"
#: Default requests of a point in a closed loop and in an open loop, where they suffice for a p99.
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
        least=0,
    ),
    Flag.whole("--warmup", "short requests before each point", 8, least=0),
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
#: Head of a column -> name of a run's figure.
_COLUMNS = {
    "output tok/s": "output_tok_s",
    "req/s": "req_s",
    **{
        f"{head} {quantile}": f"{name}_{quantile}_s"
        for name, head in (("ttft", "TTFT"), ("itl", "ITL"), ("e2e", "e2e"))
        for quantile in ("p50", "p99")
    },
    "TTFT p99.9": "ttft_p999_s",
    "ITL p99.9": "itl_p999_s",
}
#: Settings that belong to a server, so they are refused for an endpoint.
_OF_A_SERVER = ("max_seats", "policy", "order")


def bench_sweep(arguments: Sequence[str]) -> int:
    """Measure every point, print the curve and mark its knee; exit status 0."""
    from jitney.engine.lab.bench.sweep import knee_of, sweep

    args = _COMMAND.parse_as(EndpointArguments, arguments)
    _check(args)
    axis, values = _axis_from(args)
    arrivals_at = partial(_arrivals_at, args, axis)
    arrivals_at(values[0])  # reports invalid flags before the model is loaded
    figures_of = partial(args.figures_of, closed=axis == "concurrency")
    with _opened(args, axis, values) as target, progress() as watch:
        capacity, points = sweep(target, axis, values, arrivals_at, figures_of, watch)
        engine = target.describe()
    last = values[-1] * (capacity or 1.0)
    knee = knee_of(axis, points)
    report = {
        "points": points,
        "capacity_req_s": capacity,
        "engine": engine,
        "axis": axis,
        "method": _METHODS[axis],
        "target": args.url or "this process",
        "client_machine": cpu_name(),
        "traffic": _args_at(args, axis, last).describe(arrivals_at(last), _rate_at(axis, last)),
        "knee": None if knee is None else points[knee][axis],
    }
    args.deliver(report, partial(_page, report, knee))
    return 0


def _check(args: TrafficArguments) -> None:
    """Raise ConfigError for flags that do not fit the axis."""
    if args.trace:
        raise ConfigError("a trace has its own times: --trace cannot be swept")
    if args.capacity_streams and not (args.loads and args.url):
        raise ConfigError("--capacity-streams is for --loads with --url")


#: Flag with an axis' values -> the axis.
_AXES = {"concurrencies": "concurrency", "rates": "rate", "loads": "load"}


def _axis_from(args: TrafficArguments) -> tuple[str, list[float]]:
    flag_names = [name for name in _AXES if getattr(args, name)] or ["concurrencies"]
    if len(flag_names) > 1:
        raise ConfigError(f"give --{flag_names[0]} or --{flag_names[1]}, not both")
    (name,) = flag_names
    if name != "concurrencies" and args.arrivals == "closed":
        raise ConfigError(f"--{name} needs --arrivals poisson or gamma")
    kind = int if name == "concurrencies" else float
    return _AXES[name], sorted(args.numbers_of(name, kind, _DEFAULT_CONCURRENCIES))


def _arrivals_at(args: TrafficArguments, axis: str, value: float) -> list[Arrival]:
    """The requests of one point, with `value` open requests or requests a second. Lengths are the
    same at every point; a high concurrency has more requests.
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


@contextmanager
def _opened(args: EndpointArguments, axis: str, values: Sequence[float]) -> Iterator[Target]:
    """The target. By default, an engine here has as many seats as the highest concurrency."""
    from jitney.engine.core import load_llm
    from jitney.engine.lab.bench.sweep import EndpointTarget, EngineTarget

    if args.url:
        server_flags = [args.flag_of(name) for name in _OF_A_SERVER if name in vars(args)]
        if server_flags:
            raise ConfigError(
                f"{server_flags[0]} is the server's business: leave it out with --url"
            )
        yield EndpointTarget(OnlineBench(args.endpoint(), args.warmup), args.capacity_streams)
        return
    if axis == "concurrency" and "max_seats" not in vars(args):
        args.max_seats = str(int(values[-1]))
    llm = load_llm(args.load_config())
    yield EngineTarget(llm, _arrivals_at(args, axis, values[0]), args.seed)
    llm.close()


def _page(report: JsonObject, knee: int | None, charts: bool) -> Page:
    from jitney.engine.common.reports.page import Page, PageSection

    curves = _charts(report["axis"], report["points"], knee) if charts else []
    title = f"Throughput and latency over {report['axis']}"
    section = PageSection("Points", tables=[_curve_table(report, knee)], charts=curves)
    return Page(title, list(_summary(report)), [section])


def _summary(report: JsonObject) -> Iterator[str]:
    axis, points = report["axis"], report["points"]
    yield f"{report['target']}; {_engine_line(report)}"
    yield f"{traffic_line(report['traffic'])} (the last point)"
    yield report["method"]
    if report["capacity_req_s"] is not None:
        yield f"load 1: {report['capacity_req_s']:.3g} requests a second"
    figures = [point["figures"] for point in points]
    least = min(each["served"] for each in figures)
    if least < ENOUGH_FOR_P99:
        yield f"p99 of {least} requests is nearly the slowest of them: give more --requests"
    for point in filter(_grew, points):
        yield f"{axis} {point[axis]:g}: {QueueGrowth(**point['figures']['backlog'])}"
    failed = sum(each["requests"] - each["served"] for each in figures)
    if failed:
        yield f"failed requests: {failed}, in no percentile"
    clients = [each["client"] for each in figures if "client" in each]
    if clients:
        busiest = max(client["cpu_share"] for client in clients)
        yield f"this client used at most {busiest:.0%} of a core"
    yield from sorted({client["trouble"] for client in clients} - {None})


def _engine_line(report: JsonObject) -> str:
    """The engine's device, and for an endpoint also this client's machine."""
    about = dict(report["engine"])
    policy = about.pop("policy", None)
    if policy is not None:
        return f"{EngineAbout(**about)}, {policy} batching"
    return f"{EngineAbout(**about)}; client's machine: {report['client_machine']}"


def _grew(point: JsonObject) -> bool:
    backlog = point["figures"]["backlog"]
    return backlog is not None and backlog["grew"]


def _curve_table(report: JsonObject, knee: int | None) -> Table:
    from jitney.engine.common.reports.page import Table

    cells = [_cells(report["axis"], point) for point in report["points"]]
    rows = [list(each.values()) for each in cells]
    if knee is not None:
        rows[knee][0] += " knee"
    return Table(list(cells[0]), rows)


def _cells(axis: str, point: JsonObject) -> dict[str, str]:
    from jitney.engine.lab.bench.tables import queue

    figures = point["figures"]
    cells = {"open" if axis == "concurrency" else axis: f"{point[axis]:g}"}
    if axis == "load":
        cells["rate"] = f"{point['rate']:.3g}"
    cells |= {head: cell(figures, name) for head, name in _COLUMNS.items()}
    if axis != "concurrency":
        cells["queue"] = queue(figures["backlog"], grew="grew")
    return cells


#: Figure of a point -> title of its axis.
_AXIS_TITLES = {
    **_UNITS,
    "output_tok_s": "output tokens/s",
    "itl_p99_s": "s",
    "e2e_p99_s": "end to end p99, s",
}


def _charts(axis: str, points: Sequence[JsonObject], knee: int | None) -> list[go.Figure]:
    from jitney.engine.lab.bench.charts import curve, waits_over

    def column(name: str) -> list[float | None]:
        return [point[name] for point in points]

    def over(x: str, title: str, y: str) -> go.Figure:
        return curve(title, _AXIS_TITLES[x], _AXIS_TITLES[y], column(x), column(y), knee)

    at = [point[axis] for point in points]
    waits = {quantile: column(f"ttft_{quantile}_s") for quantile in ("p50", "p99")}
    return [
        over(axis, "Throughput", "output_tok_s"),
        waits_over(_UNITS[axis], at, waits, list(map(_grew, points))),
        over(axis, "Between tokens, p99", "itl_p99_s"),
        over("output_tok_s", "What throughput costs in latency", "e2e_p99_s"),
    ]
