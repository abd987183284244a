"""Reports: the last minutes of an engine as one self-contained HTML file."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from jitney.dashboard.latency import Latencies
from jitney.dashboard.request_detail import Steps
from jitney.dashboard.sse import Note
from jitney.dashboard.timeline import Window
from jitney.engine.common.history import History
from jitney.engine.common.reports.page import Page, PageSection, Table
from jitney.engine.common.request_record import RequestRecord
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.common.row_kinds import ROW_KIND_TABLE
from jitney.engine.server import EngineClient

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from jitney.engine.common.reports.figures import SeatSpan

#: Colours that people with any kind of colour vision tell apart (Okabe and Ito, 2008).
_HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7a6a00", "#5b6773")
_BINS = 240
#: Requests in the table of the slowest.
_SLOWEST = 20
_SLOWEST_NOTE = "End to end, and where the time went."
_HEIGHT = 300
#: Columns of `timeline.stay_columns` for the chart of the seats.
_PHASE_COLUMNS = ("seat", "request", "index", "from", "first_token", "to")
_LATENCIES = {"wait": "wait for a seat", "ttft": "first token", "itl": "between tokens"}
_REQUEST_HEADS = (
    "request",
    "prompt",
    "output",
    "queue s",
    "first token s",
    "all s",
    "end",
    "where it went",
)
#: Title and explanation of each chart.
_TITLES = {
    "seats": (
        "Seat timeline",
        "Rows are seats; a change of colour is a change of request, blank is an idle seat. "
        "Hatched: the prompt is being read.",
    ),
    "rate": ("Tokens per second", "Rows computed for prompts and for answers."),
    "queue": ("Seats taken and queue", "Sequences seated, and the most that waited."),
    "step": ("Step time", "Mean, longest, and the time in which the device had nothing to do."),
    "ledger": ("Where every computed row went", "Useful work at the bottom, waste on top."),
    "wait": (
        "Waiting",
        "95th percentiles of the wait for a seat, for the first token, and between tokens.",
    ),
}


class ReportData(NamedTuple):
    """The engine's figures at one moment; immutable."""

    title: str
    #: Model, device and time.
    summary: list[str]
    #: Sections before the charts, and after them.
    above: list[PageSection]
    below: list[PageSection]
    #: From `Window.timeline`.
    shown: JsonObject

    @classmethod
    def collect(
        cls, client: EngineClient, minutes: float, notes: Sequence[Note], now: float, wall: float
    ) -> Generator[None, None, ReportData]:
        """Collect the data of a report of the last `minutes`. Work for `TimeSlices`.

        notes: the page's newest warnings. now: time.monotonic(); wall: the same in time.time().
        """
        history = client.history
        window = Window.shown(history, now - 60 * minutes, now, now)
        start, end = window.start, window.end
        shown = yield from window.timeline(_BINS, now)
        made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(wall))
        span = f"The {minutes:g} min before {made}; state {client.state}."
        model = client.info.model.name if client.info else "no model"
        rows = [*_figure_rows(shown["bins"], end - start)]
        rows += _latency_rows(Latencies.between(history, start, end).summary())
        figures = Table((), rows, words=True)
        yield
        slowest = yield from _slowest(history, start, now)
        return cls(
            title=f"Jitney: {model}",
            summary=[_facts(client), span],
            above=[PageSection("Figures", [_headline(client)], [figures])],
            below=[slowest, *_notes(notes)],
            shown=shown,
        )

    def drawn(self) -> str:
        """The HTML. Drawing takes 0.1 s, and 0.5 s at first: work for another process, see
        `drawing`.
        """
        sections = [*self.above, *_chart_sections(self.shown), *self.below]
        return Page(self.title, self.summary, sections).html()


def _notes(notes: Sequence[Note]) -> list[PageSection]:
    if not notes:
        return []
    rows = [(note["level"], note["message"]) for note in notes]
    return [PageSection("Notes", tables=[Table((), rows, words=True)])]


def _facts(client: EngineClient) -> str:
    info = client.info
    if info is None:
        return "not ready"
    facts = f"{info.device.name}, {info.queue.policy}, "
    facts += f"{info.kernels.label} kernels, {info.sizes.seats} seats"
    return facts + _kernels_out(info.kernels.out)


