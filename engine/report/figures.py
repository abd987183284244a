"""Charts of a measurement as plotly figures. Importing this module takes 0.2 s, so import it late.

Plotly reads some tags in a chart's texts: a name that came from outside is escaped before it gets
here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from jitney.engine.report.tables import LEDGER_LABELS
from jitney.engine.telemetry.row_kinds import ROW_KIND_TABLE
from jitney.engine.types import JsonObject

if TYPE_CHECKING:
    from jitney.engine.telemetry.cost import Bill, Line
    from jitney.engine.telemetry.request_record import RequestRecord, SeatStay

_INK, _GRID, WARNING = "#17202a", "#e4e8ed", "#d55e00"
#: Colours that people with any kind of colour vision tell apart (Okabe and Ito, 2008).
HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", WARNING, "#7a6a00", "#5b6773")
_POLICY_COLOURS = {"static": WARNING, "dynamic": "#b8a800", "continuous": "#0072b2"}
_OTHER_COLOURS = ("#009e73", "#cc79a7", "#56b4e9", "#7a7f87")
_HELD_COLOUR, _IDLE_COLOUR = "#cbb8e4", _GRID
#: Stays in seats that are drawn one by one; beyond that a bar is thinner than a pixel.
MOST_STAYS = 4000
#: Points of a distribution's curve.
_CURVE_POINTS = 400

_AXIS = {"gridcolor": _GRID, "zeroline": False, "automargin": True}
_STYLE = go.layout.Template(
    layout={
        "title": {"x": 0, "xanchor": "left", "font": {"size": 15}},
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "font": {"family": "system-ui, sans-serif", "color": _INK, "size": 13},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "margin": {"l": 60, "r": 20, "t": 60, "b": 50},
        "height": 340,
        "hovermode": "closest",
        "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"},
    }
)


def figure(traces: Iterable[Any], title: str, x: str, y: str, **layout: Any) -> go.Figure:
    """A plain white chart; x and y are the axes' titles with their units, layout is plotly's."""
    titles = {"title_text": title, "xaxis_title_text": x, "yaxis_title_text": y}
    return go.Figure(list(traces), go.Layout(template=_STYLE, **titles, **layout))


def line(
    name: str,
    x: Sequence[float | None] | np.ndarray,
    y: Sequence[float | None] | np.ndarray,
    colour: str,
    *,
    mode: str = "lines",
    dash: str = "solid",
) -> go.Scatter:
    """One curve; None in y leaves a gap."""
    style = {"color": colour, "width": 2.5, "dash": dash}
    return go.Scatter(name=name, x=x, y=y, mode=mode, line=style, marker={"color": colour})


def _colour_of(name: str, number: int) -> str:
    """A policy's own colour, or the next of the others."""
    return _POLICY_COLOURS.get(name, _OTHER_COLOURS[number % len(_OTHER_COLOURS)])


class _Span(NamedTuple):
    """A part of a stay in a seat, seconds of the run's clock."""

    seat: int
    start: float
    end: float
    request: int


