"""`jitney simulate --measured FILE`: predict runs that were measured, and say how far off the
prediction is.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jitney.engine.cli.bench_flags import slo_from
from jitney.engine.cli.simulate import (
    deliver,
    describe,
    policies_of,
    source_of,
    step_times,
    timed_figures,
)
from jitney.engine.config.schema import Config
from jitney.engine.errors import ConfigError
from jitney.engine.simulation.accuracy import MeasuredRun, cross_errors, read_runs

if TYPE_CHECKING:
    from jitney.engine.simulation.step_table import StepTimes


def run_measured(args: argparse.Namespace, config: Config) -> int:
    """Simulate the arrivals of every run in the file on that run's own engine; exit status 0."""
    runs, wanted = read_runs(args.measured), policies_of(args)
    options = {"slo": slo_from(args), "price_per_hour": args.price_per_hour}
    chosen = {name: run for name, run in runs.items() if name in wanted}
    if not chosen:
        raise ConfigError(
            f"{args.measured} holds the runs {', '.join(runs)}, none of which is asked for"
        )
    tables = _calibrated(args, config, runs)
    report: dict[str, Any] = {
        "source": "; ".join(dict.fromkeys(source_of(tables[name]) for name in chosen)),
        "engine": {},
        "policies": {},
        "measured": {},
        "cross_errors": {},
    }
    for name, run in chosen.items():
        report["engine"] = describe(run.note.shape)
        report["policies"][name] = timed_figures(
            lambda name=name, run=run: run.predicted(
                tables[name], concurrency=args.concurrency or None, seed=args.seed
            ),
            options,
        )
        report["measured"][name] = run.figures(**options)
    if _of_the_runs(args):
        report["cross_errors"] = cross_errors(chosen, args.seed)
    deliver(args, report)
    return 0


def _of_the_runs(args: argparse.Namespace) -> bool:
    """True when step times are learned from the measured runs themselves."""
    return not (args.table or args.records or args.chip)


def _calibrated(
    args: argparse.Namespace, config: Config, runs: Mapping[str, MeasuredRun]
) -> dict[str, StepTimes]:
    """The step times to predict each run with: what the flags ask for, else those of the runs
    themselves.
    """
    from jitney.engine.simulation.step_table import StepTable

    if not _of_the_runs(args):
        return dict.fromkeys(runs, step_times(args, config))
    source = args.calibrate_on or ("continuous" if "continuous" in runs else next(iter(runs)))
    if source == "each":
        return {
            name: StepTable.from_records(run.records, f"the steps of {name}")
            for name, run in runs.items()
        }
    if source not in ("all", *runs):
        raise ConfigError(
            f"--calibrate-on {source}: must be all, each, or one of {', '.join(runs)}"
        )
    names = list(runs) if source == "all" else [source]
    table = StepTable.from_records(
        np.concatenate([runs[name].records for name in names]), f"the steps of {', '.join(names)}"
    )
    return dict.fromkeys(runs, table)