def _kernels_out(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f"; kernels taken out because they were wrong here: {', '.join(names)}"


def _headline(client: EngineClient) -> str:
    seats, n_waiting = client.history.seats, client.history.n_waiting
    waiting = f"{n_waiting} waiting" if n_waiting else "none waiting"
    return f"{len(seats) - seats.count(None)} of {len(seats)} seats taken, {waiting}"


def _figure_rows(bins: JsonObject, span: float) -> list[tuple[str, str]]:
    rows = {kind: sum(values) for kind, values in bins["rows"].items()}
    return [
        ("output tokens a second", f"{(rows['decode'] + rows['accepted']) / span:,.1f}"),
        ("prompt tokens a second", f"{rows['prefill'] / span:,.1f}"),
        ("rows that were padding", _share_cell(rows["padding"], sum(rows.values()))),
        ("steps, mean time", _step_cell(sum(bins["steps"]), sum(bins["step_s"]))),
    ]


def _share_cell(part: int, whole: int) -> str:
    if not whole:
        return "–"
    return f"{part / whole:.1%}"


def _step_cell(steps: int, seconds: float) -> str:
    if not steps:
        return "none"
    return f"{steps:,}, {1000 * seconds / steps:.1f} ms"


def _latency_rows(summary: Mapping[str, JsonObject | None]) -> Iterator[tuple[str, str]]:
    for name, spread in summary.items():
        if spread is not None:
            shown = " / ".join(f"{1000 * value:,.0f} ms" for value in spread.values())
            yield f"{_LATENCIES[name]}, p50 / p95 / p99", shown


def _slowest(history: History, start: float, now: float) -> Generator[None, None, PageSection]:
    """The requests that took longest, and their three largest causes."""
    rows = []
    for request in sorted(history.ended(start), key=_quickness)[:_SLOWEST]:
        rows.append(_request_row(history, request, now))
        yield
    table = Table(_REQUEST_HEADS, rows, words=True)
    return PageSection("Slowest requests of this time", [_SLOWEST_NOTE], [table])


def _quickness(request: RequestRecord) -> float:
    return -(request.e2e_s or 0.0)


def _request_row(history: History, request: RequestRecord, now: float) -> tuple[str, ...]:
    """Cells under _REQUEST_HEADS."""
    times = request.queue_s, request.ttft_s, request.e2e_s
    return (
        f"{request.request_id} {request.index}",
        str(request.n_prompt),
        str(request.n_output),
        *map(_seconds, times),
        request.code or request.finish,
        _why(history, request, now),
    )


def _why(history: History, request: RequestRecord, now: float) -> str:
    why = Steps(history, request, now).causes()[:3]
    return "; ".join(f"{cause['seconds']:.2f} s {cause['message']}" for cause in why)


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}"


def _chart_sections(shown: JsonObject) -> Iterator[PageSection]:
    """A section for each of `_TITLES`."""
    charts = {"seats": _seat_chart(shown)} | _charts(_ChartBins(shown))
    for name, (title, text) in _TITLES.items():
        yield PageSection(title, [text], charts=[charts[name]])


class _ChartBins:
    """The columns of `Window.binned`, for charts."""

    def __init__(self, shown: JsonObject):
        bins = shown["bins"]
        self.columns = bins
        self.width: float = bins["width"]
        #: Middle of each bin, seconds before the end.
        self.x = [round(t + self.width / 2 - shown["to"], 3) for t in bins["t"]]

    def rows_a_second(self, kind: str) -> list[float]:
        return [round(rows / self.width, 3) for rows in self.columns["rows"][kind]]

    def ms_a_step(self, name: str) -> list[float | None]:
        """Mean milliseconds per step of a column; None for bins without steps."""
        pairs = zip(self.columns[name], self.columns["steps"], strict=True)
        return [_ms(seconds / steps) if steps else None for seconds, steps in pairs]

    def ms(self, name: str) -> list[float | None]:
        return [None if value is None else _ms(value) for value in self.columns[name]]


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


class _Curve(NamedTuple):
    """One line of a chart."""

    name: str
    #: Seconds before the end -> its values.
    values: Callable[[_ChartBins], Sequence[float | None]]
    #: Place of its colour in `_HUES`.
    hue: int
    #: Further options of plotly's line.
    style: JsonObject = MappingProxyType({})


