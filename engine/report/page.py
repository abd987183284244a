"""One HTML file with everything in it: plotly.js, the charts and the tables. It asks the network
for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from jitney.engine.errors import ConfigError

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from jinja2 import Template


@dataclass(slots=True)
class Table:
    """Cells as text."""

    #: Names of the columns; empty where they need none.
    heads: Sequence[str]
    #: Cells of each row; the first one is the row's name.
    rows: Sequence[Sequence[str]]
    #: True where cells are words rather than numbers: they begin at the left.
    words: bool = False


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


def page(title: str, summary: Sequence[str], sections: Sequence[PageSection]) -> str:
    """The whole document; summary: sentences under the title."""
    from plotly.io.json import to_json_plotly

    charts = []
    for section in sections:
        charts += section.charts
    return _template().render(
        title=title,
        summary=summary,
        sections=sections,
        # It writes <, > and / as \u003c and so on: nothing in it can end the script element.
        figures=to_json_plotly(charts),
        plotly=_plotly_js(),
    )


def write_page(
    path: str | Path, title: str, summary: Sequence[str], sections: Sequence[PageSection]
) -> None:
    """Write the page. ConfigError if the file cannot be written."""
    write_text("--html", path, page(title, summary, sections))


def write_text(flag: str, path: str | Path, text: str) -> None:
    """ConfigError, naming the flag, if it cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}") from None


@cache
def _plotly_js() -> str:
    """plotly.js [4.5 MB] as it can stand in a page."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs().replace("</script", "<\\/script")


@cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("jitney.engine.report")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html")
