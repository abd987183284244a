"""The page of `jitney bench policies --html`: of each case figures, seats, curves, ledger; and
waits over the load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from plotly.graph_objects import Figure

from jitney.engine.bench.offline import OfflineRun, PolicyRuns
from jitney.engine.report import figures, tables
from jitney.engine.report.page import Page, PageSection
from jitney.engine.telemetry.backlog import QueueGrowth
from jitney.engine.types import JsonObject


def write_policies_page(
    path: str,
    report: JsonObject,
    runs: Mapping[str, PolicyRuns],
    summary: Sequence[str],
    price_per_hour: float | None,
) -> None:
    """Write the page. ConfigError if the file cannot be written."""
    sections: list[PageSection] = []
    for name, case in report["cases"].items():
        sections += _case_sections(name, case, runs[name], price_per_hour)
    if report["load_curve"]:
        sections.append(_load_curve(report))
    Page(_TITLE, summary, sections).write(path)


_TITLE = "Static, dynamic and continuous batching on the same requests"


def _case_sections(
    name: str, case: JsonObject, runs: PolicyRuns, price_per_hour: float | None
) -> list[PageSection]:
    return [
        _figures(name, case),
        _cross_errors(name, case),
        _seats(name, runs),
        _over_time(name, runs),
        _ledger(name, runs, price_per_hour),
        _request_shares(name, runs, price_per_hour),
    ]


def case_lines(case: JsonObject) -> list[str]:
    """What came, whether the answers agree, and whose queue grew for the whole run."""
    lines = [case["what"], _agreement(case["differences"])]
    for policy, figures_of in case["policies"].items():
        share = case["share_of_capacity"].get(policy)
        lines += _growth(policy, figures_of["backlog"], share)
    return lines


def _growth(policy: str, backlog: JsonObject | None, share: float | None) -> Iterator[str]:
    if backlog and backlog["grew"]:
        yield f"{policy}: {QueueGrowth(**backlog)}{_offered(share)}"


def _offered(share: float | None) -> str:
    if share is None:
        return ""
    return f"; it was offered {share:.2f} times what it can serve"


def _agreement(unlike: Sequence[JsonObject]) -> str:
    if not unlike:
        return "all policies gave every request the same tokens"
    requests = {difference["request"] for difference in unlike}
    examples = ", ".join(map(_example, unlike[:5]))
    return f"got other tokens under another policy: {len(requests)}; {examples}"


def _example(difference: JsonObject) -> str:
    where = f"request {difference['request']} from token {difference['at']}"
    return f"{where} ({' / '.join(difference['policies'])})"


def _figures(name: str, case: JsonObject) -> PageSection:
    shown = [tables.figures_table(case["policies"], case["share_of_capacity"])]
    if case["ratios"]:
        shown.append(tables.ratio_table(case["ratios"]))
    notes = [*case_lines(case), "Latencies count from the time a request should have come."]
    return PageSection(f"Figures: {name}", notes, shown)


def _cross_errors(name: str, case: JsonObject) -> PageSection:
    table = tables.cross_table(case["cross_errors"])
    return PageSection(f"Predicted from one another: {name}", [_CROSS_NOTE], [table])


_CROSS_NOTE = (
    "Step times are learned from the steps of one run, another is simulated with them, and the "
    "error is that of the simulated figure beside the measured one."
)


def _seats(name: str, runs: PolicyRuns) -> PageSection:
    until = max(run.seconds for run in runs.values())
    charts = [_seat_chart(policy, run, until) for policy, run in runs.items()]
    return PageSection(f"Seats: {name}", [_SEATS_NOTE], charts=charts)


_SEATS_NOTE = "All runs share one time scale. White: the seat is empty."


def _seat_chart(policy: str, run: OfflineRun, until: float) -> Figure:
    held = policy != "continuous"
    seats = run.limits.max_seats
    return figures.seat_timeline(policy, run.stays, run.started, seats, until, held=held)


def _over_time(name: str, runs: PolicyRuns) -> PageSection:
    requests = {policy: run.requests for policy, run in runs.items()}
    ends = {policy: (_ends_of(run), run.started) for policy, run in runs.items()}
    charts = [figures.tokens_over_time(ends), *figures.latency_charts(requests)]
    return PageSection(f"Over time: {name}", charts=charts)


def _ends_of(run: OfflineRun) -> np.ndarray:
    """Finish times and token counts [requests, 2]."""
    return np.array([(request.end, request.n_output) for request in run.requests])


def _ledger(name: str, runs: PolicyRuns, price_per_hour: float | None) -> PageSection:
    bills = {policy: run.costs for policy, run in runs.items()}
    table = tables.ledgers_table(bills, price_per_hour)
    charts = [figures.ledger_bars(bills)]
    return PageSection(f"Ledger: {name}", [_LEDGER_NOTE], [table], charts)


_LEDGER_NOTE = (
    "Where every computed row went. A step's time is split evenly over its rows, padding included."
)


def _request_shares(name: str, runs: PolicyRuns, price_per_hour: float | None) -> PageSection:
    """The costliest requests of continuous batching, or of the first policy that ran."""
    policy = "continuous" if "continuous" in runs else next(iter(runs))
    shares = runs[policy].request_shares
    table = tables.costliest_table(shares, price_per_hour)
    chart = figures.request_costs(shares, price_per_hour)
    title = f"What each request took ({name}, {policy})"
    return PageSection(title, [_SHARES_NOTE], [table], [chart])


_SHARES_NOTE = (
    "Its rows' share of the steps they were computed in; padding is nobody's and stands in the "
    "ledger."
)


def _load_curve(report: JsonObject) -> PageSection:
    simulated, measured = report["load_curve"], report["measured_loads"]
    shown = [tables.curve_table(points) for points in (simulated, measured) if points]
    chart = figures.load_curve(simulated, measured)
    return PageSection("Waits over the load", [_CURVE_NOTE], shown, [chart])


_CURVE_NOTE = (
    "Load: times what continuous batching can serve. A wait in brackets is that of a queue that "
    "grows without bound: it says how long the run was."
)
