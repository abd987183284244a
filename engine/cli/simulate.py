"""`jitney simulate`: the scheduler and its policies on a virtual clock, on recorded or made-up
traffic.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from jitney.engine.cli.bench_flags import (
    add_report,
    add_traffic,
    check_numbers,
    check_writable,
    slo_from,
    traffic_from,
    write_json,
)
from jitney.engine.cli.flags import Parser, add_settings, config_from
from jitney.engine.config.schema import Config
from jitney.engine.errors import ConfigError
from jitney.engine.simulation.accuracy import (
    COMPARED,
    closed_concurrency,
    errors,
    figure,
    measured_figures,
    measured_requests,
    speed_error,
    verdict,
)
from jitney.engine.simulation.workload import Arrival, TraceLine, read_trace_lines

if TYPE_CHECKING:
    from rich.table import Table

    from jitney.engine.simulation.simulator import EngineShape, SimulatedRun
    from jitney.engine.simulation.step_table import StepTimes

_POLICIES = "static,dynamic,continuous"
_NO_CAP = 2**31 - 1
#: What a server refuses requests by -> the value with which it refuses none.
_CAPS = {
    "max_waiting_requests": _NO_CAP,
    "max_waiting_tokens": _NO_CAP,
    "max_predicted_wait_s": 0.0,
}
#: Settings that say how to run on a real machine.
NOT_SIMULATED = (
    "revision",
    "dtype",
    "weights",
    "memory_gib",
    "kv_dtype",
    "prefix_cache",
    "share_outputs",
    "kernels",
    "compilation_cache",
    "platform",
    "device",
    "tensor_parallel",
)


def run(arguments: Sequence[str]) -> int:
    """Simulate each policy and print its figures side by side; exit status 0."""
    args = make_parser().parse(arguments)
    _check_flags(args)
    config = config_from(args)
    if args.measured:
        from jitney.engine.cli.simulate_measured import run_measured

        return run_measured(args, config)
    arrivals = traffic(args)
    table = step_times(args, config)
    shape = shape_for(args, config, arrivals, table)
    options = {"slo": slo_from(args), "price_per_hour": args.price_per_hour}
    lines = _recording(args)
    measured = measured_figures(lines, **options)
    clients = args.concurrency or _clients_of(args, lines)
    report: dict[str, Any] = {
        "source": source_of(table),
        "engine": describe(shape),
        "policies": {},
        "closed_loop": clients,
        "cached_tokens": sum(a.n_cached for a in arrivals),
        "measured": {args.measured_policy: measured} if measured else {},
        "errors": {},
    }
    for policy in policies_of(args):
        report["policies"][policy] = timed_figures(
            lambda p=policy: simulate_policy(p, arrivals, shape, table, args, clients), options
        )
    deliver(args, report)
    return 0


def timed_figures(
    simulated: Callable[[], SimulatedRun], options: Mapping[str, Any]
) -> dict[str, Any]:
    """The figures of a run, and how long simulating it took."""
    started = time.perf_counter()
    figures = simulated().figures(**options)
    return figures | {"simulated_in_s": round(time.perf_counter() - started, 3)}


def deliver(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Work out the errors of what was also measured, print the tables and write the file."""
    report["errors"] = {
        policy: errors(figures, report["measured"][policy])
        for policy, figures in report["policies"].items()
        if policy in report["measured"]
    }
    report["verdict"] = verdict(
        {policy: figures["output_tok_s"] for policy, figures in report["policies"].items()},
        {policy: speed_error(off) for policy, off in report["errors"].items()},
    )
    if args.json:
        write_json(args.json, report)
    if args.json != "-":
        _show(report)


def make_parser() -> Parser:
    parser = Parser(
        "simulate",
        "Predict what an engine does with given traffic: the scheduler on a virtual clock.",
    )
    add = parser.add_argument_group("what to simulate").add_argument
    add(
        "--policies",
        metavar="A,B",
        default=_POLICIES,
        help=f"policies to compare [{_POLICIES}]; --policy names one",
    )
    add("--table", metavar="FILE", help="step times measured by jitney bench step --json FILE")
    add(
        "--records",
        metavar="FILE",
        help="step times from the step records of a real run (.npz or .npy)",
    )
    add(
        "--device",
        dest="chip",
        metavar="NAME",
        help="step times of the roofline of a named device, for the model",
    )
    add(
        "--count",
        type=int,
        default=1,
        metavar="N",
        help="with --device: chips, by tensor parallelism [1]",
    )
    add(
        "--weights",
        dest="weight_format",
        default="bf16",
        metavar="FORMAT",
        help="with --device: bf16, fp8, int8 or int4 [bf16]",
    )
    add("--kv", default="bf16", metavar="FORMAT", help="with --device: bf16, fp8 or int8 [bf16]")
    add("--seats", type=int, metavar="N", help="the same as --max-seats")
    add(
        "--measured",
        metavar="FILE",
        help="predict the runs in a file of jitney bench policies --records, each beside "
        "its measurement; step times are theirs unless said otherwise",
    )
    add(
        "--calibrate-on",
        metavar="NAME",
        default="",
        help="with --measured: the run whose steps tell how long "
        "steps take; all: of all runs together; each: its own, if the machine's speed changed "
        "between them "
        "[continuous]",
    )
    add(
        "--open-loop",
        action="store_true",
        help="with --trace: let requests come at their recorded times even where "
        "each followed the end of another, as clients do that wait for their answers",
    )
    add(
        "--measured-policy",
        metavar="NAME",
        default="continuous",
        help="the policy that --trace was recorded under, whose prediction is compared with it "
        "[continuous]",
    )
    add_traffic(parser, requests=1000, arrivals="poisson")
    add_pace(parser)
    add_report(parser, html=False)
    add_settings(parser, ("model", "engine"), leave_out=NOT_SIMULATED)
    return parser


