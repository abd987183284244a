"""Charts of benchmarks as plotly figures. Importing this module takes 0.2 s, so import it late.

Plotly interprets some tags in a chart's texts, so callers escape names from outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from jitney.engine.common.reports.figures import figure, line
from jitney.engine.common.request_record import RequestRecord
from jitney.engine.common.requests import JsonObject
from jitney.engine.common.row_kinds import ROW_KIND_TABLE
from jitney.engine.lab.bench.cost import Bill
from jitney.engine.lab.bench.tables import LEDGER_LABELS

_WARNING, _IDLE_COLOUR = "#d55e00", "#e4e8ed"
_POLICY_COLOURS = {"static": _WARNING, "dynamic": "#b8a800", "continuous": "#0072b2"}
_OTHER_COLOURS = ("#009e73", "#cc79a7", "#56b4e9", "#7a7f87")
#: Points of a distribution's curve.
_CURVE_POINTS = 400

#: Values of an axis; None leaves a gap.
type _Numbers = Sequence[float | None]
#: (x, y) of a point.
type _Place = tuple[float, float | None]


def _colour_of(name: str, number: int) -> str:
    """The policy's own colour, or the next free colour for another name."""
    return _POLICY_COLOURS.get(name, _OTHER_COLOURS[number % len(_OTHER_COLOURS)])


def latency_charts(runs: Mapping[str, Sequence[RequestRecord]]) -> list[go.Figure]:
    """Distributions of time to first token and end-to-end time of served requests."""
    return [
        _distribution("Time to first token", "ttft_s", runs),
        _distribution("End to end", "e2e_s", runs),
    ]


def _distribution(title: str, field: str, runs: Mapping[str, Sequence[RequestRecord]]) -> go.Figure:
    """Share of requests at or below each value, one curve a run; the x axis is logarithmic."""
    traces = []
    for number, (run, requests) in enumerate(runs.items()):
        values = [getattr(request, field) for request in requests if request.served]
        values = [value for value in values if value is not None]
        if values:
            share = np.linspace(0, 100, min(_CURVE_POINTS, max(2, len(values))))
            points = np.percentile(values, share)
            traces.append(line(run, points, share, _colour_of(run, number)))
    since = "seconds from the intended arrival"
    return figure(traces, title, since, "% of requests", xaxis_type="log")


def ledger_bars(bills: Mapping[str, Bill]) -> go.Figure:
    """Device time by kind of row, one bar per run."""
    names = list(bills)[::-1]
    traces = []
    for kind, label in LEDGER_LABELS.items():
        lines = [bills[name][kind] for name in names]
        if any(line.seconds > 0 for line in lines):
            colour = ROW_KIND_TABLE[kind].light if kind in ROW_KIND_TABLE else _IDLE_COLOUR
            bar = go.Bar(
                orientation="h",
                name=label,
                y=names,
                x=[line.seconds for line in lines],
                marker={"color": colour},
                customdata=[line.rows for line in lines],
                hovertemplate="%{x:.2f} s, %{customdata} rows" + f"<extra>{label}</extra>",
            )
            traces.append(bar)
    layout = {"barmode": "stack", "height": 140 + 50 * len(names)}
    return figure(traces, "Where the device's time went", "seconds", "", **layout)


def curve(
    title: str, x: str, y: str, xs: _Numbers, ys: _Numbers, knee: int | None = None
) -> go.Figure:
    """A line through points. knee: index of the point to mark; None in `ys` leaves a gap."""
    traces = [_marked(y, xs, ys, 0)]
    if knee is not None:
        mark = go.Scatter(
            mode="markers+text",
            x=[xs[knee]],
            y=[ys[knee]],
            name="knee",
            text=["knee"],
            textposition="top center",
            marker={"size": 13, "symbol": "diamond", "color": _WARNING},
        )
        traces.append(mark)
    return figure(traces, title, x, y, yaxis_rangemode="tozero", showlegend=False)


def waits_over(
    x: str, at: Sequence[float], waits: Mapping[str, Sequence[float | None]], grew: Sequence[bool]
) -> go.Figure:
    """Time to first token over load or concurrency, one line for each percentile.

    Points at which the queue grew for the whole run are crossed out, since their waits only depend
    on the length of the run. The y axis is logarithmic.
    """
    traces = [_marked(name, at, values, n) for n, (name, values) in enumerate(waits.items())]
    crossed = [
        (place, wait)
        for values in waits.values()
        for place, wait, growing in zip(at, values, grew, strict=True)
        if growing and wait
    ]
    if crossed:
        traces.append(_crosses("the queue grew for the whole run", crossed, _WARNING))
    return figure(traces, "Time to first token", x, "s", yaxis_type="log")


def _marked(name: str, xs: _Numbers, ys: _Numbers, number: int) -> go.Scatter:
    return line(name, xs, ys, _colour_of(name, number), mode="lines+markers")


def _crosses(name: str, points: Sequence[_Place], colour: str) -> go.Scatter:
    xs, ys = zip(*points, strict=True)
    marker = {"size": 12, "symbol": "x", "color": colour}
    return go.Scatter(mode="markers", name=name, x=xs, y=ys, marker=marker)


def load_curve(simulated: Sequence[JsonObject], measured: Sequence[JsonObject]) -> go.Figure:
    """p99 time to first token over the load, a line for each policy; open marks: the policy's queue
    grows without bound.

    simulated, measured: points of `compare.load_curve`; measured ones are drawn as crosses.
    """
    traces = []
    for number, policy in enumerate(simulated[0]["policies"]):
        shares = [point["policies"][policy]["share_of_capacity"] for point in simulated]
        symbols = ["circle-open" if (share or 0) >= 1 else "circle" for share in shares]
        xs, ys = zip(*_waits_of(policy, simulated), strict=True)
        trace = _marked(policy, xs, ys, number)
        traces.append(trace.update(marker={"symbol": symbols, "size": 9}))
        if measured:
            points, colour = _waits_of(policy, measured), _colour_of(policy, number)
            traces.append(_crosses(f"{policy}, measured", points, colour))
    x = "load, times what continuous batching can serve"
    return figure(traces, "p99 time to first token", x, "seconds", yaxis_type="log")


def _waits_of(policy: str, points: Sequence[JsonObject]) -> list[_Place]:
    """(load, p99 time to first token) of each point."""
    return [(point["load"], point["policies"][policy]["ttft_p99_s"]) for point in points]
