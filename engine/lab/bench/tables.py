"""Tables of figures for people: the same rows for the terminal and for the page."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from jitney.engine.common.reports.page import Table
from jitney.engine.common.requests import JsonObject
from jitney.engine.common.row_kinds import ROW_KIND_TABLE
from jitney.engine.lab.bench.cost import Bill, CostLine
from jitney.engine.lab.figures import TOO_FEW, columns_table, duration, times

_QUANTILES = {"p50": "p50", "p90": "p90", "p99": "p99", "p999": "p99.9"}
_LATENCIES = {
    "ttft": "time to first token",
    "itl": "between tokens",
    "tpot": "per later token",
    "e2e": "end to end",
    "queue": "queue wait",
}
#: Label -> name of a run's figure.
_FIGURES = {
    "served": "served",
    "sent": "requests",
    "seconds": "seconds",
    "requests/s": "req_s",
    "output tokens/s": "output_tok_s",
    "total tokens/s": "total_tok_s",
    "goodput, requests/s": "goodput_req_s",
    **{
        f"{label} {shown}": f"{name}_{quantile}_s"
        for name, label in _LATENCIES.items()
        for quantile, shown in _QUANTILES.items()
    },
    "seats in use, held ones aside": "seat_fill",
    "padding rows": "padding_share",
    "KV pages in use": "kv_use",
    "cost per million output tokens": "cost_per_million_tokens",
}
#: Kind of a bill's line -> its label, in the order of the table.
LEDGER_LABELS = {kind.name: kind.label for kind in ROW_KIND_TABLE.values()} | {
    Bill.idle: "no step running"
}
_NOTHING = CostLine(0, 0)
#: Heads of the table of gains, for names in `compare.ratios`.
_GAINS = {
    "output_tok_s": "output tokens/s",
    "ttft_s_p50": "TTFT p50 /",
    "ttft_s_p99": "TTFT p99 /",
    "ttft_s_p999": "TTFT p99.9 /",
    "e2e_s_p99": "e2e p99 /",
    "e2e_s_p999": "e2e p99.9 /",
}


def figures_table(
    figures: Mapping[str, JsonObject], loads: Mapping[str, float] | None = None
) -> Table:
    """A column for each run, from `summary.summarise`; rows that are unknown for all runs are left
    out.

    loads: offered load of each run as a multiple of its capacity, if known.
    """
    table = columns_table(figures, _FIGURES)
    more = [
        ["queue", *(queue(run.get("backlog")) for run in figures.values())],
        ["offered / what it can serve", *(times((loads or {}).get(run)) for run in figures)],
    ]
    return Table(table.heads, [*table.rows, *(row for row in more if any(row[1:]))])


def queue(backlog: JsonObject | None, grew: str = "grew: p99 is the run's length") -> str:
    """Text that says whether the queue grew (`backlog.QueueGrowth`); empty if unknown."""
    if backlog is None:
        return ""
    return grew if backlog["grew"] else "did not grow"


def ledger_table(bills: Mapping[str, Bill], price_per_hour: float | None = None) -> Table:
    """Rows and device time of runs by kind, with their shares; kinds without rows are left out."""
    columns = [_with_sum(bill) for bill in bills.values()]
    heads = [f"{run} {head}" for run in bills for head in ("rows", "time")]
    rows: list[list[str]] = []
    for kind in columns[0]:
        lines = [column[kind] for column in columns]
        if set(lines) != {_NOTHING}:
            cells = map(_ledger_cells, lines, (column["all"] for column in columns))
            rows.append([LEDGER_LABELS.get(kind, kind), *itertools.chain(*cells)])
    if price_per_hour is not None:
        money = [("", f"{column['all'].money(price_per_hour):.6f}") for column in columns]
        rows.append(["cost", *itertools.chain(*money)])
    return Table(["", *heads], rows)


def _ledger_cells(line: CostLine, total: CostLine) -> tuple[str, str]:
    rows = line.rows / max(1, total.rows)
    time = line.seconds / total.seconds if total.seconds else 0.0
    return f"{line.rows:,} ({_share(rows)})", f"{line.seconds:.2f} s ({_share(time)})"


def _with_sum(lines: Bill) -> dict[str, CostLine]:
    """Lines in the order of `LEDGER_LABELS`, and "all", their sum."""
    ordered = {kind: lines[kind] for kind in LEDGER_LABELS}
    return ordered | {"all": CostLine(*map(sum, zip(*ordered.values(), strict=True)))}


def ratio_table(ratios: Mapping[str, JsonObject]) -> Table:
    """Gains of continuous batching: factors of the throughput, and of the shorter waits."""
    rows = [
        [f"over {name}", *(times(gains[gain]) or TOO_FEW for gain in _GAINS)]
        for name, gains in ratios.items()
    ]
    return Table(["continuous", *_GAINS.values()], rows)


def errors_table(errors: Mapping[str, Mapping[str, float]]) -> Table:
    """Relative errors of predicted figures, one column for each policy."""
    names = list(dict.fromkeys(name for off in errors.values() for name in off))
    rows = [
        [name, *(f"{off[name]:+.1%}" if name in off else "" for off in errors.values())]
        for name in names
    ]
    return Table(["", *errors], rows)


def curve_table(points: Sequence[JsonObject]) -> Table:
    """p99 and p99.9 of the time to first token of each policy, one row per load."""
    rows: list[list[str]] = []
    for point in points:
        waits = map(_curve_cell, point["policies"].values())
        rows.append([f"{point['load']:g}", f"{point['rate']:.3g}", *waits])
    return Table(["load", "requests/s", *points[0]["policies"]], rows)


def _curve_cell(waits: Mapping[str, float | None]) -> str:
    wait = " / ".join(duration(waits[name]) or TOO_FEW for name in ("ttft_p99_s", "ttft_p999_s"))
    return f"({wait})" if (waits["share_of_capacity"] or 0) >= 1 else wait


def _share(value: float) -> str:
    return f"{value:.1%}"
