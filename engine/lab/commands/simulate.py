"""`jitney simulate`: the scheduler and its policies on a virtual clock, on recorded or made-up
traffic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.common.trace import TraceLine
from jitney.engine.config import FOR, Command, Config, Flag, FlagGroup
from jitney.engine.lab.commands.simulate_flags import SimulateArguments
from jitney.engine.lab.simulation.accuracy import (
    COMPARED,
    EngineName,
    MeasuredRun,
    Recording,
    cross_errors,
    errors,
)
from jitney.engine.lab.simulation.step_table import StepTable
from jitney.engine.lab.simulation.verdicts import verdict_of

if TYPE_CHECKING:
    from jitney.dashboard import Table
    from jitney.engine.lab.simulation.simulator import SimulatedRun
    from jitney.engine.lab.simulation.step_table import StepTimes
    from jitney.engine.lab.simulation.verdicts import ErrorsElsewhere


def simulate(arguments: Sequence[str]) -> int:
    """Simulate each policy and print its figures side by side, or with --fleet a fleet; exit status
    0.
    """
    if "--fleet" in arguments:
        from jitney.engine.lab.commands.simulate_fleet import simulate_fleet

        return simulate_fleet([word for word in arguments if word != "--fleet"])
    args = _COMMAND.parse_as(SimulateArguments, arguments)
    _check_flags(args)
    args.on_device = args.chip is not None
    config = args.load_config()
    if args.measured:
        _deliver(args, _predicted_runs(args, config))
    else:
        _deliver(args, _simulated(args, config))
    return 0


def _simulated(args: SimulateArguments, config: Config) -> JsonDict:
    """Every policy on the traffic that the flags describe, beside its recording if there is one."""
    arrivals = args.coming()
    table = args.step_times(config)
    shape = args.shape_for(config, arrivals, table)
    options = args.figure_options()
    recording = _recording(args)
    elsewhere = _why_elsewhere(args, config, recording, table)
    measured = None if elsewhere else recording.figures(**options)
    clients = args.concurrency or _clients_of(args, recording)
    policies = {}
    for policy in args.compared():
        simulated = partial(args.simulate, policy, arrivals, shape, table, clients)
        policies[policy] = _timed_figures(simulated, options)
    return {
        "source": table.source,
        "engine": shape.as_json(),
        "policies": policies,
        "closed_loop": clients,
        "cached_tokens": sum(arrival.n_cached for arrival in arrivals),
        "measured": {args.measured_policy: measured} if measured else {},
        "not_compared": elsewhere,
        "errors": {},
    }


def _why_elsewhere(
    args: SimulateArguments, config: Config, recording: Recording, table: StepTimes
) -> str:
    """Why what the trace measured is nothing to judge the prediction by; empty if it is.

    Step records are those of the trace's own run.
    """
    if not recording.requests or args.records:
        return ""
    timed = EngineName(Path(config.model.id).name, args.chip or "")
    if isinstance(table, StepTable):
        timed = EngineName(table.model, table.device)
    traced = recording.engine
    if traced is None:
        if not args.chip:
            return ""
        return f"the trace does not say what answered it; the step times are those of {timed}"
    if timed.is_like(traced):
        return ""
    return f"the trace is of {traced}, the step times are those of {timed}"


def _timed_figures(simulated: Callable[[], SimulatedRun], options: JsonObject) -> JsonDict:
    """The figures of a run, and how long simulating it took."""
    started = time.perf_counter()
    figures = simulated().figures(**options)
    figures["simulated_in_s"] = round(time.perf_counter() - started, 3)
    return figures


def _deliver(args: SimulateArguments, report: JsonDict) -> None:
    """Work out the errors of what was also measured, print the tables and write the file."""
    predicted = report["policies"]
    for policy, measured in report["measured"].items():
        if policy in predicted:
            report["errors"][policy] = errors(predicted[policy], measured)
    report["verdict"] = verdict_of(predicted, report["errors"], _errors_elsewhere(args))
    if args.write_report(report):
        _show(report)


def _errors_elsewhere(args: SimulateArguments) -> ErrorsElsewhere | None:
    """What is known of predictions by the steps of a run under the policy that was recorded; None
    where step times come from no such run.
    """
    from jitney.engine.lab.simulation.verdicts import PolicyErrors

    return PolicyErrors.shipped().learned_from(args.measured_policy) if args.records else None


_SUBJECT = (
    Flag.of(
        "--policies",
        f"policies to compare [{SimulateArguments.POLICIES}]; --policy names one",
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
_COMMAND = Command(
    "simulate",
    "Predict what an engine does with given traffic: the scheduler on a virtual clock. "
    "`jitney simulate --fleet --help`: a fleet.",
    (
        FlagGroup((*_SUBJECT, FOR), "what to simulate"),
        SimulateArguments.traffic_flags(requests=1000, arrivals="poisson"),
        SimulateArguments.PACE,
        SimulateArguments.report_flags(page=False),
    ),
    sections=("model", "engine"),
    leave_out=SimulateArguments.NOT_SIMULATED,
)


def _check_flags(args: SimulateArguments) -> None:
    """Raise ConfigError for flags that contradict each other, or that would be ignored."""
    args.check_numbers(rate=1e-9, concurrency=0, count=1, seats=1)
    _check_subject(args)
    if args.open_loop and not args.trace:
        raise ConfigError("--open-loop is for --trace: made-up traffic is what --arrivals says")
    args.check_seats()
    args.check_writable("json")


def _check_subject(args: SimulateArguments) -> None:
    if args.measured and args.trace:
        raise ConfigError("--measured brings its own requests: give no --trace with it")
    if args.calibrate_on and not (args.measured and args.learns_from_runs):
        raise ConfigError(
            "--calibrate-on names a run of --measured whose own steps are used: give that, and no "
            "--table, --records or --device"
        )
    chip = args.count, args.weight_format, args.kv
    if not args.chip and chip != (1, "bf16", "bf16"):
        raise ConfigError(
            "--count, --weights and --kv describe a roofline: give --device with them"
        )


def _recording(args: SimulateArguments) -> Recording:
    """The trace, if it is simulated as it was recorded and can be compared; else empty."""
    if not args.trace or args.rate is not None or args.scale != 1:
        return Recording(())
    return Recording.of(TraceLine.read_all(args.trace))


def _clients_of(args: SimulateArguments, recording: Recording) -> int:
    """Clients that sent the recorded requests, each after its last answer; 0 if they came by
    themselves.
    """
    if args.open_loop or not recording.requests:
        return 0
    return recording.clients()


#: Measured runs by the policy's name.
_Runs = Mapping[str, MeasuredRun]


def _predicted_runs(args: SimulateArguments, config: Config) -> JsonDict:
    """The arrivals of every run in the file of --measured, simulated on that run's own engine, and
    how far off that is.
    """
    runs = MeasuredRun.read_all(args.measured)
    chosen = _chosen(args, runs)
    tables = _calibrated(args, config, runs)
    options = args.figure_options()
    figures = {name: _predicted(args, run, tables[name]) for name, run in chosen.items()}
    learns = args.learns_from_runs
    return {
        "source": "; ".join(dict.fromkeys(tables[name].source for name in chosen)),
        "engine": list(chosen.values())[-1].note.shape.as_json(),
        "policies": figures,
        "measured": {name: run.figures(**options) for name, run in chosen.items()},
        "errors": {},
        "cross_errors": cross_errors(chosen, args.seed) if learns else {},
    }


def _predicted(args: SimulateArguments, run: MeasuredRun, table: StepTimes) -> JsonDict:
    concurrency = args.concurrency or None
    simulated = partial(run.predicted, table, concurrency=concurrency, seed=args.seed)
    return _timed_figures(simulated, args.figure_options())


def _chosen(args: SimulateArguments, runs: _Runs) -> dict[str, MeasuredRun]:
    """The runs that the flags ask for."""
    chosen = {name: runs[name] for name in runs if name in args.compared()}
    if not chosen:
        raise ConfigError(
            f"{args.measured} holds the runs {', '.join(runs)}, none of which is asked for"
        )
    return chosen


def _calibrated(args: SimulateArguments, config: Config, runs: _Runs) -> dict[str, StepTimes]:
    """The step times to predict each run with: what the flags ask for, else those of the runs
    themselves.
    """
    if not args.learns_from_runs:
        return dict.fromkeys(runs, args.step_times(config))
    source = args.calibrate_on or _default_source(runs)
    if source == "each":
        return {name: _learned({name: run}) for name, run in runs.items()}
    return dict.fromkeys(runs, _learned(_runs_named(source, runs)))


def _runs_named(source: str, runs: _Runs) -> _Runs:
    """The runs to learn from."""
    if source == "all":
        return runs
    if source not in runs:
        raise ConfigError(
            f"--calibrate-on {source}: must be all, each, or one of {', '.join(runs)}"
        )
    return {source: runs[source]}


def _default_source(runs: _Runs) -> str:
    return "continuous" if "continuous" in runs else next(iter(runs))


def _learned(runs: _Runs) -> StepTimes:
    """From the steps of all these runs."""
    records = np.concatenate([run.records for run in runs.values()])
    return StepTable.from_records(records, f"the steps of {', '.join(runs)}")


def _show(report: JsonObject) -> None:
    from jitney.dashboard import print_lines

    print_lines(_notes(report))
    for title, table in _tables(report):
        table.print(title)
    print_lines(filter(None, [report["verdict"]]))


def _tables(report: JsonObject) -> Iterator[tuple[str, Table]]:
    """(title, table)."""
    from jitney.dashboard import CROSS_TITLE, cross_table

    yield "predicted", _predicted_table(report["policies"])
    for policy in report["errors"]:
        yield f"{policy}: predicted and measured", _error_table(report, policy)
    if report.get("cross_errors"):
        yield CROSS_TITLE, cross_table(report["cross_errors"])


def _notes(report: JsonObject) -> Iterator[str]:
    yield f"step times: {report['source']}"
    clients, cached = report.get("closed_loop"), report.get("cached_tokens")
    elsewhere = report.get("not_compared")
    if elsewhere:
        yield f"no comparison with what was measured: {elsewhere}"
    if clients:
        yield f"closed loop: {clients} requests are open at a time"
    if cached:
        yield f"{cached:,} prompt tokens are found cached, as recorded"


def _predicted_table(policies: Mapping[str, JsonObject]) -> Table:
    """Figures that nobody knows are left out."""
    from jitney.dashboard import Table

    rows = [(name, _cells(name, policies.values())) for name in COMPARED]
    return Table(["", *policies], [[name, *cells] for name, cells in rows if any(cells)])


def _cells(name: str, runs: Iterable[JsonObject]) -> list[str]:
    """A figure of several runs."""
    return [_cell(name, COMPARED[name].of(figures)) for figures in runs]


def _error_table(report: JsonObject, policy: str) -> Table:
    from jitney.dashboard import Table

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
    if not COMPARED[name].quantile:
        return f"{value:,.2f}"
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"
