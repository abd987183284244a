"""Charts of benchmarks as plotly figures. Importing this module takes 0.2 s, so import it late.

Plotly reads some tags in a chart's texts: a name that came from outside is escaped before it gets
here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from jitney.dashboard import figure, line
from jitney.engine.common.request_record import RequestRecord
from jitney.engine.common.requests import JsonObject
from jitney.engine.common.row_kinds import ROW_KIND_TABLE
from jitney.engine.lab.bench.cost import Bill, CostLine
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
    """A policy's own colour, or the next of the others."""
    return _POLICY_COLOURS.get(name, _OTHER_COLOURS[number % len(_OTHER_COLOURS)])


def _distribution(title: str, values: Mapping[str, Iterable[float | None]]) -> go.Figure:
    """Share of requests at or below each value, one curve a name; the x axis is logarithmic."""
    known = {name: [v for v in column if v is not None] for name, column in values.items()}
    named = enumerate(known.items())
    traces = [_shares_below(*item, _colour_of(item[0], n)) for n, item in named if item[1]]
    return figure(traces, title, _SINCE_ARRIVAL, "% of requests", xaxis_type="log")


_SINCE_ARRIVAL = "seconds from the intended arrival"


def _shares_below(name: str, values: Sequence[float], colour: str) -> go.Scatter:
    share = np.linspace(0, 100, min(_CURVE_POINTS, max(2, len(values))))
    return line(name, np.percentile(values, share), share, colour)


def latency_charts(runs: Mapping[str, Sequence[RequestRecord]]) -> list[go.Figure]:
    """Time to first token and end to end, of served requests."""
    return [
        _distribution("Time to first token", _of_served(runs, "ttft_s")),
        _distribution("End to end", _of_served(runs, "e2e_s")),
    ]


def _of_served(
    runs: Mapping[str, Sequence[RequestRecord]], name: str
) -> dict[str, list[float | None]]:
    return {run: _served_values(requests, name) for run, requests in runs.items()}


def _served_values(requests: Sequence[RequestRecord], name: str) -> list[float | None]:
    return [getattr(request, name) for request in requests if request.served]


def ledger_bars(bills: Mapping[str, Bill]) -> go.Figure:
    """Device time by what it was spent on, one bar per run."""
    names = list(bills)[::-1]
    by_kind = {kind: [bills[name][kind] for name in names] for kind in LEDGER_LABELS}
    spent = {kind: lines for kind, lines in by_kind.items() if any(map(_took_time, lines))}
    traces = [_ledger_bar(kind, names, lines) for kind, lines in spent.items()]
    layout = {"barmode": "stack", "height": 140 + 50 * len(names)}
    return figure(traces, "Where the device's time went", "seconds", "", **layout)


def _took_time(line: CostLine) -> bool:
    return line.nanoseconds > 0


def _ledger_bar(kind: str, names: list[str], lines: Sequence[CostLine]) -> go.Bar:
    colour = ROW_KIND_TABLE[kind].light if kind in ROW_KIND_TABLE else _IDLE_COLOUR
    label = LEDGER_LABELS[kind]
    return go.Bar(
        orientation="h",
        name=label,
        y=names,
        x=[line.seconds for line in lines],
        marker={"color": colour},
        customdata=[line.rows for line in lines],
        hovertemplate="%{x:.2f} s, %{customdata} rows" + f"<extra>{label}</extra>",
    )


def curve(
    title: str, x: str, y: str, xs: _Numbers, ys: _Numbers, knee: int | None = None
) -> go.Figure:
    """A line through points, with one of them marked as the knee; None leaves a gap."""
    traces = [_marked(y, xs, ys, 0)]
    if knee is not None:
        traces.append(_knee_mark(xs[knee], ys[knee]))
    return figure(traces, title, x, y, yaxis_rangemode="tozero", showlegend=False)


def _knee_mark(x: float | None, y: float | None) -> go.Scatter:
    return go.Scatter(
        mode="markers+text",
        x=[x],
        y=[y],
        name="knee",
        text=["knee"],
        textposition="top center",
        marker={"size": 13, "symbol": "diamond", "color": _WARNING},
    )


def waits_over(
    x: str, at: Sequence[float], waits: Mapping[str, Sequence[float | None]], grew: Sequence[bool]
) -> go.Figure:
    """Time to first token over load or concurrency, one line for each percentile.

    Points at which the queue grew for the whole run are crossed out: there a wait is the length of
    the run. The y axis is logarithmic.
    """
    traces = [_marked(name, at, values, n) for n, (name, values) in enumerate(waits.items())]
    crossed = [point for values in waits.values() for point in _growing(at, values, grew)]
    if crossed:
        traces.append(_crosses("the queue grew for the whole run", crossed, _WARNING))
    return figure(traces, "Time to first token", x, "s", yaxis_type="log")


def _marked(name: str, xs: _Numbers, ys: _Numbers, number: int) -> go.Scatter:
    """The line of that number, with its points."""
    return line(name, xs, ys, _colour_of(name, number), mode="lines+markers")


def _growing(at: Sequence[float], waits: _Numbers, grew: Sequence[bool]) -> list[_Place]:
    """The points at which the queue grew; none where nothing is known."""
    points = zip(at, waits, grew, strict=True)
    return [(place, wait) for place, wait, growing in points if growing and wait]


def _crosses(name: str, points: Sequence[_Place], colour: str) -> go.Scatter:
    xs, ys = zip(*points, strict=True)
    marker = {"size": 12, "symbol": "x", "color": colour}
    return go.Scatter(mode="markers", name=name, x=xs, y=ys, marker=marker)


def load_curve(simulated: Sequence[JsonObject], measured: Sequence[JsonObject]) -> go.Figure:
    """p99 time to first token over the load, a line for each policy; open marks: its queue grows
    without bound.

    simulated, measured: points of `compare.load_curve`; measured ones are drawn as crosses.
    """
    traces = []
    for number, policy in enumerate(simulated[0]["policies"]):
        traces += _waits_lines(policy, number, simulated, measured)
    x = "load, times what continuous batching can serve"
    return figure(traces, "p99 time to first token", x, "seconds", yaxis_type="log")


def _waits_lines(
    policy: str, number: int, simulated: Sequence[JsonObject], measured: Sequence[JsonObject]
) -> Iterator[go.Scatter]:
    yield _simulated_waits(policy, number, simulated)
    if measured:
        points, colour = _waits_of(policy, measured), _colour_of(policy, number)
        yield _crosses(f"{policy}, measured", points, colour)


def _simulated_waits(policy: str, number: int, points: Sequence[JsonObject]) -> go.Scatter:
    symbols = [_load_symbol(point["policies"][policy]["share_of_capacity"]) for point in points]
    xs, ys = zip(*_waits_of(policy, points), strict=True)
    trace = _marked(policy, xs, ys, number)
    return trace.update(marker={"symbol": symbols, "size": 9})


def _waits_of(policy: str, points: Sequence[JsonObject]) -> list[_Place]:
    """(load, p99 time to first token) of each point."""
    return [(point["load"], point["policies"][policy]["ttft_p99_s"]) for point in points]


def _load_symbol(share_of_capacity: float | None) -> str:
    if share_of_capacity is not None and share_of_capacity >= 1:
        return "circle-open"
    return "circle"