def add_pace(parser: Parser) -> None:
    """How fast the traffic comes."""
    add = parser.add_argument_group("pace").add_argument
    add("--rate", type=float, metavar="X", help="requests a second [1; a trace's own]")
    add(
        "--concurrency",
        type=int,
        default=0,
        metavar="N",
        help="closed arrivals: requests open at a time; 0: all [0]",
    )


def _check_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that contradict each other, or that would be ignored."""
    check_numbers(args, rate=1e-9, concurrency=0, count=1, seats=1)
    if args.measured and args.trace:
        raise ConfigError("--measured brings its own requests: give no --trace with it")
    if args.calibrate_on and not (args.measured and not (args.table or args.records or args.chip)):
        raise ConfigError(
            "--calibrate-on names a run of --measured whose own steps are used: give that, and no "
            "--table, --records or --device"
        )
    if args.open_loop and not args.trace:
        raise ConfigError("--open-loop is for --trace: made-up traffic is what --arrivals says")
    if not args.chip and (args.count, args.weight_format, args.kv) != (1, "bf16", "bf16"):
        raise ConfigError(
            "--count, --weights and --kv describe a roofline: give --device with them"
        )
    if args.seats and "max_seats" in vars(args):
        raise ConfigError("--seats and --max-seats are the same setting: give one")
    check_writable(args, "json")


def traffic(args: argparse.Namespace) -> list[Arrival]:
    """The requests that the flags describe."""
    if args.concurrency and (args.trace or args.arrivals != "closed"):
        raise ConfigError(
            "--concurrency is for --arrivals closed: other arrivals come at their own times"
        )
    return traffic_from(args, args.rate or (0.0 if args.trace else 1.0))


def _recording(args: argparse.Namespace) -> list[TraceLine]:
    """The lines of the trace, if it is simulated as it was recorded and can be compared."""
    return (
        read_trace_lines(args.trace) if args.trace and args.rate is None and args.scale == 1 else []
    )


def _clients_of(args: argparse.Namespace, lines: Sequence[TraceLine]) -> int:
    """Clients that sent the recorded requests, each after its last answer; 0 if they came by
    themselves.
    """
    requests = measured_requests(lines)
    if args.open_loop or not requests:
        return 0
    return closed_concurrency(requests) or 0


def step_times(args: argparse.Namespace, config: Config) -> StepTimes:
    """The step times that one of --table, --records and --device asks for."""
    from jitney.engine.simulation.step_table import StepTable

    makers: dict[str, Callable[[str], StepTimes]] = {
        "table": StepTable.load,
        "records": lambda file: StepTable.from_records(read_records(file), Path(file).name),
        "chip": lambda name: _roofline(args, config),
    }
    given = {name: value for name in makers if (value := getattr(args, name))}
    if len(given) != 1:
        raise ConfigError(
            "say where step times come from: exactly one of --table, --records and --device"
        )
    ((name, value),) = given.items()
    return makers[name](value)


def _roofline(args: argparse.Namespace, config: Config) -> StepTimes:
    from jitney.engine.simulation.devices import find_device
    from jitney.engine.simulation.roofline import ModelCost, Roofline, find_shape

    return Roofline(
        ModelCost(find_shape(config.model.id), args.weight_format, args.kv),
        find_device(args.chip),
        args.count,
    )


def read_records(file: str) -> Any:
    """Step records from .npy, or from the arrays of that type in an .npz, one after another."""
    import numpy as np

    try:
        loaded = np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as numpy arrays: {error}") from None
    arrays = [loaded] if isinstance(loaded, np.ndarray) else [loaded[name] for name in loaded.files]
    arrays = [array for array in arrays if array.dtype.names and "device_s" in array.dtype.names]
    if not arrays or any(
        name not in array.dtype.names for array in arrays for name in ("keys", "longest", "pairs")
    ):
        raise ConfigError(f"{file}: holds no step records of this version")
    return np.concatenate(arrays)


def policies_of(args: argparse.Namespace) -> list[str]:
    named = getattr(args, "policy", None) or args.policies
    return [word.strip() for word in named.split(",") if word.strip()]


def shape_for(
    args: argparse.Namespace, config: Config, arrivals: Sequence[Arrival], table: StepTimes
) -> EngineShape:
    """The engine of the settings. What they leave open is chosen so that it does not interfere: the
    context holds the longest request, pages suffice for every seat (or fill the device's memory),
    and nobody is refused unless caps are given."""
    from jitney.engine.simulation.roofline import Roofline
    from jitney.engine.simulation.simulator import EngineShape

    changes: dict[str, Any] = {name: none for name, none in _CAPS.items() if name not in vars(args)}
    if args.seats:
        changes["max_seats"] = args.seats
        changes["token_budget"] = max(config.engine.token_budget, 2 * args.seats)
    settings = config.engine.model_copy(update=changes)
    longest = max(a.n_prompt + max(1, a.n_output) for a in arrivals)
    context = config.model.context or longest
    pages = settings.pages or _pages_for(table, settings.page_size, settings.max_seats, context)
    return EngineShape.of(
        settings, context_length=context, pages=pages, on_device=isinstance(table, Roofline)
    )


def _pages_for(table: StepTimes, page_size: int, seats: int, context: int) -> int:
    """Pages, the trash page included, when no setting says how many."""
    from jitney.engine.simulation.roofline import Roofline

    wanted = seats * -(-context // page_size) + 1
    if not isinstance(table, Roofline):
        return wanted
    fit = int(table.kv_room / (table.cost.kv_bytes / table.kv_split * page_size))
    if fit < 2:
        raise ConfigError(
            f"the model does not fit {table.count} x {table.device.name}: use more chips (--count) "
            "or "
            "smaller --weights"
        )
    return min(fit, wanted)


def simulate_policy(
    policy: str,
    arrivals: Sequence[Arrival],
    shape: EngineShape,
    table: StepTimes,
    args: argparse.Namespace,
    concurrency: int,
) -> SimulatedRun:
    """One run; only the policy differs from those of the others. Static waits for its batch unless
    told otherwise.

    concurrency: requests that a closed loop keeps open; 0: they come at their times.
    """
    from jitney.engine.simulation.simulator import simulate

    timeout_ms = None if "static_timeout_ms" in vars(args) else 0.0
    return simulate(
        arrivals,
        shape.under(policy, timeout_ms),
        table,
        concurrency=concurrency or None,
        seed=args.seed,
    )


def describe(shape: EngineShape) -> dict[str, Any]:
    """The engine's shape, for the report."""
    return msgspec.to_builtins(
        {
            "limits": shape.limits,
            "pages": shape.pages,
            "page_size": shape.page_size,
            "buckets": [str(bucket) for bucket in shape.buckets.all()],
        }
    )


def source_of(table: StepTimes) -> str:
    from jitney.engine.simulation.roofline import Roofline

    if isinstance(table, Roofline):
        return (
            f"roofline of {table.count} x {table.device.name}, "
            f"{table.cost.weights} weights, {table.cost.kv} KV"
        )
    return getattr(table, "source", "")


def _show(report: Mapping[str, Any]) -> None:
    """The figures of all policies side by side, then each beside its measurement, if there is
    one.
    """
    from rich.console import Console

    from jitney.engine.report.tables import CROSS_TITLE, cross_table, print_table

    console, policies = Console(), report["policies"]
    console.print(f"step times: {report['source']}", highlight=False)
    if report.get("closed_loop"):
        console.print(
            f"closed loop: {report['closed_loop']} requests are open at a time", highlight=False
        )
    if report.get("cached_tokens"):
        console.print(
            f"{report['cached_tokens']:,} prompt tokens are found cached, as recorded",
            highlight=False,
        )
    rows = {
        name: [_cell(name, figure(figures, name)) for figures in policies.values()]
        for name in COMPARED
    }
    console.print(_table_of("predicted", list(policies), rows))
    for policy, off in report["errors"].items():
        pair = policies[policy], report["measured"][policy]
        rows = {
            name: [*(_cell(name, figure(figures, name)) for figures in pair), f"{off[name]:+.1%}"]
            for name in off
        }
        console.print(
            _table_of(f"{policy}: predicted and measured", ["predicted", "measured", "error"], rows)
        )
    if report.get("cross_errors"):
        print_table(cross_table(report["cross_errors"]), CROSS_TITLE)
    if report.get("verdict"):
        console.print(report["verdict"], highlight=False)


def _table_of(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Table:
    """A table with the figures' names on the left; figures that nobody knows are left out."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for name in ("", *columns):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for name, cells in rows.items():
        if any(cells):
            table.add_row(name, *cells)
    return table


def _cell(name: str, value: float | None) -> str:
    """A figure as people read it."""
    if value is None:
        return ""
    if name.endswith("_s") and "_p" in name:
        return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"
    return f"{value:.1%}" if name in ("padding_share", "seat_fill", "kv_use") else f"{value:,.2f}"
