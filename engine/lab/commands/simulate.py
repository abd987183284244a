"""`jitney simulate`: runs the scheduler on a virtual clock, on recorded or synthetic traffic."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.common.trace import TraceLine
from jitney.engine.config import FOR, Command, Config, Flag, FlagGroup
from jitney.engine.lab.commands.simulate_flags import SimulateArguments
from jitney.engine.lab.figures import cell
from jitney.engine.lab.simulation.accuracy import errors, verdict_of
from jitney.engine.lab.simulation.engine_run import EngineRun
from jitney.engine.lab.simulation.recordings import EngineName, Recording
from jitney.engine.lab.simulation.simulator import predict
from jitney.engine.lab.simulation.step_table import StepTable

if TYPE_CHECKING:
    from jitney.engine.core import StepTimes


def simulate(arguments: Sequence[str]) -> int:
    """Simulate each policy, or a fleet with --fleet, and print the figures; exit status 0."""
    if "--fleet" in arguments:
        from jitney.engine.lab.commands.simulate_fleet import simulate_fleet

        return simulate_fleet([word for word in arguments if word != "--fleet"])
    args = _COMMAND.parse_as(SimulateArguments, arguments)
    _check_flags(args)
    args.on_device = args.chip is not None
    config = args.load_config()
    report = _predicted_runs(args, config) if args.measured else _simulated(args, config)
    predicted, measured = report["policies"], report["measured"]
    for policy in measured.keys() & predicted.keys():
        report["errors"][policy] = errors(predicted[policy], measured[policy])
    report["verdict"] = verdict_of(predicted, report["errors"])
    if args.write_report(report):
        _show(report)
    return 0


def _simulated(args: SimulateArguments, config: Config) -> JsonDict:
    """Simulate every policy on the traffic, and compare with its recording if there is one."""
    arrivals = args.coming()
    table = args.step_times(config)
    drafts = args.drafts if args.acceptance else 0
    shape = args.shape_for(config, arrivals, table, drafts)
    if args.acceptance:
        shape = shape.drafting(args.acceptance, args.drafts)
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
    """The reason not to compare the trace's measurements with the prediction; empty: none.

    Step records count as those of the trace's own run.
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


def _timed_figures(simulated: Callable[[], EngineRun], options: JsonObject) -> JsonDict:
    started = time.perf_counter()
    figures = simulated().figures(**options)
    figures["simulated_in_s"] = round(time.perf_counter() - started, 3)
    return figures


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
    Flag.whole("--count", "with --device: chips, by tensor parallelism", 1, least=1),
    Flag.of(
        "--weights",
        "with --device: bf16, fp8, int8 or int4",
        "bf16",
        dest="weight_format",
        metavar="FORMAT",
    ),
    Flag.of("--kv", "with --device: bf16, fp8 or int8", "bf16", metavar="FORMAT"),
    Flag.whole("--seats", "the same as --max-seats", least=1),
    *SimulateArguments.DRAFTS,
    Flag.of(
        "--measured",
        "predict the runs in a file of jitney bench policies --records, each beside "
        "its measurement; step times are those of continuous batching unless said otherwise",
        metavar="FILE",
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
    """Raise ConfigError for flags that contradict each other or would be ignored."""
    if args.acceptance > 1 or (args.acceptance and args.measured):
        raise ConfigError(
            f"--acceptance {args.acceptance:g} must be at most 1, and is not for --measured, whose "
            "runs are simulated as they were"
        )
    _check_subject(args)
    if args.open_loop and not args.trace:
        raise ConfigError("--open-loop is for --trace: made-up traffic is what --arrivals says")
    args.check_seats()


def _check_subject(args: SimulateArguments) -> None:
    if args.measured and args.trace:
        raise ConfigError("--measured brings its own requests: give no --trace with it")
    chip = args.count, args.weight_format, args.kv
    if not args.chip and chip != (1, "bf16", "bf16"):
        raise ConfigError(
            "--count, --weights and --kv describe a roofline: give --device with them"
        )


def _recording(args: SimulateArguments) -> Recording:
    """The trace as a recording, if it is simulated unchanged and can be compared; else empty."""
    if not args.trace or args.rate is not None or args.scale != 1:
        return Recording(())
    return Recording.of(TraceLine.read_all(args.trace))


def _clients_of(args: SimulateArguments, recording: Recording) -> int:
    """Clients of a closed loop; 0 for an open loop."""
    if args.open_loop or not recording.requests:
        return 0
    return recording.clients()


def _predicted_runs(args: SimulateArguments, config: Config) -> JsonDict:
    """Simulate every run in the file of --measured on its own engine."""
    runs = EngineRun.read_all(args.measured)
    chosen = {name: run for name, run in runs.items() if name in args.compared()}
    if not chosen:
        raise ConfigError(
            f"{args.measured} holds the runs {', '.join(runs)}, none of which is asked for"
        )
    table = _times_for(args, config, runs)
    options = args.figure_options()
    figures = {}
    for name, run in chosen.items():
        n_open = args.concurrency or None
        simulated = partial(predict, run, table, concurrency=n_open, seed=args.seed)
        figures[name] = _timed_figures(simulated, options)
    return {
        "source": table.source,
        "engine": list(chosen.values())[-1].shape.as_json(),
        "policies": figures,
        "measured": {name: run.figures(**options) for name, run in chosen.items()},
        "errors": {},
    }


def _times_for(args: SimulateArguments, config: Config, runs: Mapping[str, EngineRun]) -> StepTimes:
    """The step times for predictions: from the flags, else from the run of continuous batching, or
    from the first run.
    """
    if not args.learns_from_runs:
        return args.step_times(config)
    source = "continuous" if "continuous" in runs else next(iter(runs))
    return StepTable.from_records(runs[source].records, f"the steps of {source}")


def _show(report: JsonObject) -> None:
    from jitney.engine.common.reports.page import Table, print_lines
    from jitney.engine.lab.bench.tables import figures_table

    print_lines(_notes(report))
    figures_table(report["policies"]).print("predicted")
    for policy, off in report["errors"].items():
        both = report["policies"][policy], report["measured"][policy]
        rows = []
        for name, error in off.items():
            rows.append([name, *(cell(figures, name) for figures in both), f"{error:+.1%}"])
        Table(["", "predicted", "measured", "error"], rows).print(
            f"{policy}: predicted and measured"
        )
    print_lines(filter(None, [report["verdict"]]))


def _notes(report: JsonObject) -> Iterator[str]:
    yield f"step times: {report['source']}"
    if report.get("not_compared"):
        yield f"no comparison with what was measured: {report['not_compared']}"
    if report.get("closed_loop"):
        yield f"closed loop: {report['closed_loop']} requests are open at a time"
    if report.get("cached_tokens"):
        yield f"{report['cached_tokens']:,} prompt tokens are found cached, as recorded"
