"""`jitney simulate`: the scheduler and its policies on a virtual clock, on recorded or made-up
traffic.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from jitney.engine.cli.bench_flags import (
    REPORT_WITHOUT_PAGE,
    check_concurrency,
    check_numbers,
    check_seats,
    check_writable,
    figure_options,
    traffic_flags,
    traffic_from,
    words_of,
    write_report,
)
from jitney.engine.cli.flags import FOR, ONLY_SERVED, Command, Flag, FlagGroup, config_from
from jitney.engine.config.schema import Config, EngineSection
from jitney.engine.errors import ConfigError
from jitney.engine.simulation.accuracy import (
    COMPARED,
    closed_concurrency,
    errors,
    figure,
    measured_figures,
    measured_requests,
)
from jitney.engine.simulation.verdicts import verdict_of
from jitney.engine.simulation.workload import Arrival, TraceLine, read_trace_lines
from jitney.engine.types import JsonDict, JsonObject

if TYPE_CHECKING:
    import numpy as np

    from jitney.engine.report.page import Table
    from jitney.engine.simulation.engine_shape import EngineShape
    from jitney.engine.simulation.roofline import Roofline
    from jitney.engine.simulation.simulator import SimulatedRun
    from jitney.engine.simulation.step_table import StepTimes
    from jitney.engine.simulation.verdicts import ErrorsElsewhere

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
    *ONLY_SERVED,
    "revision",
    "dtype",
    "weights",
    "adapters",
    "memory_gib",
    "kv_dtype",
    "prefix_cache",
    "share_outputs",
    "kernels",
    "compilation_cache",
    "platform",
    "device",
    "tensor_parallel",
    "data_parallel",
    "coordinator",
    "n_hosts",
    "host_id",
)
#: Fields that step records of this version have.
_NEEDED = {"device_s", "keys", "longest", "pairs"}


def run(arguments: Sequence[str]) -> int:
    """Simulate each policy and print its figures side by side, or with --fleet a fleet; exit status
    0.
    """
    if "--fleet" in arguments:
        from jitney.engine.cli.simulate_fleet import run as run_fleet

        return run_fleet([word for word in arguments if word != "--fleet"])
    args = _COMMAND.parse(arguments)
    _check_flags(args)
    args.on_device = args.chip is not None
    config = config_from(args)
    if args.measured:
        from jitney.engine.cli.simulate_measured import run_measured

        return run_measured(args, config)
    deliver(args, _simulated(args, config))
    return 0


def _simulated(args: Namespace, config: Config) -> JsonDict:
    """Every policy on the traffic that the flags describe, beside its recording if there is one."""
    arrivals = traffic(args)
    table = step_times(args, config)
    shape = shape_for(args, config, arrivals, table)
    options = figure_options(args)
    lines = _recording(args)
    measured = measured_figures(lines, **options)
    clients = args.concurrency or _clients_of(args, lines)
    policies = {}
    for policy in policies_of(args):
        simulated = partial(simulate_policy, policy, arrivals, shape, table, args, clients)
        policies[policy] = timed_figures(simulated, options)
    return {
        "source": source_of(table),
        "engine": describe(shape),
        "policies": policies,
        "closed_loop": clients,
        "cached_tokens": sum(arrival.n_cached for arrival in arrivals),
        "measured": {args.measured_policy: measured} if measured else {},
        "errors": {},
    }


def timed_figures(simulated: Callable[[], SimulatedRun], options: JsonObject) -> JsonDict:
    """The figures of a run, and how long simulating it took."""
    started = time.perf_counter()
    figures = simulated().figures(**options)
    figures["simulated_in_s"] = round(time.perf_counter() - started, 3)
    return figures


def deliver(args: Namespace, report: JsonDict) -> None:
    """Work out the errors of what was also measured, print the tables and write the file."""
    predicted = report["policies"]
    for policy, measured in report["measured"].items():
        if policy in predicted:
            report["errors"][policy] = errors(predicted[policy], measured)
    report["verdict"] = verdict_of(predicted, report["errors"], _errors_elsewhere(args))
    if write_report(args, report):
        _show(report)


def _errors_elsewhere(args: Namespace) -> ErrorsElsewhere | None:
    """What is known of predictions by the steps of a run under the policy that was recorded; None
    where step times come from no such run.
    """
    from jitney.engine.simulation.shipped_errors import shipped

    return shipped().learned_from(args.measured_policy) if args.records else None


_SUBJECT = (
    Flag.of(
        "--policies",
        f"policies to compare [{_POLICIES}]; --policy names one",
        metavar="A,B",
    ),
    Flag.of("--table", "step times measured by jitney bench step --json FILE", metavar="FILE"),
    Flag.of(
        "--records",
        "step times from the step records of a real run (.npz or .npy)",
        metavar="FILE",
    ),
    Flag.of(
        "--device",
        "step times of the roofline of a named device, for the model",
        dest="chip",
        metavar="NAME",
    ),
    Flag.whole("--count", "with --device: chips, by tensor parallelism", 1),
    Flag.of(
        "--weights",
        "with --device: bf16, fp8, int8 or int4",
        "bf16",
        dest="weight_format",
        metavar="FORMAT",
    ),
    Flag.of("--kv", "with --device: bf16, fp8 or int8", "bf16", metavar="FORMAT"),
    Flag.whole("--seats", "the same as --max-seats"),
    Flag.of(
        "--measured",
        "predict the runs in a file of jitney bench policies --records, each beside "
        "its measurement; step times are theirs unless said otherwise",
        metavar="FILE",
    ),
    Flag.of(
        "--calibrate-on",
        "with --measured: the run whose steps tell how long steps take; all: of all runs together; "
        "each: its own, if the machine's speed changed between them [continuous]",
        "",
        metavar="NAME",
    ),
    Flag.switch(
        "--open-loop",
        "with --trace: let requests come at their recorded times even where "
        "each followed the end of another, as clients do that wait for their answers",
    ),
    Flag.of(
        "--measured-policy",
        "the policy that --trace and --records were recorded under; its prediction is compared "
        "with the trace",
        "continuous",
        metavar="NAME",
    ),
)
#: How fast the traffic comes.
PACE = FlagGroup(
    (
        Flag.number("--rate", "requests a second [1; a trace's own]"),
        Flag.whole("--concurrency", "closed arrivals: requests open at a time; 0: all", 0),
    ),
    "pace",
)
_COMMAND = Command(
    "simulate",
    "Predict what an engine does with given traffic: the scheduler on a virtual clock. "
    "`jitney simulate --fleet --help`: a fleet.",
    (
        FlagGroup((*_SUBJECT, FOR), "what to simulate"),
        traffic_flags(requests=1000, arrivals="poisson"),
        PACE,
        REPORT_WITHOUT_PAGE,
    ),
    sections=("model", "engine"),
    leave_out=NOT_SIMULATED,
)


def _check_flags(args: Namespace) -> None:
    """Raise ConfigError for flags that contradict each other, or that would be ignored."""
    check_numbers(args, rate=1e-9, concurrency=0, count=1, seats=1)
    _check_subject(args)
    if args.open_loop and not args.trace:
        raise ConfigError("--open-loop is for --trace: made-up traffic is what --arrivals says")
    check_seats(args)
    check_writable(args, "json")


def _check_subject(args: Namespace) -> None:
    if args.measured and args.trace:
        raise ConfigError("--measured brings its own requests: give no --trace with it")
    if args.calibrate_on and not (args.measured and learns_from_runs(args)):
        raise ConfigError(
            "--calibrate-on names a run of --measured whose own steps are used: give that, and no "
            "--table, --records or --device"
        )
    chip = args.count, args.weight_format, args.kv
    if not args.chip and chip != (1, "bf16", "bf16"):
        raise ConfigError(
            "--count, --weights and --kv describe a roofline: give --device with them"
        )


def learns_from_runs(args: Namespace) -> bool:
    """True when step times are learned from measured runs."""
    return not (args.table or args.records or args.chip)


def traffic(args: Namespace) -> list[Arrival]:
    """The requests that the flags describe."""
    check_concurrency(args)
    rate = args.rate or (0.0 if args.trace else 1.0)
    return traffic_from(args, rate)


def _recording(args: Namespace) -> list[TraceLine]:
    """The lines of the trace, if it is simulated as it was recorded and can be compared."""
    if not args.trace or args.rate is not None or args.scale != 1:
        return []
    return read_trace_lines(args.trace)


def _clients_of(args: Namespace, lines: Sequence[TraceLine]) -> int:
    """Clients that sent the recorded requests, each after its last answer; 0 if they came by
    themselves.
    """
    requests = measured_requests(lines)
    if args.open_loop or not requests:
        return 0
    return closed_concurrency(requests) or 0


def step_times(args: Namespace, config: Config) -> StepTimes:
    """The step times that one of --table, --records and --device asks for."""
    from jitney.engine.simulation.step_table import StepTable

    sources = list(filter(None, [args.table, args.records, args.chip]))
    if len(sources) != 1:
        raise ConfigError(
            "say where step times come from: exactly one of --table, --records and --device"
        )
    if args.table:
        return StepTable.load(args.table)
    if args.records:
        return StepTable.from_records(read_records(args.records), Path(args.records).name)
    return _roofline(args, config)


def _roofline(args: Namespace, config: Config) -> StepTimes:
    from jitney.engine.simulation.devices import find_device
    from jitney.engine.simulation.roofline import ModelCost, Roofline, find_shape

    cost = ModelCost(find_shape(config.model.id), args.weight_format, args.kv)
    return Roofline(cost, find_device(args.chip), args.count)


def read_records(file: str) -> np.ndarray:
    """Step records from .npy, or from the arrays of that type in an .npz, one after another."""
    import numpy as np

    fields = [(array, set(array.dtype.names or ())) for array in _arrays_in(file)]
    records = [array for array, names in fields if "device_s" in names]
    known = [array for array, names in fields if names >= _NEEDED]
    if not records or len(known) < len(records):
        raise ConfigError(f"{file}: holds no step records of this version")
    return np.concatenate(records)


def _arrays_in(file: str) -> list[np.ndarray]:
    import numpy as np

    try:
        loaded = np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as numpy arrays: {error}") from None
    return list(loaded.values()) if isinstance(loaded, Mapping) else [loaded]


def policies_of(args: Namespace) -> list[str]:
    return words_of(getattr(args, "policy", None) or args.policies or _POLICIES)


def shape_for(
    args: Namespace, config: Config, arrivals: Sequence[Arrival], table: StepTimes
) -> EngineShape:
    """The engine of the settings. What they leave open is chosen so that it does not interfere: the
    context holds the longest request, pages suffice for every seat (or fill the device's memory),
    and nobody is refused unless caps are given."""
    from jitney.engine.simulation.engine_shape import EngineShape
    from jitney.engine.simulation.roofline import Roofline
    from jitney.engine.simulation.step_table import StepTable

    settings = _simulated_settings(args, config.engine)
    context = config.model.context or max(map(_n_tokens, arrivals))
    pages = settings.pages or _pages_for(table, settings, context)
    return EngineShape.of(
        settings,
        context_length=context,
        pages=pages,
        on_device=isinstance(table, Roofline),
        padding_is_free=isinstance(table, StepTable) and table.padding_is_free,
    )


def _n_tokens(arrival: Arrival) -> int:
    return arrival.n_prompt + max(1, arrival.n_output)


def _simulated_settings(args: Namespace, settings: EngineSection) -> EngineSection:
    """Without caps unless they are given, and with the seats that --seats names."""
    changes: JsonDict = {name: none for name, none in _CAPS.items() if name not in vars(args)}
    if args.seats:
        changes["max_seats"] = args.seats
        changes["token_budget"] = max(settings.token_budget, 2 * args.seats)
    return settings.model_copy(update=changes)


def _pages_for(table: StepTimes, settings: EngineSection, context: int) -> int:
    """Pages, the trash page included, when no setting says how many."""
    from jitney.engine.simulation.roofline import Roofline

    wanted = settings.max_seats * -(-context // settings.page_size) + 1
    if isinstance(table, Roofline):
        return min(_pages_that_fit(table, settings.page_size), wanted)
    return wanted


def _pages_that_fit(roofline: Roofline, page_size: int) -> int:
    page_bytes = roofline.cost.kv_bytes / roofline.kv_split * page_size
    pages = int(roofline.kv_room / page_bytes)
    if pages < 2:
        chips = f"{roofline.count} x {roofline.device.name}"
        raise ConfigError(
            f"the model does not fit {chips}: use more chips (--count) or smaller --weights"
        )
    return pages


def simulate_policy(
    policy: str,
    arrivals: Sequence[Arrival],
    shape: EngineShape,
    table: StepTimes,
    args: Namespace,
    clients: int,
) -> SimulatedRun:
    """One run; only the policy differs from those of the others. Static waits for its batch unless
    told otherwise.

    clients: requests that a closed loop keeps open; 0: they come at their times.
    """
    from jitney.engine.simulation.simulator import simulate

    timeout_ms = None if "static_timeout_ms" in vars(args) else 0.0
    under = shape.under(policy, timeout_ms)
    return simulate(arrivals, under, table, concurrency=clients or None, seed=args.seed)


def describe(shape: EngineShape) -> JsonDict:
    """The engine's shape, for the report."""
    return {
        "limits": msgspec.to_builtins(shape.limits),
        "pages": shape.pages,
        "page_size": shape.page_size,
        "buckets": [str(bucket) for bucket in shape.buckets.all()],
    }


def source_of(table: StepTimes) -> str:
    return getattr(table, "source", "")


def _show(report: JsonObject) -> None:
    from jitney.engine.report.tables import print_lines, print_table

    print_lines(_notes(report))
    for title, table in _tables(report):
        print_table(table, title)
    print_lines(filter(None, [report["verdict"]]))


def _tables(report: JsonObject) -> Iterator[tuple[str, Table]]:
    """(title, table)."""
    from jitney.engine.report.tables import CROSS_TITLE, cross_table

    yield "predicted", _predicted_table(report["policies"])
    for policy in report["errors"]:
        yield f"{policy}: predicted and measured", _error_table(report, policy)
    if report.get("cross_errors"):
        yield CROSS_TITLE, cross_table(report["cross_errors"])


def _notes(report: JsonObject) -> Iterator[str]:
    yield f"step times: {report['source']}"
    clients, cached = report.get("closed_loop"), report.get("cached_tokens")
    if clients:
        yield f"closed loop: {clients} requests are open at a time"
    if cached:
        yield f"{cached:,} prompt tokens are found cached, as recorded"


def _predicted_table(policies: Mapping[str, JsonObject]) -> Table:
    """Figures that nobody knows are left out."""
    from jitney.engine.report.page import Table

    rows = [(name, _cells(name, policies.values())) for name in COMPARED]
    return Table(["", *policies], [[name, *cells] for name, cells in rows if any(cells)])


def _cells(name: str, runs: Iterable[JsonObject]) -> list[str]:
    """A figure of several runs."""
    return [_cell(name, figure(figures, name)) for figures in runs]


def _error_table(report: JsonObject, policy: str) -> Table:
    from jitney.engine.report.page import Table

    both = report["policies"][policy], report["measured"][policy]
    rows = []
    for name, error in report["errors"][policy].items():
        rows.append([name, *_cells(name, both), f"{error:+.1%}"])
    return Table(["", "predicted", "measured", "error"], rows)


#: Figures that are shares of something.
_SHARES = ("padding_share", "seat_fill", "kv_use")


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name in _SHARES:
        return f"{value:.1%}"
    if len(COMPARED[name]) == 1:
        return f"{value:,.2f}"
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"
