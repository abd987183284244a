"""`jitney bench sweep`: the same traffic at growing concurrency, rate or load, in this process or
at an endpoint.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from jitney.engine.bench.sweep import knee_of, point_of
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
from jitney.engine.cli.bench_serve import ENOUGH_FOR_P99, add_target, target_from
from jitney.engine.cli.flags import Parser, add_settings, config_from
from jitney.engine.errors import ConfigError
from jitney.engine.machine import cpu_name
from jitney.engine.simulation.workload import Arrival
from jitney.engine.telemetry.backlog import Backlog, backlog_of
from jitney.engine.telemetry.summary import RequestTimes, summarise

if TYPE_CHECKING:
    from jitney.engine.bench.online import EngineAbout

DEFAULT_CONCURRENCIES = "1,2,4,8,16,32"
#: Requests at a point unless told otherwise: enough for a p99 where requests come at times of their
#: own.
CLOSED_REQUESTS, OPEN_REQUESTS = 32, 128
STEEPENS = "the knee is where the p99 end-to-end time steepens (Kneedle, Satopää et al. 2011)"
METHODS = {
    "concurrency": "the knee is where output tokens/s flatten (Kneedle, Satopää et al. 2011)",
    "rate": STEEPENS,
    "load": f"load 1 is what continuous batching served with a full queue; {STEEPENS}",
}
UNITS = {
    "concurrency": "requests open at a time",
    "rate": "requests a second",
    "load": "share of what continuous batching can serve",
}
#: Told how many requests have ended, of how many.
Watch = Callable[[int, int], None]
#: Makes the arrivals of one point and measures them: (axis value, told how far it is) -> figures.
Measure = Callable[[float, Watch], dict[str, Any]]


def run(arguments: Sequence[str]) -> int:
    """Measure every point, print the curve and mark its knee; exit status 0."""
    known = make_parser().parse(arguments)
    check_writable(known, "json", "html")
    check_numbers(known, warmup=0, timeout_s=0.001, requests=1, capacity_streams=0)
    slo_from(known)
    axis, values = axis_of(known)
    traffic_at(known, axis, values[0])  # bad flags are told before anything is loaded
    report = online(known, axis, values) if known.url else offline(known, axis, values)
    knee = knee_of(axis, report["points"])
    last = values[-1] * (report["capacity_req_s"] or 1.0)
    report |= {
        "axis": axis,
        "knee": None if knee is None else report["points"][knee][axis],
        "method": METHODS[axis],
        "target": known.url or "this process",
        "client_machine": cpu_name(),
        "traffic": describe_traffic(
            asked_at(known, axis, last),
            traffic_at(known, axis, last),
            0.0 if axis == "concurrency" else last,
        ),
    }
    deliver(known, report, knee)
    return 0


def make_parser() -> Parser:
    parser = Parser(
        "bench sweep",
        "Throughput and latency over concurrency, rate or load: of an engine in this "
        "process, or of an endpoint with --url.",
    )
    add = parser.add_argument_group("sweep").add_argument
    add(
        "--concurrencies",
        metavar="A,B,...",
        help=f"requests open at a time: one point each, as closed loops [{DEFAULT_CONCURRENCIES}]",
    )
    add(
        "--rates",
        metavar="A,B,...",
        help="requests a second instead: one point each, as --arrivals says",
    )
    add(
        "--loads",
        metavar="A,B,...",
        help="rates as shares of what continuous batching can serve, which is measured "
        "first; 0.25,0.5,0.75,0.9,1.1 shows how p99 depends on the load",
    )
    add(
        "--capacity-streams",
        type=int,
        default=0,
        metavar="N",
        help="for --loads with --url: requests open while the "
        "capacity is measured; 0: twice the server's seats, 64 where it does not list them [0]",
    )
    add("--warmup", type=int, default=8, metavar="N", help="short requests before each point [8]")
    add_target(parser, required=False)
    add_traffic(
        parser,
        requests=CLOSED_REQUESTS,
        arrivals="poisson",
        told=f"{CLOSED_REQUESTS} and four for each open "
        f"one; with --rates and --loads {OPEN_REQUESTS}",
    )
    parser.set_defaults(requests=None)
    add_report(parser)
    add_settings(parser, ("model", "engine"))
    return parser


def axis_of(known: argparse.Namespace) -> tuple[str, list[float]]:
    """What grows, and its values, ascending."""
    given = [name for name in ("concurrencies", "rates", "loads") if getattr(known, name)]
    if len(given) > 1:
        raise ConfigError(f"give --{given[0]} or --{given[1]}, not both")
    if known.trace:
        raise ConfigError("a trace has its own times: --trace cannot be swept")
    if known.capacity_streams and not (known.loads and known.url):
        raise ConfigError("--capacity-streams is for --loads with --url")
    if known.rates or known.loads:
        name = given[0]
        if known.arrivals == "closed":
            raise ConfigError(f"--{name} needs --arrivals poisson or gamma")
        return name.removesuffix("s"), numbers(f"--{name}", getattr(known, name), float)
    return "concurrency", numbers(
        "--concurrencies", known.concurrencies or DEFAULT_CONCURRENCIES, int
    )


def numbers(flag: str, text: str, kind: type) -> list[float]:
    """Ascending positive numbers from a list with commas."""
    try:
        values = sorted({kind(word) for word in text.split(",") if word.strip()})
    except ValueError:
        values = []
    if not values or not 0 < values[0] <= values[-1] < float("inf"):
        raise ConfigError(
            f"{flag}: must be positive {'whole ' if kind is int else ''}numbers separated by commas"
        )
    return values


def traffic_at(known: argparse.Namespace, axis: str, value: float) -> list[Arrival]:
    """The requests of one point, where `value` requests are open or come a second: the same lengths
    at every point, more of them at a high concurrency."""
    return traffic_from(asked_at(known, axis, value), 0.0 if axis == "concurrency" else value)


def asked_at(known: argparse.Namespace, axis: str, value: float) -> argparse.Namespace:
    """The traffic flags as they hold for one point."""
    if axis == "concurrency":
        requests = max(known.requests or CLOSED_REQUESTS, 4 * int(value))
        changed = {"arrivals": "closed", "requests": requests}
    else:
        changed = {"requests": known.requests or OPEN_REQUESTS}
    return argparse.Namespace(**vars(known) | changed)


def offline(known: argparse.Namespace, axis: str, values: Sequence[float]) -> dict[str, Any]:
    """All points on an engine in this process, with as many seats as the highest concurrency unless
    told otherwise.
    """
    from jitney.engine.bench.compare import capacity
    from jitney.engine.bench.offline import Bench
    from jitney.engine.cli.display import load_llm

    if axis == "concurrency" and "max_seats" not in vars(known):
        known.max_seats = str(int(values[-1]))
    config = config_from(known)
    llm = load_llm(config)
    bench = Bench(llm.core, llm.tokenizer.encode)
    first = bench.requests(traffic_at(known, axis, values[0]), known.seed)
    bench.warm_up(first)
    most = None
    if axis == "load":
        with progress() as watch:
            most, _ = capacity(bench, first, config.engine.max_seats, watch)

    def measure(value: float, watch: Watch) -> dict[str, Any]:
        scaled = value * (most or 1.0)
        requests = bench.requests(traffic_at(known, axis, scaled), known.seed)
        concurrency = int(value) if axis == "concurrency" else 0
        run = bench.run(requests, concurrency=concurrency, watch=watch)
        return run.figures(slo_from(known), known.price_per_hour) | queue_of(axis, run.times)

    points = points_of(axis, values, most, measure)
    info = llm.info
    llm.close()
    return {
        "points": points,
        "capacity_req_s": most,
        "engine": {
            "version": info.version,
            "device": info.device,
            "platform": info.platform,
            "kernels": info.kernels,
            "dtype": info.dtype,
            "policy": info.policy,
        },
    }


def online(known: argparse.Namespace, axis: str, values: Sequence[float]) -> dict[str, Any]:
    """All points at the endpoint."""
    from jitney.engine.bench.online import EngineAbout, capacity_at
    from jitney.engine.bench.online import measure as measure_online

    settings = [name for name in ("max_seats", "policy", "order") if name in vars(known)]
    if settings:
        raise ConfigError(
            f"--{settings[0].replace('_', '-')} is the server's business: leave it out with --url"
        )
    target = target_from(known)
    about = EngineAbout()
    most = None
    if axis == "load":
        with progress() as watch:
            most = asyncio.run(
                capacity_at(
                    target,
                    traffic_at(known, axis, values[0]),
                    streams=known.capacity_streams,
                    warmup=known.warmup,
                    watch=lambda done, total: watch("capacity", done, total),
                )
            )

    def measure(value: float, watch: Watch) -> dict[str, Any]:
        nonlocal about
        closed = axis == "concurrency"
        found = asyncio.run(
            measure_online(
                target,
                traffic_at(known, axis, value * (most or 1.0)),
                concurrency=int(value) if closed else 0,
                closed=closed,
                warmup=known.warmup,
                watch=watch,
            )
        )
        about, load = found.about, found.load
        figures = summarise(
            load.times,
            records=None,
            seats=0,
            seconds=load.seconds,
            slo=slo_from(known),
            price_per_hour=known.price_per_hour,
        )
        return figures | {"client": load.sender.as_json()} | queue_of(axis, load.times)

    points = points_of(axis, values, most, measure)
    return {"points": points, "capacity_req_s": most, "engine": about._asdict()}


def queue_of(axis: str, times: Sequence[RequestTimes]) -> dict[str, Any]:
    """How the queue went, None for a closed loop: there it cannot grow."""
    backlog = None if axis == "concurrency" else backlog_of(times)
    return {"backlog": None if backlog is None else msgspec.to_builtins(backlog)}


def points_of(
    axis: str, values: Sequence[float], capacity: float | None, measure: Measure
) -> list[dict[str, Any]]:
    """One measured point for each value, with the run's figures in it; capacity: requests a second
    at load 1.
    """
    points = []
    with progress() as watch:
        for value in values:
            name = f"{axis} {value:g}"
            figures = measure(value, lambda done, total, name=name: watch(name, done, total))
            point = {axis: value, **point_of(figures), "figures": figures}
            if capacity is not None:
                point["rate"] = value * capacity
            points.append(point)
    return points


def deliver(known: argparse.Namespace, report: Mapping[str, Any], knee: int | None) -> None:
    """Print the curve and write the files that were asked for."""
    from jitney.engine.report.tables import print_table

    if known.html:
        _write_html(known, report, knee)
    if known.json:
        write_json(known.json, report)
    if known.json == "-":
        return
    for line in summary(report):
        print(line)
    print_table(curve_table(report, knee))


def summary(report: Mapping[str, Any]) -> list[str]:
    """What was swept on what, and whatever casts doubt on the figures."""
    lines = [
        f"{report['target']}; {engine_line(report)}",
        f"{traffic_line(report['traffic'])} (the last point)",
        report["method"],
    ]
    if report["capacity_req_s"] is not None:
        lines.append(f"load 1: {report['capacity_req_s']:.3g} requests a second")
    points = report["points"]
    fewest = min(point["figures"]["served"] for point in points)
    if fewest < ENOUGH_FOR_P99:
        lines.append(
            f"p99 of {fewest} requests is nearly the slowest of them: give more --requests"
        )
    lines += [
        f"{report['axis']} {point[report['axis']]:g}: {Backlog(**point['figures']['backlog'])}"
        for point in points
        if grew(point)
    ]
    failed = sum(point["figures"]["requests"] - point["figures"]["served"] for point in points)
    if failed:
        lines.append(f"failed requests: {failed}, in no percentile")
    clients = [point["figures"]["client"] for point in points if "client" in point["figures"]]
    if clients:
        lines.append(
            f"this client used at most {max(client['cpu_share'] for client in clients):.0%} of a "
            "core"
        )
    return lines + sorted({str(client["trouble"]) for client in clients if client["trouble"]})


def engine_line(report: Mapping[str, Any]) -> str:
    """What the engine runs on; beside it, for an endpoint, what this client runs on."""
    from jitney.engine.bench.online import EngineAbout

    facts = dict(report["engine"])
    policy = facts.pop("policy", None)
    about: EngineAbout = EngineAbout(**facts)
    if policy is not None:
        return f"{about}, {policy} batching"
    return f"{about}; client's machine: {report['client_machine']}"


def grew(point: Mapping[str, Any]) -> bool:
    """True if the point's queue grew for the whole run."""
    backlog = point["figures"]["backlog"]
    return backlog is not None and backlog["grew"]


