"""Tables for the terminal and for pages, and one HTML file with everything in it: plotly.js, the
charts and the tables. It asks the network for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from jitney.engine.common.terminal import console
from jitney.engine.common.text_file import write_text

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from jinja2 import Template
    from rich.table import Table as RichTable

#: Columns of text where no terminal says how many it has.
_PIPED_WIDTH = 120


@dataclass(slots=True)
class Table:
    """Cells as text."""

    #: Names of the columns; empty where they need none.
    heads: Sequence[str]
    #: Cells of each row; the first one is the row's name.
    rows: Sequence[Sequence[str]]
    #: True where cells are words rather than numbers: they begin at the left.
    words: bool = False

    def print(self, title: str = "") -> None:
        """On standard output."""
        shown = console()
        if not shown.is_terminal:
            shown = console(width=_PIPED_WIDTH)
        shown.print(self._rich(title))

    def _rich(self, title: str) -> RichTable:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        padding = (0, 1, 0, 0)
        shown = RichTable(
            title=title or None, title_justify="left", box=SIMPLE_HEAD, padding=padding
        )
        for column, head in enumerate(self.heads):
            shown.add_column(Text(head), justify="right" if column else "left")
        for row in self.rows:
            shown.add_row(*[Text(cell) for cell in row])
        return shown

    def markdown_lines(self) -> Iterator[str]:
        """As a table of Markdown."""
        yield _markdown_row(self.heads)
        yield f"|{'---|' * len(self.heads)}"
        yield from map(_markdown_row, self.rows)


def _markdown_row(cells: Sequence[str]) -> str:
    row = "|"
    for cell in cells:
        row += f" {cell}".rstrip() + " |"
    return row


@dataclass(slots=True)
class PageSection:
    """A part of a page. Texts and cells are shown as they are, markup and all."""

    title: str
    #: Sentences under the title.
    notes: Sequence[str] = ()
    #: Come after the notes.
    tables: Sequence[Table] = ()
    #: Come last. Plotly reads some tags in a chart's texts: escape names that came from outside.
    charts: Sequence[go.Figure] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """A whole document."""

    title: str
    #: Sentences under the title.
    summary: Sequence[str]
    sections: Sequence[PageSection]

    def html(self) -> str:
        from plotly.io.json import to_json_plotly

        charts = []
        for section in self.sections:
            charts += section.charts
        return _template().render(
            title=self.title,
            summary=self.summary,
            sections=self.sections,
            # It writes <, > and / as \u003c and so on: nothing in it can end the script element.
            figures=to_json_plotly(charts),
            plotly=_plotly_js(),
        )

    def write(self, path: str | Path) -> None:
        """Write it to a file. ConfigError if that cannot be."""
        write_text("--html", path, self.html())


@cache
def _plotly_js() -> str:
    """plotly.js [4.5 MB] as it can stand in a page."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs().replace("</script", "<\\/script")


@cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("jitney.dashboard.reports")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html")
