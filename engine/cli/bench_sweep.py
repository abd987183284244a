"""`jitney bench sweep`: the same traffic at growing concurrency or rate, in this process or at an endpoint."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from jitney.engine.cli.bench_serve import add_target, target_from
from jitney.engine.cli.flags import Parser, add_settings, config_from
from jitney.engine.errors import ConfigError
from jitney.engine.figures import summarise
from jitney.engine.workload import Arrival

DEFAULT_CONCURRENCIES = "1,2,4,8,16,32"
METHODS = {"concurrency": "the knee is where output tokens/s flatten (Kneedle, Satopää et al. 2011)",
           "rate": "the knee is where the p99 end-to-end time steepens (Kneedle, Satopää et al. 2011)"}
#: Makes the arrivals of one point and measures them: (axis value, told how far it is) -> figures.
Measure = Callable[[float, Callable[[int, int], None]], dict[str, Any]]


def run(arguments: Sequence[str]) -> int:
    """Measure every point, print the curve and mark its knee; exit status 0."""
    known = make_parser().parse(arguments)
    check_writable(known, "json", "html")
    check_numbers(known, warmup=0, timeout_s=0.001)
    slo_from(known)
    axis, values = axis_of(known)
    traffic_at(known, axis, values[0])  # bad flags are told before anything is loaded
    points = online_points(known, axis, values) if known.url else offline_points(known, axis, values)
    knee = knee_of(axis, points)
    report = {"axis": axis, "points": points, "knee": None if knee is None else points[knee][axis],
              "method": METHODS[axis], "target": known.url or "this process",
              "traffic": describe_traffic(asked_at(known, axis, values[-1]), traffic_at(known, axis, values[-1]),
                                          values[-1] if axis == "rate" else 0.0)}
    deliver(known, report, knee)
    return 0


def make_parser() -> Parser:
    parser = Parser("bench sweep", "Throughput and latency over concurrency, or over rate: of an engine in this "
                    "process, or of an endpoint with --url.")
    add = parser.add_argument_group("sweep").add_argument
    add("--concurrencies", metavar="A,B,...", help="requests open at a time: one point each, as closed loops "
        f"[{DEFAULT_CONCURRENCIES}]")
    add("--rates", metavar="A,B,...", help="requests a second instead: one point each, as --arrivals says")
    add("--warmup", type=int, default=8, metavar="N", help="short requests before each point [8]")
    add_target(parser, required=False)
    add_traffic(parser, requests=32, arrivals="poisson")
    add_report(parser)
    add_settings(parser, ("model", "engine"))
    return parser


def axis_of(known: argparse.Namespace) -> tuple[str, list[float]]:
    """What grows, and its values, ascending."""
    if known.concurrencies and known.rates:
        raise ConfigError("give --concurrencies or --rates, not both")
    if known.trace:
        raise ConfigError("a trace has its own times: --trace cannot be swept")
    if known.rates:
        if known.arrivals == "closed":
            raise ConfigError("--rates needs --arrivals poisson or gamma")
        return "rate", numbers("--rates", known.rates, float)
    return "concurrency", numbers("--concurrencies", known.concurrencies or DEFAULT_CONCURRENCIES, int)


def numbers(flag: str, text: str, kind: type) -> list[float]:
    """Ascending positive numbers from a list with commas."""
    try:
        values = sorted({kind(word) for word in text.split(",") if word.strip()})
    except ValueError:
        values = []
    if not values or not 0 < values[0] <= values[-1] < float("inf"):
        raise ConfigError(f"{flag}: must be positive {'whole ' if kind is int else ''}numbers separated by commas")
    return values


def traffic_at(known: argparse.Namespace, axis: str, value: float) -> list[Arrival]:
    """The requests of one point: the same lengths at every point, more of them at a high concurrency."""
    return traffic_from(asked_at(known, axis, value), value if axis == "rate" else 0.0)


def asked_at(known: argparse.Namespace, axis: str, value: float) -> argparse.Namespace:
    """The traffic flags as they hold for one point."""
    changed = {"arrivals": "closed", "requests": max(known.requests, 4 * int(value))} if axis == "concurrency" else {}
    return argparse.Namespace(**vars(known) | changed)


def offline_points(known: argparse.Namespace, axis: str, values: Sequence[float]) -> list[dict[str, Any]]:
    """All points on an engine in this process, with as many seats as the highest concurrency unless told otherwise."""
    from jitney.engine.bench.offline import Bench
    from jitney.engine.cli.display import load_llm

    if axis == "concurrency" and "max_seats" not in vars(known):
        known.max_seats = str(int(values[-1]))
    llm = load_llm(config_from(known))
    bench = Bench(llm.core, llm.tokenizer.encode)
    bench.warm_up(bench.requests(traffic_at(known, axis, values[0]), known.seed))

    def measure(value: float, watch: Callable[[int, int], None]) -> dict[str, Any]:
        requests = bench.requests(traffic_at(known, axis, value), known.seed)
        concurrency = int(value) if axis == "concurrency" else 0
        return bench.run(requests, concurrency=concurrency, watch=watch).figures(slo_from(known), known.price_per_hour)

    points = points_of(axis, values, measure)
    llm.close()
    return points


def online_points(known: argparse.Namespace, axis: str, values: Sequence[float]) -> list[dict[str, Any]]:
    """All points at the endpoint."""
    from jitney.engine.bench.online import measure as measure_online

    settings = [name for name in ("max_seats", "policy", "order") if name in vars(known)]
    if settings:
        raise ConfigError(f"--{settings[0].replace('_', '-')} is the server's business: leave it out with --url")

    def measure(value: float, watch: Callable[[int, int], None]) -> dict[str, Any]:
        closed = axis == "concurrency"
        load = asyncio.run(measure_online(
            target_from(known), traffic_at(known, axis, value), concurrency=int(value) if closed else 0, closed=closed,
            warmup=known.warmup, watch=watch)).load
        figures = summarise(load.times, records=None, seats=0, seconds=load.seconds, slo=slo_from(known),
                            price_per_hour=known.price_per_hour)
        return figures | {"client": load.sender.as_json()}

    return points_of(axis, values, measure)


def points_of(axis: str, values: Sequence[float], measure: Measure) -> list[dict[str, Any]]:
    """One measured point for each value, with the run's figures in it."""
    points = []
    with progress() as watch:
        for value in values:
            name = f"{axis} {value:g}"
            figures = measure(value, lambda done, total, name=name: watch(name, done, total))
            points.append({axis: value, **point_of(figures), "figures": figures})
    return points


