"""One HTML file with everything in it: plotly.js, the charts and the tables. It asks the network
for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import orjson

from jitney.engine.bench.charts import Figure
from jitney.engine.errors import ConfigError

STYLE = """
body { margin: 0 auto; max-width: 1180px; padding: 24px; background: #f4f6f8; color: #17202a;
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; }
h2 { font-size: 19px; margin: 28px 0 8px; } p { margin: 4px 0 10px; }
section { background: #fff; border-radius: 12px; padding: 14px 18px; margin-bottom: 16px;
  box-shadow: 0 2px 8px rgb(16 32 48 / .06); overflow-x: auto; }
section h2 { margin-top: 4px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 14px 4px 0; text-align: right; border-bottom: 1px solid #e4e8ed; }
th:first-child, td:first-child { text-align: left; } th { color: #5b6775; font-weight: 600; }
.faint { color: #5b6775; }
"""
#: No bar of buttons that leads elsewhere; the charts follow the width of the window.
DRAW = """
for (const box of document.querySelectorAll("[data-chart]")) {
  const {data, layout} = JSON.parse(document.getElementById(box.dataset.chart).textContent);
  Plotly.newPlot(box, data, layout, {displaylogo: false, responsive: true,
    modeBarButtonsToRemove: ["sendDataToCloud", "lasso2d", "select2d"]});
}
"""


@dataclass(slots=True)
class Table:
    """Cells as text; the first column is a row's name."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(slots=True)
class Section:
    """A heading, sentences under it, tables and charts, in this order.

    Texts and cells are shown as they are, markup and all. plotly reads some tags in a chart's own
    texts, so a name that came from outside never stands in a chart.
    """

    title: str
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    charts: Sequence[Figure] = field(default_factory=list)


def write_report(
    path: str | Path, title: str, summary: Sequence[str], sections: Sequence[Section]
) -> None:
    """Write the page. ConfigError if the file cannot be written."""
    try:
        Path(path).write_text(page(title, summary, sections), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path}: {error.strerror or error}") from None


def page(title: str, summary: Sequence[str], sections: Sequence[Section]) -> str:
    """The whole document."""
    from plotly.offline import get_plotlyjs

    charts: list[Figure] = []
    body = "".join(_section(section, charts) for section in sections)
    data = "".join(
        f'<script type="application/json" id="chart-{number}">{_json(chart)}</script>\n'
        for number, chart in enumerate(charts)
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, '
        f'initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f"{_paragraphs(summary, 'faint')}"
        f"{body}\n{data}<script>{get_plotlyjs()}</script>\n<script>{DRAW}</script>\n</body>\n</html>\n"
    )


def _section(section: Section, charts: list[Figure]) -> str:
    """The section's markup; its charts join `charts`, by whose numbers they are found."""
    boxes = []
    for chart in section.charts:
        boxes.append(f'<div data-chart="chart-{len(charts)}"></div>\n')
        charts.append(chart)
    return (
        f"<section>\n<h2>{escape(section.title)}</h2>\n{_paragraphs(section.notes)}"
        f"{''.join(_table(table) for table in section.tables)}{''.join(boxes)}</section>\n"
    )


def _paragraphs(lines: Iterable[str], kind: str = "") -> str:
    return "".join(f'<p class="{kind}">{escape(line)}</p>\n' for line in lines)


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.heads)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in table.rows
    )
    return f"<table>\n<tr>{head}</tr>\n{rows}</table>\n"


def _json(chart: Figure) -> str:
    """JSON that cannot end the script element it stands in."""
    return orjson.dumps(chart).decode().replace("<", "\\u003c")
