"""Figures as people read them: the same rows for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jitney.engine.bench.report import Table
from jitney.engine.records import ROW_KINDS
from jitney.engine.telemetry.cost import IDLE, Line
from jitney.engine.telemetry.row_kinds import ROW_KIND_TABLE

QUANTILES = {"p50": "p50", "p90": "p90", "p99": "p99", "p999": "p99.9"}
LATENCIES = {
    "ttft_s": "time to first token",
    "itl_s": "between tokens",
    "tpot_s": "per later token",
    "e2e_s": "end to end",
    "queue_s": "queue wait",
}
RATES = {
    "req_s": "requests/s",
    "output_tok_s": "output tokens/s",
    "total_tok_s": "total tokens/s",
    "goodput_req_s": "goodput, requests/s",
}
SHARES = {
    "seat_fill": "seats in use, held ones aside",
    "padding_share": "padding rows",
    "kv_use": "KV pages in use",
}
KIND_NAMES = {kind.name: kind.label for kind in ROW_KIND_TABLE.values()} | {
    IDLE: "no step running",
}
NOTHING = Line(0, 0)
#: Columns of text where no terminal says how many it has.
PIPED_WIDTH = 120


def figures_table(figures: Mapping[str, Mapping[str, Any]]) -> Table:
    """One column for each run; a row that no run knows is left out."""
    runs = list(figures.values())
    rows = [
        ["served / sent", *(f"{run['served']} / {run['requests']}" for run in runs)],
        ["seconds", *(f"{run['seconds']:.2f}" for run in runs)],
    ]
    rows += [[label, *(number(run[name]) for run in runs)] for name, label in RATES.items()]
    rows += [
        [f"{label} {shown}", *(duration(run[name][q] if run[name] else None) for run in runs)]
        for name, label in LATENCIES.items()
        for q, shown in QUANTILES.items()
    ]
    rows += [["queue", *(queue(run.get("backlog")) for run in runs)]]
    rows += [[label, *(share(run[name]) for run in runs)] for name, label in SHARES.items()]
    rows += [
        [
            "cost per million output tokens",
            *(number(run["cost_per_million_tokens"]) for run in runs),
        ]
    ]
    return Table(["", *figures], [row for row in rows if any(row[1:])])


def queue(backlog: Mapping[str, Any] | None) -> str:
    """How the queue went, see `backlog.Backlog`; empty where nothing is known of it."""
    if backlog is None:
        return ""
    return "grew: p99 is the run's length" if backlog["grew"] else "did not grow"


def ledger_table(lines: Mapping[str, Line], price_per_hour: float | None = None) -> Table:
    """Rows, device time and money by kind, and their sum; kinds that did not occur are left out."""
    total = sum_of(lines)
    heads = [
        "",
        "rows",
        "share of rows",
        "device time",
        "share of time",
        *(["cost"] if price_per_hour is not None else []),
    ]
    return Table(
        heads,
        [
            [
                name,
                f"{line.rows:,}",
                share(line.rows / max(1, total.rows)),
                f"{line.seconds:.3f} s",
                share(line.nanoseconds / max(1, total.nanoseconds)),
                *cost(line, price_per_hour),
            ]
            for name, line in named(lines).items()
        ],
    )


def ledgers_table(
    bills: Mapping[str, Mapping[str, Line]], price_per_hour: float | None = None
) -> Table:
    """Rows and device time of several runs side by side."""
    columns = {run: named(lines, everything=True) for run, lines in bills.items()}
    kinds = [
        kind
        for kind in (*KIND_NAMES.values(), "all")
        if any(c[kind] != NOTHING for c in columns.values())
    ]
    heads = ["", *(f"{run} {what}" for run in columns for what in ("rows", "time"))]
    rows = [
        [
            kind,
            *(
                cell
                for column in columns.values()
                for cell in (f"{column[kind].rows:,}", f"{column[kind].seconds:.2f} s")
            ),
        ]
        for kind in kinds
    ]
    if price_per_hour is not None:
        costs = [cost(column["all"], price_per_hour) for column in columns.values()]
        rows.append(["cost", *(cell for amount in costs for cell in ("", *amount))])
    return Table(heads, rows)


def named(lines: Mapping[str, Line], *, everything: bool = False) -> dict[str, Line]:
    """Lines by what people call them, and their sum; unless `everything`, without those that are
    nothing.
    """
    found = {
        KIND_NAMES[kind]: lines[kind]
        for kind in (*ROW_KINDS, IDLE)
        if everything or lines[kind] != NOTHING
    }
    return found | {"all": sum_of(lines)}


def sum_of(lines: Mapping[str, Line]) -> Line:
    return Line(
        sum(line.rows for line in lines.values()), sum(line.nanoseconds for line in lines.values())
    )


def cost(line: Line, price_per_hour: float | None) -> list[str]:
    """The line's cost as a cell, none without a price."""
    return [] if price_per_hour is None else [f"{line.money(price_per_hour):.6f}"]