def deliver(known: argparse.Namespace, report: Mapping[str, Any], knee: int | None) -> None:
    """Print the curve and write the files that were asked for."""
    from jitney.engine.bench.tables import print_table

    if known.html:
        write_page(known, report, knee)
    if known.json:
        write_json(known.json, report)
    if known.json == "-":
        return
    for line in summary(report):
        print(line)
    print_table(curve_table(report, knee))


def summary(report: Mapping[str, Any]) -> list[str]:
    """What was swept, and whatever casts doubt on the figures."""
    clients = [point["figures"]["client"] for point in report["points"] if "client" in point["figures"]]
    troubles = {str(client["trouble"]) for client in clients if client["trouble"]}
    failed = sum(point["figures"]["requests"] - point["figures"]["served"] for point in report["points"])
    return [f"{report['target']}; {traffic_line(report['traffic'])} at the last point", report["method"],
            *([f"failed requests: {failed}"] if failed else []), *sorted(troubles)]


def curve_table(report: Mapping[str, Any], knee: int | None) -> Any:
    """The curve, the knee marked."""
    from jitney.engine.bench import tables

    first = "open" if report["axis"] == "concurrency" else "rate"
    heads = [first, "output tok/s", "req/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "e2e p50", "e2e p99"]
    rows = [[f"{point[report['axis']]:g}{' knee' if number == knee else ''}", tables.number(point["output_tok_s"]),
             tables.number(point["req_s"]),
             *(tables.duration(point[f"{what}_{q}_s"]) for what in ("ttft", "itl", "e2e") for q in ("p50", "p99"))]
            for number, point in enumerate(report["points"])]
    return tables.Table(heads, rows)


def write_page(known: argparse.Namespace, report: Mapping[str, Any], knee: int | None) -> None:
    """The HTML report."""
    from jitney.engine.bench.charts import curve
    from jitney.engine.bench.report import Section, write_report

    axis, points = report["axis"], report["points"]
    unit = "requests open at a time" if axis == "concurrency" else "requests a second"

    def chart(title: str, y: str, name: str, x: str = axis, x_title: str = unit) -> Any:
        pairs = [(point[x], point[name]) for point in points if point[x] is not None and point[name] is not None]
        return curve(title, x_title, y, pairs, knee if len(pairs) == len(points) else None)

    charts = [chart("Throughput", "output tokens/s", "output_tok_s"),
              chart("Time to first token, p99", "s", "ttft_p99_s"),
              chart("Between tokens, p99", "s", "itl_p99_s"),
              chart("What throughput costs in latency", "end to end p99, s", "e2e_p99_s", "output_tok_s",
                    "output tokens/s")]
    write_report(known.html, f"Throughput and latency over {axis}", summary(report),
                 [Section("Points", tables=[curve_table(report, knee)]), Section("Curves", charts=charts)])