def seat_timeline(
    name: str, stays: Sequence[SeatStay], started: float, seats: int, until: float, *, held: bool
) -> go.Figure:
    """Who sat where: one bar for each stay, its prefill part apart.

    started: zero of the time axis. until: seconds that it shows, so that runs side by side share
    their scale. held: draw the seats that a batch keeps as well.
    """
    title = name
    if len(stays) > MOST_STAYS:
        title += f", the first {MOST_STAYS} stays"
    return figure(
        _stay_bars(sorted(stays, key=_start_of)[:MOST_STAYS], started, held=held),
        title,
        "seconds",
        "seat",
        barmode="overlay",
        bargap=0.12,
        height=120 + 18 * seats,
        xaxis_range=[0, until],
        yaxis_autorange="reversed",
        yaxis_dtick=max(1, seats // 8),
    )


def _stay_bars(stays: Sequence[SeatStay], started: float, *, held: bool) -> list[go.Bar]:
    prompts, outputs = _phases(stays)
    bars = [
        _spans("prompt", prompts, started, ROW_KIND_TABLE["prefill"].light),
        _spans("generating", outputs, started, ROW_KIND_TABLE["decode"].light),
    ]
    if held:
        bars.append(_spans("held for the batch", held_seats(stays), started, _HELD_COLOUR))
    return bars


def _phases(stays: Iterable[SeatStay]) -> tuple[list[_Span], list[_Span]]:
    """The prompt parts of stays, and the parts in which tokens were generated."""
    prompts, outputs = [], []
    for request, stay in stays:
        turns = stay.left if stay.first_token is None else stay.first_token
        prompts.append(_Span(stay.seat, stay.start, turns, request.number))
        if stay.first_token is not None:
            outputs.append(_Span(stay.seat, turns, stay.left, request.number))
    return prompts, outputs


def held_seats(stays: Sequence[SeatStay]) -> list[_Span]:
    """Seats whose request is done while others of its batch are not.

    A batch is over when nobody sits any more.
    """
    overs = np.array(_batch_ends(stays))
    held = []
    for request, stay in stays:
        over = float(overs[np.searchsorted(overs, stay.left)])
        if over > stay.left:
            held.append(_Span(stay.seat, stay.left, over, request.number))
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


def _spans(name: str, spans: Sequence[_Span], started: float, colour: str) -> go.Bar:
    seats, starts, ends, requests = _columns(spans)
    return go.Bar(
        orientation="h",
        name=name,
        marker={"color": colour, "line": {"color": "#ffffff", "width": 0.5}},
        y=seats,
        base=np.round(np.subtract(starts, started), 4).tolist(),
        x=np.round(np.subtract(ends, starts), 4).tolist(),
        customdata=requests,
        hovertemplate="request %{customdata}, seat %{y}<br>%{base:.2f} s, for %{x:.2f} s"
        f"<extra>{name}</extra>",
    )


def _columns(spans: Sequence[_Span]) -> tuple[list[Any], ...]:
    if not spans:
        return [], [], [], []
    return tuple(list(column) for column in zip(*spans, strict=True))


def _distribution(title: str, x: str, values: Mapping[str, Iterable[float | None]]) -> go.Figure:
    """Share of requests at or below each value, one curve a name; the x axis is logarithmic."""
    traces = []
    for number, (name, column) in enumerate(values.items()):
        known = [value for value in column if value is not None]
        if known:
            traces.append(_shares_below(name, known, _colour_of(name, number)))
    return figure(traces, title, x, "% of requests", xaxis_type="log")


def _shares_below(name: str, values: Sequence[float], colour: str) -> go.Scatter:
    share = np.linspace(0, 100, min(_CURVE_POINTS, max(2, len(values))))
    return line(name, np.percentile(values, share), share, colour)


def latency_charts(runs: Mapping[str, Sequence[RequestRecord]]) -> list[go.Figure]:
    """Time to first token and end to end, of served requests."""
    served = {name: list(filter(_is_served, requests)) for name, requests in runs.items()}
    first_tokens = {name: [each.ttft_s for each in requests] for name, requests in served.items()}
    ends = {name: [each.e2e_s for each in requests] for name, requests in served.items()}
    unit = "seconds from the intended arrival"
    return [
        _distribution("Time to first token", unit, first_tokens),
        _distribution("End to end", unit, ends),
    ]


def _is_served(request: RequestRecord) -> bool:
    return request.served


def tokens_over_time(runs: Mapping[str, tuple[np.ndarray, float]]) -> go.Figure:
    """Output tokens so far, from {name: (finish times and token counts [n, 2] f8, start)}."""
    traces = []
    for number, (name, (ends, started)) in enumerate(runs.items()):
        ordered = ends[np.argsort(ends[:, 0])]
        so_far = np.cumsum(ordered[:, 1])
        traces.append(line(name, ordered[:, 0] - started, so_far, _colour_of(name, number)))
    return figure(traces, "Delivered output tokens", "seconds", "tokens of finished requests")


def ledger_bars(bills: Mapping[str, Bill]) -> go.Figure:
    """Device time by what it was spent on, one bar per run."""
    names = list(bills)[::-1]
    traces = []
    for kind in LEDGER_LABELS:
        lines = [bills[name][kind] for name in names]
        if sum(line.nanoseconds for line in lines):
            traces.append(_ledger_bar(kind, names, lines))
    height = 140 + 50 * len(names)
    title = "Where the device's time went"
    return figure(traces, title, "seconds", "", barmode="stack", height=height)


def _ledger_bar(kind: str, names: list[str], lines: Sequence[Line]) -> go.Bar:
    style = ROW_KIND_TABLE.get(kind)
    colour = _IDLE_COLOUR if style is None else style.light
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


def request_costs(lines: Bill, price_per_hour: float | None) -> go.Figure:
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
        marker={"color": ROW_KIND_TABLE["decode"].light},
        hovertemplate=hover + "<extra></extra>",
    )
    return figure([trace], "Device time of each request", "rows computed for it", "seconds")