def curve_table(report: Mapping[str, Any], knee: int | None) -> Any:
    """The curve, the knee marked."""
    from jitney.engine.report import tables

    axis = report["axis"]
    heads = ["open" if axis == "concurrency" else axis]
    if axis == "load":
        heads.append("rate")
    heads += [
        "output tok/s",
        "req/s",
        "TTFT p50",
        "TTFT p99",
        "ITL p50",
        "ITL p99",
        "e2e p50",
        "e2e p99",
    ]
    if axis != "concurrency":
        heads.append("queue")
    rows = []
    for number, point in enumerate(report["points"]):
        row = [f"{point[axis]:g}{' knee' if number == knee else ''}"]
        if axis == "load":
            row.append(f"{point['rate']:.3g}")
        row += [tables.number(point["output_tok_s"]), tables.number(point["req_s"])]
        row += [
            tables.duration(point[f"{what}_{quantile}_s"])
            for what in ("ttft", "itl", "e2e")
            for quantile in ("p50", "p99")
        ]
        if axis != "concurrency":
            row.append(
                "grew" if grew(point) else "did not grow" if point["figures"]["backlog"] else ""
            )
        rows.append(row)
    return tables.Table(heads, rows)


def _write_html(known: argparse.Namespace, report: Mapping[str, Any], knee: int | None) -> None:
    """The HTML report."""
    from jitney.engine.report.figures import curve, waits_over
    from jitney.engine.report.page import Section, write_page

    axis, points = report["axis"], report["points"]
    unit = UNITS[axis]

    def chart(title: str, y: str, name: str, x: str = axis, x_title: str = unit) -> Any:
        pairs = [
            (point[x], point[name])
            for point in points
            if point[x] is not None and point[name] is not None
        ]
        return curve(title, x_title, y, pairs, knee if len(pairs) == len(points) else None)

    waits = waits_over(
        unit,
        [point[axis] for point in points],
        {
            quantile: [point[f"ttft_{quantile}_s"] for point in points]
            for quantile in ("p50", "p99")
        },
        [grew(point) for point in points],
    )
    charts = [
        chart("Throughput", "output tokens/s", "output_tok_s"),
        waits,
        chart("Between tokens, p99", "s", "itl_p99_s"),
        chart(
            "What throughput costs in latency",
            "end to end p99, s",
            "e2e_p99_s",
            "output_tok_s",
            "output tokens/s",
        ),
    ]
    write_page(
        known.html,
        f"Throughput and latency over {axis}",
        summary(report),
        [Section("Points", tables=[curve_table(report, knee)]), Section("Curves", charts=charts)],
    )
