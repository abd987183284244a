"""The last minutes as one HTML file that needs nothing else: to keep, to send, to put beside a
ticket.
"""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any

import msgspec

from jitney.dashboard import latency, timeline
from jitney.dashboard.assets import PLOTLY
from jitney.dashboard.request_detail import Steps, causes
from jitney.engine.process.client import EngineClient
from jitney.engine.telemetry.history import History
from jitney.engine.telemetry.row_kinds import ROW_KIND_TABLE

BINS = 240
#: Most stays drawn in the seat timeline, and requests in the table.
MAX_DRAWN, SLOWEST = 4000, 20
#: Colours that people with any kind of colour vision tell apart (Okabe and Ito, 2008), taken in
#: turn by sequences.
HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7a6a00", "#5b6773")


def report(
    client: EngineClient, minutes: float, notes: Sequence[dict[str, Any]], now: float, wall: float
) -> str:
    """HTML of the last `minutes`; some tens of milliseconds of work, once `plotly` has been
    called.
    """
    history = client.history
    start, end = timeline.window(history, now - 60 * minutes, now, now)
    shown = timeline.timeline(history, start, end, BINS, now)
    charts = draw(shown)
    info = client.info
    model = info.model if info else "no model"
    facts = (
        f"{info.device}, {info.policy}, {info.kernels} kernels, {info.seats} seats"
        if info
        else "not ready"
    )
    if info and info.kernels_out:
        facts += f"; kernels taken out because they were wrong here: {', '.join(info.kernels_out)}"
    told = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(wall))
    return _template().substitute(
        title=html.escape(f"Jitney: {model}"),
        headline=html.escape(headline(client)),
        subtitle=html.escape(f"{facts}. The {minutes:g} min before {told}; state {client.state}."),
        figures=table(("", ""), figures(history, shown, start, end)),
        charts="\n".join(
            f'<h2>{title}</h2><p class="sub">{text}</p><div id="{name}"></div>'
            for name, (title, text) in TITLES.items()
        ),
        slowest=table(
            (
                "request",
                "prompt",
                "output",
                "queue s",
                "first token s",
                "all s",
                "end",
                "where it went",
            ),
            slowest(history, start, now),
        ),
        notes="<h2>Notes</h2>" + table(("", ""), ((n["level"], n["msg"]) for n in notes))
        if notes
        else "",
        plotly=plotly(),
        data=msgspec.json.encode(charts).decode().replace("</", "<\\/"),
    )


@cache
def _template() -> Template:
    return Template((files("jitney.dashboard") / "report.html").read_text(encoding="utf-8"))


@cache
def plotly() -> str:
    """plotly.js as it can stand in a page."""
    text = (files("plotly") / "package_data" / PLOTLY).read_text(encoding="utf-8")
    return text.replace("</script", "<\\/script")


