"""`jitney simulate --measured FILE`: predict runs that were measured, and say how far off the
prediction is.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from jitney.engine.cli.simulate import (
    deliver,
    describe,
    figure_options,
    learns_from_runs,
    policies_of,
    source_of,
    step_times,
    timed_figures,
)
from jitney.engine.config.schema import Config
from jitney.engine.errors import ConfigError
from jitney.engine.simulation.accuracy import MeasuredRun, cross_errors, read_runs
from jitney.engine.types import JsonDict

if TYPE_CHECKING:
    from jitney.engine.simulation.step_table import StepTimes


def run_measured(args: Namespace, config: Config) -> int:
    """Simulate the arrivals of every run in the file on that run's own engine; exit status 0."""
    runs = read_runs(args.measured)
    chosen = _chosen(args, runs)
    tables = _calibrated(args, config, runs)
    sources = [source_of(tables[name]) for name in chosen]
    report: JsonDict = {
        "source": "; ".join(dict.fromkeys(sources)),
        "engine": {},
        "policies": {},
        "measured": {},
        "errors": {},
        "cross_errors": {},
    }
    options = figure_options(args)
    for name, run in chosen.items():
        report["engine"] = describe(run.note.shape)
        simulated = partial(
            run.predicted, tables[name], concurrency=args.concurrency or None, seed=args.seed
        )
        report["policies"][name] = timed_figures(simulated, options)
        report["measured"][name] = run.figures(**options)
    if learns_from_runs(args):
        report["cross_errors"] = cross_errors(chosen, args.seed)
    deliver(args, report)
    return 0


def _chosen(args: Namespace, runs: Mapping[str, MeasuredRun]) -> dict[str, MeasuredRun]:
    """The runs that the flags ask for."""
    wanted = policies_of(args)
    chosen = {name: run for name, run in runs.items() if name in wanted}
    if not chosen:
        raise ConfigError(
            f"{args.measured} holds the runs {', '.join(runs)}, none of which is asked for"
        )
    return chosen


def _calibrated(
    args: Namespace, config: Config, runs: Mapping[str, MeasuredRun]
) -> dict[str, StepTimes]:
    """The step times to predict each run with: what the flags ask for, else those of the runs
    themselves.
    """
    if not learns_from_runs(args):
        return dict.fromkeys(runs, step_times(args, config))
    source = args.calibrate_on or _default_source(runs)
    if source == "each":
        return {name: _learned({name: run}) for name, run in runs.items()}
    return dict.fromkeys(runs, _learned(_runs_named(source, runs)))


def _runs_named(source: str, runs: Mapping[str, MeasuredRun]) -> Mapping[str, MeasuredRun]:
    """The runs to learn from."""
    if source == "all":
        return runs
    if source not in runs:
        raise ConfigError(
            f"--calibrate-on {source}: must be all, each, or one of {', '.join(runs)}"
        )
    return {source: runs[source]}


def _default_source(runs: Mapping[str, MeasuredRun]) -> str:
    if "continuous" in runs:
        return "continuous"
    return next(iter(runs))


def _learned(runs: Mapping[str, MeasuredRun]) -> StepTimes:
    """From the steps of all these runs."""
    from jitney.engine.simulation.step_table import StepTable

    records = np.concatenate([run.records for run in runs.values()])
    return StepTable.from_records(records, f"the steps of {', '.join(runs)}")