def curve(
    title: str,
    x: str,
    y: str,
    xs: Sequence[float | None],
    ys: Sequence[float | None],
    knee: int | None = None,
) -> go.Figure:
    """A line through points, with one of them marked as the knee; None leaves a gap."""
    traces = [line(y, xs, ys, _colour_of(y, 0), mode="lines+markers")]
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
        marker={"size": 13, "symbol": "diamond", "color": WARNING},
    )


def waits_over(
    x: str, at: Sequence[float], waits: Mapping[str, Sequence[float | None]], grew: Sequence[bool]
) -> go.Figure:
    """Time to first token over load or concurrency, one line for each percentile.

    Points at which the queue grew for the whole run are crossed out: there a wait is the length of
    the run. The y axis is logarithmic.
    """
    traces, crossed = [], []
    for number, (name, values) in enumerate(waits.items()):
        traces.append(line(name, at, values, _colour_of(name, number), mode="lines+markers"))
        crossed += _growing(at, values, grew)
    if crossed:
        traces.append(_crosses("the queue grew for the whole run", crossed, WARNING))
    return figure(traces, "Time to first token", x, "s", yaxis_type="log")


def _growing(
    at: Sequence[float], waits: Sequence[float | None], grew: Sequence[bool]
) -> list[tuple[float, float | None]]:
    """The points at which the queue grew; none where nothing is known."""
    points = zip(at, waits, grew, strict=True)
    return [(place, wait) for place, wait, growing in points if growing and wait]


def _crosses(name: str, points: Sequence[tuple[float, float | None]], colour: str) -> go.Scatter:
    xs, ys = zip(*points, strict=True)
    marker = {"size": 12, "symbol": "x", "color": colour}
    return go.Scatter(mode="markers", name=name, x=xs, y=ys, marker=marker)


def load_curve(simulated: Sequence[JsonObject], measured: Sequence[JsonObject]) -> go.Figure:
    """p99 time to first token over the load, a line for each policy; open marks: its queue grows
    without bound.

    simulated, measured: points of `cases.load_curve`; measured ones are drawn as crosses.
    """
    traces = []
    for number, policy in enumerate(simulated[0]["policies"]):
        colour = _colour_of(policy, number)
        traces.append(_simulated_waits(policy, simulated, colour))
        if measured:
            points = _waits_of(policy, measured)
            traces.append(_crosses(f"{policy}, measured", points, colour))
    x = "load, times what continuous batching can serve"
    return figure(traces, "p99 time to first token", x, "seconds", yaxis_type="log")


def _simulated_waits(policy: str, points: Sequence[JsonObject], colour: str) -> go.Scatter:
    xs, ys = zip(*_waits_of(policy, points), strict=True)
    symbols = [_load_symbol(point["policies"][policy]["share_of_capacity"]) for point in points]
    trace = line(policy, xs, ys, colour, mode="lines+markers")
    return trace.update(marker={"symbol": symbols, "size": 9})


def _waits_of(policy: str, points: Sequence[JsonObject]) -> list[tuple[float, float | None]]:
    """(load, p99 time to first token) of each point."""
    return [(point["load"], point["policies"][policy]["ttft_p99_s"]) for point in points]


def _load_symbol(share_of_capacity: float | None) -> str:
    if share_of_capacity is not None and share_of_capacity >= 1:
        return "circle-open"
    return "circle"
