"""`jitney simulate --measured FILE`: predict runs that were measured, and say how far off the prediction is."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jitney.engine.accuracy import MeasuredRun, read_runs
from jitney.engine.buckets import make_buckets
from jitney.engine.cli.bench_flags import slo_from
from jitney.engine.cli.simulate import deliver, describe, policies_of, source_of, step_times, timed_figures
from jitney.engine.config import Config
from jitney.engine.errors import ConfigError

if TYPE_CHECKING:
    from jitney.engine.simulator import EngineShape
    from jitney.engine.steptable import StepTimes


def run_measured(known: argparse.Namespace, config: Config) -> int:
    """Simulate the arrivals of every run in the file under that run's own limits; exit status 0."""
    from jitney.engine.simulator import simulate

    runs, wanted = read_runs(known.measured), policies_of(known)
    options = {"slo": slo_from(known), "price_per_hour": known.price_per_hour}
    chosen = {name: run for name, run in runs.items() if name in wanted}
    if not chosen:
        raise ConfigError(f"{known.measured} holds the runs {', '.join(runs)}, none of which is asked for")
    tables = calibrated(known, config, runs)
    report: dict[str, Any] = {"source": "; ".join(dict.fromkeys(source_of(tables[name]) for name in chosen)),
                              "engine": {}, "policies": {}, "measured": {}}
    for name, run in chosen.items():
        shape = shape_of(run, config)
        report["engine"] = describe(shape)
        report["policies"][name] = timed_figures(
            lambda name=name, run=run, shape=shape: simulate(
                run.arrivals, shape, tables[name], concurrency=known.concurrency or None, seed=known.seed), options)
        report["measured"][name] = run.figures(**options)
    deliver(known, report)
    return 0


def calibrated(known: argparse.Namespace, config: Config, runs: Mapping[str, MeasuredRun]) -> dict[str, StepTimes]:
    """The step times to predict each run with: what the flags ask for, else those of the runs themselves."""
    from jitney.engine.steptable import StepTable

    if known.table or known.records or known.chip:
        return dict.fromkeys(runs, step_times(known, config))
    if known.calibrate_on == "each":
        return {name: StepTable.from_records(run.records, f"the steps of {name}") for name, run in runs.items()}
    if known.calibrate_on not in ("all", *runs):
        raise ConfigError(f"--calibrate-on {known.calibrate_on}: must be all, each, or one of {', '.join(runs)}")
    names = list(runs) if known.calibrate_on == "all" else [known.calibrate_on]
    table = StepTable.from_records(np.concatenate([runs[name].records for name in names]),
                                   f"the steps of {', '.join(names)}")
    return dict.fromkeys(runs, table)


def shape_of(run: MeasuredRun, config: Config) -> EngineShape:
    """The engine that the run was measured on: its limits and pages, and the buckets of the settings."""
    from jitney.engine.simulator import EngineShape

    settings = config.engine
    buckets = make_buckets(max_seats=run.limits.max_seats, token_budget=settings.token_budget,
                           seat_sizes=settings.seat_buckets, token_sizes=settings.token_buckets)
    sizes = {bucket.tokens for bucket in buckets.all()}
    if not set(run.records["bucket_tokens"].tolist()) <= sizes:
        raise ConfigError("the run used other buckets: give the --token-budget, --seat-buckets and --token-buckets "
                          "that it was measured with")
    return EngineShape(run.limits, buckets, int(run.records["pages"][0]) + 1, settings.page_size)
