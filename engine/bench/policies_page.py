"""The page of `jitney bench policies --html`: of each case figures, seats, curves, ledger; and
waits over the load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jitney.engine.bench.cases import case_lines
from jitney.engine.bench.offline import Measured
from jitney.engine.report import figures, tables
from jitney.engine.report.page import Section, write_page
from jitney.engine.telemetry.cost import bill


def write_policies_page(
    path: str,
    report: Mapping[str, Any],
    runs: Mapping[str, Mapping[str, Measured]],
    summary: Sequence[str],
    price_per_hour: float | None,
) -> None:
    """Write the page. ConfigError if the file cannot be written."""
    sections: list[Section] = []
    for case, found in report["cases"].items():
        sections += case_sections(case, found, runs[case], price_per_hour)
    if report["load_curve"]:
        sections.append(load_section(report))
    write_page(
        path, "Static, dynamic and continuous batching on the same requests", summary, sections
    )


def case_sections(
    case: str, found: Mapping[str, Any], runs: Mapping[str, Measured], price_per_hour: float | None
) -> list[Section]:
    """A case's parts: figures and errors, seats, curves, ledger, the costliest requests."""
    until = max(run.seconds for run in runs.values())
    bills = {name: bill(run.records, run.seconds) for name, run in runs.items()}
    timelines = [
        figures.seat_timeline(
            name, run.rides, run.started, run.limits.max_seats, until, held=name != "continuous"
        )
        for name, run in runs.items()
    ]
    ends = {
        name: (np.array([(t.finished, t.n_output) for t in run.times]), run.started)
        for name, run in runs.items()
    }
    best = "continuous" if "continuous" in runs else next(iter(runs))
    shares, _ = runs[best].riders.bill(runs[best].records)
    shown = [tables.figures_table(found["policies"])]
    if found["ratios"]:
        shown.append(tables.ratio_table(found["ratios"]))
    notes = [*case_lines(found), "Latencies count from the time a request should have come."]
    return [
        Section(f"Figures: {case}", notes, shown),
        Section(
            f"Predicted from one another: {case}",
            [tables.CROSS_NOTE],
            [tables.cross_table(found["cross_errors"])],
        ),
        Section(
            f"Seats: {case}",
            ["All runs share one time scale. White: the seat is empty."],
            charts=timelines,
        ),
        Section(
            f"Over time: {case}",
            charts=[
                figures.tokens_over_time(ends),
                *figures.latency_charts({name: run.times for name, run in runs.items()}),
            ],
        ),
        Section(
            f"Ledger: {case}",
            [
                "Where every computed row went. A step's time is split evenly over its rows, "
                "padding included."
            ],
            [tables.ledgers_table(bills, price_per_hour)],
            [figures.ledger_bars(bills)],
        ),
        Section(
            f"What each request took ({case}, {best})",
            [
                "Its rows' share of the steps they were computed in; "
                "padding is nobody's and stands in the ledger."
            ],
            [tables.costliest_table(shares, price_per_hour)],
            [figures.request_costs(shares, price_per_hour)],
        ),
    ]


def load_section(report: Mapping[str, Any]) -> Section:
    """p99 time to first token over the load, simulated and, where it was asked for, measured."""
    shown = [tables.curve_table(report["load_curve"])]
    if report["measured_loads"]:
        shown.append(tables.curve_table(report["measured_loads"]))
    return Section(
        "Waits over the load",
        [tables.CURVE_NOTE],
        shown,
        [figures.load_curve(report["load_curve"], report["measured_loads"])],
    )