TITLES = {
    "seats": (
        "Seat timeline",
        "Rows are seats; a change of colour is a change of passenger, blank is an idle seat. "
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


def headline(client: EngineClient) -> str:
    """Is it full, and does anybody wait?"""
    history = client.history
    taken = sum(request is not None for request in history.seats)
    waiting = history.n_waiting
    return (
        f"{taken} of {len(history.seats)} seats taken, "
        f"{f'{waiting} waiting' if waiting else 'nobody waits'}"
    )


def figures(
    history: History, shown: dict[str, Any], start: float, end: float
) -> list[tuple[str, str]]:
    """The main numbers in words."""
    bins, span = shown["bins"], end - start
    rows = {kind: sum(values) for kind, values in bins["rows"].items()}
    total, steps = sum(rows.values()), sum(bins["steps"])
    told = [
        ("output tokens a second", f"{rows['decode'] / span:,.1f}"),
        ("prompt tokens a second", f"{rows['prefill'] / span:,.1f}"),
        ("rows that were padding", f"{rows['padding'] / total:.1%}" if total else "–"),
        (
            "steps, mean time",
            f"{steps:,}, {1000 * sum(bins['step_s']) / steps:.1f} ms" if steps else "none",
        ),
    ]
    names = {"wait": "wait for a seat", "ttft": "first token", "itl": "between tokens"}
    for name, spread in latency.summary(history, start, end).items():
        if spread is not None:
            told.append(
                (
                    f"{names[name]}, p50 / p95 / p99",
                    " / ".join(f"{1000 * value:,.0f} ms" for value in spread.values()),
                )
            )
    return told


def slowest(history: History, start: float, now: float) -> list[tuple[str, ...]]:
    """The requests that took longest, and their three largest causes."""
    ended = sorted(history.ended(start), key=lambda request: -(request.e2e_s or 0.0))[:SLOWEST]
    rows = []
    for request in ended:
        why = causes(request, Steps(history, request, now), now)[:3]
        rows.append(
            (
                f"{request.request_id} {request.index}",
                str(request.n_prompt),
                str(request.n_output),
                _s(request.queue_s),
                _s(request.ttft_s),
                _s(request.e2e_s),
                request.code or request.finish,
                "; ".join(f"{cause['seconds']:.2f} s {cause['msg']}" for cause in why),
            )
        )
    return rows


def _s(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows of a table; every cell is text, whatever it holds."""
    lines = (
        ["<tr>" + "".join(f"<th>{html.escape(name)}</th>" for name in head) + "</tr>"]
        if any(head)
        else []
    )
    lines += [
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    ]
    return "".join(lines)


def draw(shown: dict[str, Any]) -> dict[str, Any]:
    """Plotly figures by the id of their place; x is seconds before the end."""
    bins, end = shown["bins"], shown["to"]
    x = [round(t + bins["width"] / 2 - end, 3) for t in bins["t"]]
    width = bins["width"]

    def a_second(values: list[float]) -> list[float]:
        return [round(value / width, 3) for value in values]

    def a_step(values: list[float]) -> list[float | None]:
        return [
            round(1000 * value / n, 3) if n else None
            for value, n in zip(values, bins["steps"], strict=True)
        ]

    def ms(values: list[float | None]) -> list[float | None]:
        return [None if value is None else round(1000 * value, 3) for value in values]

    return {
        "seats": seat_figure(shown),
        "rate": figure(
            "tok/s",
            line(x, a_second(bins["rows"]["decode"]), "generated", HUES[0]),
            line(x, a_second(bins["rows"]["prefill"]), "prompt", HUES[1], "dot"),
        ),
        "queue": figure(
            "sequences",
            line(x, bins["seats_busy"], "seats taken", HUES[0]),
            line(x, bins["waiting"], "waiting", HUES[5], "dot"),
        ),
        "step": figure(
            "ms",
            line(x, a_step(bins["step_s"]), "mean", HUES[0]),
            line(x, ms(bins["worst_s"]), "longest", HUES[5], "dot"),
            line(x, a_step(bins["gap_s"]), "gap", HUES[1], "dash"),
        ),
        "ledger": figure(
            "rows/s",
            *(
                {
                    "type": "bar",
                    "x": x,
                    "y": a_second(bins["rows"][kind.name]),
                    "name": kind.label,
                    "marker": {
                        "color": kind.light,
                        "pattern": {"shape": kind.pattern, "fgcolor": "#fff", "solidity": 0.3},
                    },
                }
                for kind in ROW_KIND_TABLE.values()
            ),
            barmode="stack",
            bargap=0,
        ),
        "wait": figure(
            "ms",
            line(x, ms(bins["wait_p95"]), "for a seat", HUES[5], mode="markers"),
            line(x, ms(bins["ttft_p95"]), "for the first token", HUES[0], mode="markers"),
            line(x, ms(bins["itl_p95"]), "between tokens", HUES[2]),
            log=True,
        ),
    }


def seat_figure(shown: dict[str, Any]) -> dict[str, Any]:
    """A bar for each phase of each stay."""
    stays, end = shown["rides"], shown["to"]
    rows = list(
        zip(
            *(stays[name] for name in ("seat", "request", "index", "from", "first_token", "to")),
            strict=True,
        )
    )
    hues: dict[tuple[str, int], int] = {}
    traces: dict[tuple[str, int], dict[str, list[Any]]] = {}
    for seat, request, index, begin, first, to in rows[-MAX_DRAWN:]:
        hue = hues.setdefault((request, index), len(hues) % len(HUES))
        start, last = max(begin, shown["from"]), end if to is None else min(to, end)
        turn = last if first is None else min(max(first, start), last)
        for phase, low, high in (("prefill", start, turn), ("decode", turn, last)):
            if high > low:
                trace = traces.setdefault(
                    (phase, hue), {"y": [], "base": [], "x": [], "hovertext": []}
                )
                trace["y"].append(seat)
                trace["base"].append(round(low - end, 4))
                trace["x"].append(round(high - low, 4))
                # Plotly reads tags in texts.
                trace["hovertext"].append(
                    html.escape(f"seat {seat}, {phase}, {request} {index}, {high - low:.2f} s")
                )
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "width": 0.86,
            "hoverinfo": "text",
            "showlegend": False,
            **trace,
            "marker": {
                "color": HUES[hue],
                "line": {"width": 0},
                "pattern": {
                    "shape": "/" if phase == "prefill" else "",
                    "fgcolor": "#fff",
                    "solidity": 0.35,
                },
            },
        }
        for (phase, hue), trace in traces.items()
    ]
    told = figure(
        "seat", *data, barmode="overlay", height=min(900, 90 + 18 * max(1, shown["seats"]))
    )
    told["layout"]["yaxis"] |= {"autorange": "reversed", "rangemode": "normal"}
    told["layout"]["xaxis"]["range"] = [shown["from"] - end, 0]
    return told


def line(
    x: list[float],
    y: Sequence[float | None],
    name: str,
    colour: str,
    dash: str = "solid",
    mode: str = "lines",
) -> dict[str, Any]:
    return {
        "x": x,
        "y": list(y),
        "name": name,
        "mode": mode,
        "line": {"color": colour, "width": 2, "dash": dash},
        "marker": {"color": colour, "size": 6},
    }


def figure(
    unit: str, *data: dict[str, Any], height: int = 260, log: bool = False, **layout: Any
) -> dict[str, Any]:
    return {
        "data": list(data),
        "layout": {
            "height": height,
            "margin": {"l": 60, "r": 10, "t": 10, "b": 40},
            "hovermode": "closest",
            "legend": {"orientation": "h", "y": -0.2},
            "xaxis": {"ticksuffix": " s"},
            "yaxis": {
                "title": {"text": unit},
                "type": "log" if log else "linear",
                "rangemode": "tozero",
            },
            **layout,
        },
    }
