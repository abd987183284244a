"""`jitney simulate --measured FILE`: predict runs that were measured, and say how far off the
prediction is.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from jitney.engine.cli.simulate import deliver, timed_figures
from jitney.engine.cli.simulate_flags import SimulateArguments
from jitney.engine.config.schema import Config
from jitney.engine.errors import ConfigError
from jitney.engine.simulation.accuracy import MeasuredRun, cross_errors, read_runs
from jitney.engine.types import JsonDict

if TYPE_CHECKING:
    from jitney.engine.simulation.step_table import StepTimes


#: Measured runs by the policy's name.
_Runs = Mapping[str, MeasuredRun]


def run_measured(args: SimulateArguments, config: Config) -> int:
    """Simulate the arrivals of every run in the file on that run's own engine; exit status 0."""
    runs = read_runs(args.measured)
    chosen = _chosen(args, runs)
    tables = _calibrated(args, config, runs)
    options = args.figure_options()
    figures = {name: _predicted(args, run, tables[name]) for name, run in chosen.items()}
    learns = args.learns_from_runs
    report: JsonDict = {
        "source": "; ".join(dict.fromkeys(tables[name].source for name in chosen)),
        "engine": list(chosen.values())[-1].note.shape.as_json(),
        "policies": figures,
        "measured": {name: run.figures(**options) for name, run in chosen.items()},
        "errors": {},
        "cross_errors": cross_errors(chosen, args.seed) if learns else {},
    }
    deliver(args, report)
    return 0


def _predicted(args: SimulateArguments, run: MeasuredRun, table: StepTimes) -> JsonDict:
    concurrency = args.concurrency or None
    simulated = partial(run.predicted, table, concurrency=concurrency, seed=args.seed)
    return timed_figures(simulated, args.figure_options())


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
    from jitney.engine.simulation.step_table import StepTable

    records = np.concatenate([run.records for run in runs.values()])
    return StepTable.from_records(records, f"the steps of {', '.join(runs)}")
