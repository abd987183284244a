"""The page of `jitney bench policies --html`: of each case figures, seats, curves, ledger; and
waits over the load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from jitney.dashboard import (
    MOST_STAYS,
    SEAT_ROWS,
    Page,
    PageSection,
    SeatSpan,
    costliest_table,
    cross_table,
    curve_table,
    figure,
    figures_table,
    latency_charts,
    ledger_bars,
    ledgers_table,
    load_curve,
    ratio_table,
    seat_bars,
    tokens_over_time,
)
from jitney.engine.common.request_record import SeatStay
from jitney.engine.common.requests import JsonObject
from jitney.engine.common.row_kinds import ROW_KIND_TABLE
from jitney.engine.core import Bill
from jitney.engine.lab.backlog import QueueGrowth
from jitney.engine.lab.bench.offline import OfflineRun, PolicyRuns


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
    shown = [figures_table(case["policies"], case["share_of_capacity"])]
    if case["ratios"]:
        shown.append(ratio_table(case["ratios"]))
    notes = [*case_lines(case), "Latencies count from the time a request should have come."]
    return PageSection(f"Figures: {name}", notes, shown)


def _cross_errors(name: str, case: JsonObject) -> PageSection:
    table = cross_table(case["cross_errors"])
    return PageSection(f"Predicted from one another: {name}", [_CROSS_NOTE], [table])


_CROSS_NOTE = (
    "Step times are learned from the steps of one run, another is simulated with them, and the "
    "error is that of the simulated figure beside the measured one."
)


def _seats(name: str, runs: PolicyRuns) -> PageSection:
    until = max(run.seconds for run in runs.values())
    charts = [_seat_chart(policy, run, until) for policy, run in runs.items()]
    return PageSection(f"Seats: {name}", [_SEATS_NOTE], charts=charts)


#: Of seats whose requests are done while others of their batch are not.
_HELD_COLOUR = "#cbb8e4"
_SEATS_NOTE = "All runs share one time scale. White: the seat is empty."


def _seat_chart(policy: str, run: OfflineRun, until: float) -> go.Figure:
    held = policy != "continuous"
    seats = run.limits.max_seats
    return _seat_timeline(policy, run.stays, run.started, seats, until, held=held)


def _seat_timeline(
    name: str, stays: Sequence[SeatStay], started: float, seats: int, until: float, *, held: bool
) -> go.Figure:
    """Who sat where: one bar for each stay, its prefill part apart.

    started: zero of the time axis. until: seconds that it shows, so that runs side by side share
    their scale. held: draw the seats that a batch keeps as well.
    """
    if len(stays) > MOST_STAYS:
        name += f", the first {MOST_STAYS} stays"
    first = sorted(stays, key=_start_of)[:MOST_STAYS]
    chart = figure(_stay_bars(first, started, held=held), name, "seconds", "seat", **_TIMELINE)
    axes = {"xaxis_range": [0, until], "yaxis_dtick": max(1, seats // 8)}
    return chart.update_layout(height=120 + 18 * seats, **axes)


_TIMELINE = {"bargap": 0.12, **SEAT_ROWS}


def _stay_bars(stays: Sequence[SeatStay], started: float, *, held: bool) -> list[go.Bar]:
    phases: dict[str, list[SeatSpan]] = {"prefill": [], "decode": []}
    for request, stay in stays:
        times = stay.start, stay.first_token, stay.left
        for kind, span in SeatSpan.phases(stay.seat, request.number, *times):
            phases[kind].append(span)
    bars = [
        _named_bars("prompt", phases["prefill"], started, _colour_of("prefill")),
        _named_bars("generating", phases["decode"], started, _colour_of("decode")),
    ]
    if held:
        bars.append(_named_bars("held for the batch", _held_seats(stays), started, _HELD_COLOUR))
    return bars


def _held_seats(stays: Sequence[SeatStay]) -> list[SeatSpan]:
    """Seats whose request is done while others of its batch are not.

    A batch is over when nobody sits any more.
    """
    overs = np.array(_batch_ends(stays))
    held = []
    for request, stay in stays:
        over = float(overs[np.searchsorted(overs, stay.left)])
        if over > stay.left:
            held.append(SeatSpan(stay.seat, stay.left, over, request.number))
    return held


def _batch_ends(stays: Sequence[SeatStay]) -> list[float]:
    """When each batch was over, ascending."""
    ends: list[float] = []
    for _, stay in sorted(stays, key=_start_of):
        if not ends or stay.start >= ends[-1]:
            ends.append(stay.left)
        else:
            ends[-1] = max(ends[-1], stay.left)
    return ends


def _start_of(seat_stay: SeatStay) -> float:
    return seat_stay[1].start


def _named_bars(name: str, spans: Sequence[SeatSpan], started: float, colour: str) -> go.Bar:
    return seat_bars(
        spans,
        started,
        name=name,
        marker={"color": colour, **_EDGE},
        customdata=[span.request for span in spans],
        hovertemplate=f"{_SPAN_HOVER}<extra>{name}</extra>",
    )


_EDGE = {"line": {"color": "#ffffff", "width": 0.5}}
_SPAN_HOVER = "request %{customdata}, seat %{y}<br>%{base:.2f} s, for %{x:.2f} s"


def _colour_of(kind: str) -> str:
    """The colour of a kind of rows."""
    return ROW_KIND_TABLE[kind].light


def _over_time(name: str, runs: PolicyRuns) -> PageSection:
    requests = {policy: run.requests for policy, run in runs.items()}
    ends = {policy: (_ends_of(run), run.started) for policy, run in runs.items()}
    charts = [tokens_over_time(ends), *latency_charts(requests)]
    return PageSection(f"Over time: {name}", charts=charts)


def _ends_of(run: OfflineRun) -> np.ndarray:
    """Finish times and token counts [requests, 2]."""
    return np.array([(request.end, request.n_output) for request in run.requests])


def _ledger(name: str, runs: PolicyRuns, price_per_hour: float | None) -> PageSection:
    bills = {policy: run.costs for policy, run in runs.items()}
    table = ledgers_table(bills, price_per_hour)
    charts = [ledger_bars(bills)]
    return PageSection(f"Ledger: {name}", [_LEDGER_NOTE], [table], charts)


_LEDGER_NOTE = (
    "Where every computed row went. A step's time is split evenly over its rows, padding included."
)


def _request_shares(name: str, runs: PolicyRuns, price_per_hour: float | None) -> PageSection:
    """The costliest requests of continuous batching, or of the first policy that ran."""
    policy = "continuous" if "continuous" in runs else next(iter(runs))
    shares = runs[policy].request_shares
    table = costliest_table(shares, price_per_hour)
    chart = _request_costs(shares, price_per_hour)
    title = f"What each request took ({name}, {policy})"
    return PageSection(title, [_SHARES_NOTE], [table], [chart])


def _request_costs(lines: Bill, price_per_hour: float | None) -> go.Figure:
    """Device time of each request over the rows it computed."""
    hover = "request %{text}: %{x} rows, %{y:.3f} s"
    if price_per_hour is not None:
        hover += ", costs %{customdata:.3g}"
    trace = go.Scatter(
        mode="markers",
        x=[line.rows for line in lines.values()],
        y=[line.seconds for line in lines.values()],
        customdata=[line.money(price_per_hour or 0.0) for line in lines.values()],
        text=list(lines),
        marker={"color": _colour_of("decode")},
        hovertemplate=hover + "<extra></extra>",
    )
    return figure([trace], "Device time of each request", "rows computed for it", "seconds")


_SHARES_NOTE = (
    "Its rows' share of the steps they were computed in; padding is nobody's and stands in the "
    "ledger."
)


def _load_curve(report: JsonObject) -> PageSection:
    simulated, measured = report["load_curve"], report["measured_loads"]
    shown = [curve_table(points) for points in (simulated, measured) if points]
    chart = load_curve(simulated, measured)
    return PageSection("Waits over the load", [_CURVE_NOTE], shown, [chart])


_CURVE_NOTE = (
    "Load: times what continuous batching can serve. A wait in brackets is that of a queue that "
    "grows without bound: it says how long the run was."
)