_DOTS, _DASHES, _MARKERS = {"dash": "dot"}, {"dash": "dash"}, {"mode": "markers"}
#: Unit, lines and layout of each chart.
_LINE_CHARTS: dict[str, tuple[str, tuple[_Curve, ...], JsonDict]] = {
    "rate": (
        "tok/s",
        (
            _Curve("generated", lambda bins: bins.rows_a_second("decode"), 0),
            _Curve("prompt", lambda bins: bins.rows_a_second("prefill"), 1, _DOTS),
        ),
        {},
    ),
    "queue": (
        "sequences",
        (
            _Curve("seats taken", lambda bins: bins.columns["seats_busy"], 0),
            _Curve("waiting", lambda bins: bins.columns["waiting"], 5, _DOTS),
        ),
        {},
    ),
    "step": (
        "ms",
        (
            _Curve("mean", lambda bins: bins.ms_a_step("step_s"), 0),
            _Curve("longest", lambda bins: bins.ms("longest_step_s"), 5, _DOTS),
            _Curve("gap", lambda bins: bins.ms_a_step("gap_s"), 1, _DASHES),
        ),
        {},
    ),
    "wait": (
        "ms",
        (
            _Curve("for a seat", lambda bins: bins.ms("wait_p95"), 5, _MARKERS),
            _Curve("for the first token", lambda bins: bins.ms("ttft_p95"), 0, _MARKERS),
            _Curve("between tokens", lambda bins: bins.ms("itl_p95"), 2),
        ),
        {"yaxis_type": "log"},
    ),
}


def _charts(bins: _ChartBins) -> dict[str, go.Figure]:
    charts = {}
    for name, (unit, curves, layout) in _LINE_CHARTS.items():
        charts[name] = _chart(unit, [_line(curve, bins) for curve in curves], **layout)
    ledger = _chart("rows/s", _ledger_traces(bins), barmode="stack", bargap=0)
    return charts | {"ledger": ledger}


def _line(curve: _Curve, bins: _ChartBins) -> go.Scatter:
    from jitney.engine.common.reports.figures import line

    return line(curve.name, bins.x, curve.values(bins), _HUES[curve.hue], **curve.style)


def _chart(unit: str, traces: Sequence[Any], **layout: Any) -> go.Figure:
    from jitney.engine.common.reports.figures import figure

    settings = {"height": _HEIGHT, "margin_t": 30, "yaxis_rangemode": "tozero"} | layout
    return figure(traces, "", "seconds before the end", unit, **settings)


def _ledger_traces(bins: _ChartBins) -> list[go.Bar]:
    return [_ledger_bars(name, bins) for name in ROW_KIND_TABLE]


def _ledger_bars(name: str, bins: _ChartBins) -> go.Bar:
    import plotly.graph_objects as go

    kind = ROW_KIND_TABLE[name]
    marker = {"color": kind.light, "pattern": _pattern(kind.pattern)}
    return go.Bar(name=kind.label, x=bins.x, y=bins.rows_a_second(name), marker=marker)


def _pattern(shape: str) -> JsonDict:
    """White lines over the bar's own colour."""
    return {"shape": shape, "fillmode": "overlay", "fgcolor": "#fff", "solidity": 0.3}


def _seat_chart(shown: JsonObject) -> go.Figure:
    from jitney.engine.common.reports.figures import SEAT_ROWS

    style = {**SEAT_ROWS, "showlegend": False, "yaxis_rangemode": "normal"}
    height = min(900, 90 + 18 * max(1, shown["seats"]))
    begin = shown["from"] - shown["to"]
    return _chart("seat", _seat_traces(shown), height=height, xaxis_range=[begin, 0], **style)


def _seat_traces(shown: JsonObject) -> list[go.Bar]:
    from jitney.engine.common.reports.figures import MOST_STAYS, SeatSpan

    begin, end = shown["from"], shown["to"]
    columns = [shown["stays"][name][-MOST_STAYS:] for name in _PHASE_COLUMNS]
    #: Numbers of requests, in order of arrival.
    numbers: dict[str, int] = {}
    traces: dict[tuple[str, str], list[SeatSpan]] = {}
    for seat, request, index, start, first_token, left in zip(*columns, strict=True):
        number = numbers.setdefault(f"{request} {index}", len(numbers))
        last = end if left is None else min(left, end)
        for kind, span in SeatSpan.phases(seat, number, max(start, begin), first_token, last):
            traces.setdefault((kind, _HUES[number % len(_HUES)]), []).append(span)
    names = list(numbers)
    return [_phase_bars(*key, spans, end, names) for key, spans in traces.items()]


def _phase_bars(
    kind: str, hue: str, spans: Sequence[SeatSpan], end: float, names: Sequence[str]
) -> go.Bar:
    from jitney.engine.common.reports.figures import seat_bars

    return seat_bars(
        spans,
        end,
        width=0.86,
        hoverinfo="text",
        hovertext=[_hover(kind, span, names[span.request]) for span in spans],
        marker={
            "color": hue,
            "line": {"width": 0},
            "pattern": _pattern("/" if kind == "prefill" else ""),
        },
    )


def _hover(kind: str, span: SeatSpan, name: str) -> str:
    text = f"seat {span.seat}, {kind}, {name}, {span.end - span.start:.2f} s"
    return html.escape(text)  # plotly reads tags in texts
