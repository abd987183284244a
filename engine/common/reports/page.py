"""Tables for the terminal and for pages, and one HTML file with everything in it: plotly.js, the
charts and the tables. It needs no network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from jitney.engine.common.terminal import console, visible
from jitney.engine.common.text_file import write_text

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from jinja2 import Template
    from rich.table import Table as RichTable

#: Width in characters if there is no terminal.
_PIPED_WIDTH = 120


@dataclass(slots=True)
class Table:
    """Cells as text."""

    #: Names of the columns; empty where they need none.
    heads: Sequence[str]
    #: Cells of each row; the first one is the row's name.
    rows: Sequence[Sequence[str]]
    #: Whether each column has words, which are left-aligned.
    words: bool = False

    def print(self, title: str = "") -> None:
        """Print on standard output."""
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
        """The lines of a Markdown table."""
        yield _markdown_row(self.heads)
        yield f"|{'---|' * len(self.heads)}"
        yield from map(_markdown_row, self.rows)


def print_lines(lines: Iterable[str]) -> None:
    """Print on standard output, wrapped at the terminal's width."""
    shown = console()
    for line in lines:
        shown.print(line, highlight=False, markup=False)


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
            # Plotly escapes <, > and / as \u003c etc., so that no text can end the script element.
            figures=to_json_plotly(charts),
            plotly=_plotly_js(),
        )

    def print(self) -> None:
        """Summary, notes and tables on standard output."""
        print(visible("\n".join(self.summary)))
        for section in self.sections:
            if section.notes and section.tables:
                print(visible("\n".join(["", *section.notes])))
            for number, table in enumerate(section.tables):
                table.print("" if number else section.title)

    def write(self, path: str | Path) -> None:
        """Write it to a file. Raises ConfigError if that fails."""
        write_text("--html", path, self.html())


@cache
def _plotly_js() -> str:
    """The source of plotly.js (4.5 MB), escaped for a script element."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs().replace("</script", "<\\/script")


@cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("jitney.engine.common.reports")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html")