def costliest_table(
    lines: Mapping[str, Line], price_per_hour: float | None = None, most: int = 10
) -> Table:
    """The requests that took most of the device's time."""
    ranked = sorted(lines.items(), key=lambda item: -item[1].nanoseconds)[:most]
    heads = ["request", "rows", "device time", *(["cost"] if price_per_hour is not None else [])]
    return Table(
        heads,
        [
            [name, f"{line.rows:,}", f"{line.seconds:.4f} s", *cost(line, price_per_hour)]
            for name, line in ranked
        ],
    )


def ratio_table(ratios: Mapping[str, Mapping[str, Any]]) -> Table:
    """What continuous batching gains over the others, beside what is published: times the
    throughput, and by what the waits are divided."""
    rows = []
    for name, gains in ratios.items():
        published = gains["published_output_tok_s"]
        rows.append(
            [
                f"over {name}",
                times(gains["output_tok_s"]),
                f"{published[0]:g}x to {published[1]:g}x" if published else "",
                times(gains["ttft_s_p50"]),
                times(gains["ttft_s_p99"]),
                times(gains["e2e_s_p99"]),
            ]
        )
    return Table(
        [
            "continuous",
            "output tokens/s",
            "published claims",
            "TTFT p50 /",
            "TTFT p99 /",
            "e2e p99 /",
        ],
        rows,
    )


#: What the table of errors across policies shows: the figures' names among `accuracy.COMPARED`, and
#: their heads.
CROSS_FIGURES = {
    "output_tok_s": "output tok/s",
    "itl_p50_s": "ITL p50",
    "ttft_p50_s": "TTFT p50",
    "ttft_p99_s": "TTFT p99",
    "e2e_p50_s": "e2e p50",
    "e2e_p99_s": "e2e p99",
}
CROSS_TITLE = "Error of the prediction: learned from -> predicted"
CROSS_NOTE = (
    "Step times are learned from the steps of one run, another is simulated with them, and the "
    "error is that "
    "of the simulated figure beside the measured one."
)


def cross_table(cross: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    """One row for each pair of a run learned from and a run predicted."""
    rows = []
    for source, predicted in cross.items():
        for name, off in predicted.items():
            cells = [f"{off[figure]:+.1%}" if figure in off else "" for figure in CROSS_FIGURES]
            rows.append([f"{source} -> {name}", *cells])
    return Table(["", *CROSS_FIGURES.values()], rows)


CURVE_NOTE = (
    "Load: times what continuous batching can serve. A wait in brackets is that of a queue that "
    "grows "
    "without bound: it says how long the run was."
)


def curve_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """p99 time to first token of each policy, one row a load."""
    policies = list(points[0]["policies"])
    rows = []
    for point in points:
        cells = [curve_cell(point["policies"][policy]) for policy in policies]
        rows.append([f"{point['load']:g}", f"{point['rate']:.3g}", *cells])
    return Table(["load", "requests/s", *policies], rows)


def curve_cell(found: Mapping[str, float | None]) -> str:
    """The wait, in brackets if its queue grows without bound."""
    wait, share_of_capacity = duration(found["ttft_p99_s"]), found["share_of_capacity"]
    return f"({wait})" if share_of_capacity is not None and share_of_capacity >= 1 else wait


def print_table(table: Table, title: str = "") -> None:
    """On standard output."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(
        title=title or None, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for at, head in enumerate(table.heads):
        shown.add_column(Text(head), justify="right" if at else "left")
    for row in table.rows:
        shown.add_row(*(Text(cell) for cell in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH)
    console.print(shown)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """Seconds, or milliseconds below one."""
    if seconds is None:
        return ""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"
