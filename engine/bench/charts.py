"""Charts of a measurement as plotly figures, written as the plain objects that plotly.js takes:
{"data", "layout"}.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jitney.engine.records import ROW_KINDS
from jitney.engine.simulation.simulator import Ride
from jitney.engine.telemetry.cost import IDLE, Line
from jitney.engine.telemetry.row_kinds import ROW_KIND_TABLE
from jitney.engine.telemetry.summary import RequestTimes

Figure = dict[str, Any]

#: The page's colours for the same things.
ROW_COLOURS = {kind.name: kind.light for kind in ROW_KIND_TABLE.values()} | {IDLE: "#e4e8ed"}
HELD, INK, GRID = "#cbb8e4", "#17202a", "#e4e8ed"
POLICY_COLOURS = {"static": "#d55e00", "dynamic": "#b8a800", "continuous": "#0072b2"}
OTHER_COLOURS = ("#009e73", "#cc79a7", "#56b4e9", "#7a7f87")
#: Requests whose rides are drawn one by one; beyond that a bar is thinner than a pixel.
MOST_RIDES = 4000
#: Points of a distribution's curve.
CURVE_POINTS = 400


def layout(title: str, x: str, y: str, **more: Any) -> dict[str, Any]:
    """A plain white chart; axis titles carry the units."""
    axis = {"gridcolor": GRID, "zeroline": False, "automargin": True}
    return {
        "title": {"text": title, "x": 0, "xanchor": "left", "font": {"size": 15}},
        "xaxis": {**axis, "title": {"text": x}} | more.pop("xaxis", {}),
        "yaxis": {**axis, "title": {"text": y}} | more.pop("yaxis", {}),
        "font": {"family": "system-ui, sans-serif", "color": INK, "size": 13},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "margin": {"l": 60, "r": 20, "t": 60, "b": 50},
        "height": 340,
        "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"},
    } | more


def seat_timeline(
    name: str, rides: Sequence[Ride], started: float, seats: int, until: float, *, held: bool
) -> Figure:
    """Who sat where: one bar per ride, its prefill part apart. held: draw the seats that a batch
    keeps as well.

    until: seconds that the time axis shows, so that runs side by side share their scale.
    """
    shown = sorted(rides, key=lambda ride: ride.start)[:MOST_RIDES]
    first = [(r.seat, r.start, min(r.end, r.first_token or r.end), r.request) for r in shown]
    later = [(r.seat, r.first_token, r.end, r.request) for r in shown if r.first_token is not None]
    traces = [
        _bars("prompt", first, started, ROW_COLOURS["prefill"]),
        _bars("generating", later, started, ROW_COLOURS["decode"]),
    ]
    if held:
        traces.append(_bars("held for the batch", held_seats(shown), started, HELD))
    left_out = f", the first {MOST_RIDES} rides" if len(rides) > MOST_RIDES else ""
    return {
        "data": traces,
        "layout": layout(
            f"{name}{left_out}",
            "seconds",
            "seat",
            barmode="overlay",
            bargap=0.12,
            height=120 + 18 * seats,
            xaxis={"range": [0, until]},
            yaxis={"autorange": "reversed", "dtick": max(1, seats // 8)},
        ),
    }


def held_seats(rides: Sequence[Ride]) -> list[tuple[int, float, float, int]]:
    """(seat, from, to, request) of seats whose passenger is done while others of its batch ride on.

    A batch is over when nobody rides any more.
    """
    overs, open_until = [], -np.inf
    for ride in sorted(rides, key=lambda ride: ride.start):
        if ride.start >= open_until > -np.inf:
            overs.append(open_until)
        open_until = max(open_until, ride.end)
    ends = np.array([*overs, open_until])
    return [
        (r.seat, r.end, over, r.request)
        for r in rides
        if (over := float(ends[np.searchsorted(ends, r.end)])) > r.end
    ]


def _bars(
    name: str, spans: Iterable[tuple[int, float, float, int]], started: float, colour: str
) -> dict[str, Any]:
    rows = list(spans)
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "marker": {"color": colour, "line": {"color": "#ffffff", "width": 0.5}},
        "y": [seat for seat, *_ in rows],
        "base": [round(begin - started, 4) for _, begin, _, _ in rows],
        "x": [round(end - begin, 4) for _, begin, end, _ in rows],
        "text": [f"request {request}" for *_, request in rows],
        "textposition": "none",
        "hovertemplate": "%{text}, seat %{y}<br>%{base:.2f} s, for %{x:.2f} s<extra>"
        + name
        + "</extra>",
    }


def distribution(title: str, x: str, values: Mapping[str, Iterable[float | None]]) -> Figure:
    """Share of requests at or below each value, one curve a name; the x axis is logarithmic."""
    traces = []
    for number, (name, column) in enumerate(values.items()):
        known = np.sort([value for value in column if value is not None])
        if len(known):
            share = np.linspace(0, 100, min(CURVE_POINTS, max(2, len(known))))
            traces.append(_line(name, np.percentile(known, share), share, number))
    return {"data": traces, "layout": layout(title, x, "% of requests", xaxis={"type": "log"})}


def latency_charts(runs: Mapping[str, Sequence[RequestTimes]]) -> list[Figure]:
    """Time to first token and end to end, of served requests."""
    served = {name: [t for t in times if t.served] for name, times in runs.items()}
    return [
        distribution(
            "Time to first token",
            "seconds from the intended arrival",
            {name: [t.ttft_s for t in times] for name, times in served.items()},
        ),
        distribution(
            "End to end",
            "seconds from the intended arrival",
            {name: [t.e2e_s for t in times] for name, times in served.items()},
        ),
    ]


def tokens_over_time(runs: Mapping[str, tuple[np.ndarray, float]]) -> Figure:
    """Output tokens so far, from {name: (finish times and token counts [n, 2] f8, start)}."""
    traces = []
    for number, (name, (ends, started)) in enumerate(runs.items()):
        ordered = ends[np.argsort(ends[:, 0])]
        traces.append(_line(name, ordered[:, 0] - started, np.cumsum(ordered[:, 1]), number))
    return {
        "data": traces,
        "layout": layout("Delivered output tokens", "seconds", "tokens of finished requests"),
    }


def ledger_bars(bills: Mapping[str, Mapping[str, Line]]) -> Figure:
    """Device time by what it was spent on, one bar per run."""
    names = list(bills)[::-1]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": kind.replace("_", " "),
            "y": names,
            "x": [bills[name][kind].seconds for name in names],
            "marker": {"color": ROW_COLOURS[kind]},
            "customdata": [bills[name][kind].rows for name in names],
            "hovertemplate": "%{x:.2f} s, %{customdata} rows<extra>"
            + kind.replace("_", " ")
            + "</extra>",
        }
        for kind in (*ROW_KINDS, IDLE)
        if any(bills[name][kind].nanoseconds for name in names)
    ]
    return {
        "data": traces,
        "layout": layout(
            "Where the device's time went",
            "seconds",
            "",
            barmode="stack",
            height=140 + 50 * len(names),
        ),
    }


def request_costs(lines: Mapping[str, Line], price_per_hour: float | None) -> Figure:
    """Device time of each request over the rows it computed."""
    money = [
        line.money(price_per_hour) if price_per_hour is not None else None
        for line in lines.values()
    ]
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "markers",
                "x": [line.rows for line in lines.values()],
                "y": [line.seconds for line in lines.values()],
                "customdata": money,
                "text": [f"request {name}" for name in lines],
                "marker": {"color": ROW_COLOURS["decode"]},
                "hovertemplate": "%{text}: %{x} rows, %{y:.3f} s"
                + (", costs %{customdata:.3g}" if price_per_hour is not None else "")
                + "<extra></extra>",
            }
        ],
        "layout": layout("Device time of each request", "rows computed for it", "seconds"),
    }


def curve(
    title: str, x: str, y: str, points: Sequence[tuple[float, float]], knee: int | None = None
) -> Figure:
    """A line through points, with one of them marked as the knee."""
    xs, ys = [point[0] for point in points], [point[1] for point in points]
    traces = [_line(y, xs, ys, 0) | {"mode": "lines+markers", "showlegend": False}]
    if knee is not None:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers+text",
                "x": [xs[knee]],
                "y": [ys[knee]],
                "name": "knee",
                "text": ["knee"],
                "textposition": "top center",
                "showlegend": False,
                "marker": {"size": 13, "symbol": "diamond", "color": "#d55e00"},
            }
        )
    return {"data": traces, "layout": layout(title, x, y, yaxis={"rangemode": "tozero"})}


def waits_over(
    x: str, at: Sequence[float], waits: Mapping[str, Sequence[float | None]], grew: Sequence[bool]
) -> Figure:
    """Time to first token over load or concurrency, one line for each percentile; points at which
    the queue grew for the whole run are crossed out, since there a wait is the length of the run.
    The y axis is logarithmic."""
    traces = []
    for number, (name, values) in enumerate(waits.items()):
        known = [(place, wait) for place, wait in zip(at, values, strict=True) if wait]
        line = _line(name, [place for place, _ in known], [wait for _, wait in known], number)
        traces.append(line | {"mode": "lines+markers"})
    crossed = [
        (place, wait)
        for values in waits.values()
        for place, wait, growing in zip(at, values, grew, strict=True)
        if growing and wait
    ]
    if crossed:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "the queue grew for the whole run",
                "x": [float(place) for place, _ in crossed],
                "y": [float(wait) for _, wait in crossed],
                "marker": {"size": 13, "symbol": "x", "color": "#d55e00"},
            }
        )
    return {"data": traces, "layout": layout("Time to first token", x, "s", yaxis={"type": "log"})}


def load_curve(
    simulated: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]]
) -> Figure:
    """p99 time to first token over the load, a line for each policy; open marks: its queue grows
    without bound.

    simulated, measured: points of `cases.load_curve`; measured ones are drawn as crosses.
    """
    traces = []
    for number, policy in enumerate(simulated[0]["policies"]):
        found = [point["policies"][policy] for point in simulated]
        line = _line(
            policy,
            [point["load"] for point in simulated],
            [one["ttft_p99_s"] or 0.0 for one in found],
            number,
        )
        symbols = [
            "circle-open" if (one["share_of_capacity"] or 0.0) >= 1 else "circle" for one in found
        ]
        traces.append(line | {"mode": "lines+markers", "marker": {"symbol": symbols, "size": 9}})
        if measured:
            seen = _line(
                f"{policy}, measured",
                [point["load"] for point in measured],
                [point["policies"][policy]["ttft_p99_s"] or 0.0 for point in measured],
                number,
            )
            colour = line["line"]["color"]
            traces.append(
                seen | {"mode": "markers", "marker": {"symbol": "x", "size": 11, "color": colour}}
            )
    return {
        "data": traces,
        "layout": layout(
            "p99 time to first token",
            "load, times what continuous batching can serve",
            "seconds",
            yaxis={"type": "log"},
        ),
    }


def _line(name: str, x: Iterable[float], y: Iterable[float], number: int) -> dict[str, Any]:
    colour = POLICY_COLOURS.get(name, OTHER_COLOURS[number % len(OTHER_COLOURS)])
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [float(value) for value in x],
        "y": [float(value) for value in y],
        "line": {"color": colour, "width": 2.5},
    }
