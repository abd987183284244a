"""Charts of a measurement as plotly figures. Importing this module takes 0.2 s, so import it late.

Plotly reads some tags in a chart's texts: a name that came from outside is escaped before it gets
here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

if TYPE_CHECKING:
    pass

_INK, _GRID = "#17202a", "#e4e8ed"
#: Stays in seats that are drawn one by one; beyond that a bar is thinner than a pixel.
MOST_STAYS = 4000

#: Values of an axis; None leaves a gap.
type _Numbers = Sequence[float | None]
type _Values = _Numbers | np.ndarray
#: (x, y) of a point.
type _Place = tuple[float, float | None]

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
    x: _Values,
    y: _Values,
    colour: str,
    *,
    mode: str = "lines",
    dash: str = "solid",
) -> go.Scatter:
    """One curve; None in y leaves a gap."""
    style = {"color": colour, "width": 2.5, "dash": dash}
    return go.Scatter(name=name, x=x, y=y, mode=mode, line=style, marker={"color": colour})


class SeatSpan(NamedTuple):
    """A part of a stay in a seat, seconds of one clock."""

    seat: int
    start: float
    end: float
    #: The request's number.
    request: int

    @classmethod
    def phases(
        cls, seat: int, request: int, start: float, first_token: float | None, end: float
    ) -> Iterator[tuple[str, SeatSpan]]:
        """The prompt part of a stay (prefill), and the part in which tokens were generated
        (decode); those that take any time.
        """
        turn = end
        if first_token is not None:
            turn = min(max(first_token, start), end)
        if turn > start:
            yield "prefill", cls(seat, start, turn, request)
        if end > turn:
            yield "decode", cls(seat, turn, end, request)


def seat_bars(spans: Sequence[SeatSpan], zero: float, **style: Any) -> go.Bar:
    """A bar for each span. zero: of the time axis; style: plotly's."""
    return go.Bar(
        orientation="h",
        y=[span.seat for span in spans],
        base=[round(span.start - zero, 4) for span in spans],
        x=[round(span.end - span.start, 4) for span in spans],
        **style,
    )


#: Of a chart of seats: spans of one stay lie in one row, the first seat on top.
SEAT_ROWS = {"barmode": "overlay", "yaxis_autorange": "reversed"}
