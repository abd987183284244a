"""Figures of reports by flat names, and their text for people: the end of a name is the unit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jitney.engine.common.requests import JsonObject
from jitney.engine.common.summary import quantile_of

if TYPE_CHECKING:
    from jitney.engine.common.reports.page import Table

#: A percentile of a spread: `ttft_p99_s` is the p99 of `ttft_s`.
_QUANTILE = re.compile(r"_(p\d+)(_s)?$")
#: End of a name of a rate per second; ends of names of shares.
_RATE, _SHARES = re.compile(r"(tok|req)_s$"), ("share", "seat_fill", "kv_use", "hit_rate")
#: Text for a percentile of too few values.
TOO_FEW = "–"


def figure_of(figures: JsonObject, name: str) -> Any:
    """A run's figure (`summary.summarise`) such as output_tok_s or ttft_p99_s; None if unknown."""
    quantile = _QUANTILE.search(name)
    if name in figures or quantile is None:
        return figures.get(name)
    return quantile_of(figures.get(_QUANTILE.sub(r"\2", name)) or {}, quantile[1])


def cell(figures: JsonObject, name: str) -> str:
    """The figure as text; empty if unknown, a dash for too few values."""
    if _QUANTILE.search(name) and name not in figures:
        if not figures.get(_QUANTILE.sub(r"\2", name)):
            return ""
        return shown(name, figure_of(figures, name)) or TOO_FEW
    return shown(name, figure_of(figures, name))


def shown(name: str, value: Any) -> str:
    """A value as text, in the unit of its name; empty for None."""
    if value is None:
        return ""
    if isinstance(value, str | bool):
        return str(value)
    unit = _QUANTILE.sub(r"\2", name)
    if unit.endswith(_SHARES):
        return f"{value:.1%}"
    if unit == "seconds" or (unit.endswith("_s") and not _RATE.search(unit)):
        return duration(value)
    return f"{value:,}" if isinstance(value, int) else number(value)


def number(value: float) -> str:
    """A number as text: three decimals below one, two below a thousand, else none."""
    digits = 3 if abs(value) < 1 else 2 if abs(value) < 1000 else 0
    return f"{value:,.{digits}f}"


def duration(seconds: float | None) -> str:
    """Seconds, or milliseconds below one; empty for None."""
    if seconds is None:
        return ""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    digits = 0 if seconds >= 0.1 else 1
    return f"{1e3 * seconds:.{digits}f} ms"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def rows_table(rows: Sequence[JsonObject], heads: Mapping[str, str]) -> Table:
    """A table with a line for each row and a column for each head. heads: head -> figure's name."""
    from jitney.engine.common.reports.page import Table

    return Table(list(heads), [[cell(row, name) for name in heads.values()] for row in rows])


def columns_table(columns: Mapping[str, JsonObject], labels: Mapping[str, str]) -> Table:
    """A table with a column for each run; figures that are unknown for all runs are left out.
    labels: label -> figure's name.
    """
    from jitney.engine.common.reports.page import Table

    rows = [
        [label, *(cell(figures, name) for figures in columns.values())]
        for label, name in labels.items()
    ]
    return Table(["", *columns], [row for row in rows if any(row[1:])])
