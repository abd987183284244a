"""Figures as people read them: the same rows for the terminal and for the page."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from jitney.dashboard import Table
from jitney.engine.common.requests import JsonObject
from jitney.engine.common.row_kinds import ROW_KIND_TABLE
from jitney.engine.common.summary import quantile_of
from jitney.engine.lab.bench.cost import Bill, CostLine

_QUANTILES = {"p50": "p50", "p90": "p90", "p99": "p99", "p999": "p99.9"}
_LATENCIES = {
    "ttft_s": "time to first token",
    "itl_s": "between tokens",
    "tpot_s": "per later token",
    "e2e_s": "end to end",
    "queue_s": "queue wait",
}
_RATES = {
    "req_s": "requests/s",
    "output_tok_s": "output tokens/s",
    "total_tok_s": "total tokens/s",
    "goodput_req_s": "goodput, requests/s",
}
_SHARES = {
    "seat_fill": "seats in use, held ones aside",
    "padding_share": "padding rows",
    "kv_use": "KV pages in use",
}
#: What people call the lines of a bill, in the order in which they are shown.
LEDGER_LABELS = {kind.name: kind.label for kind in ROW_KIND_TABLE.values()} | {
    Bill.idle: "no step running"
}
_NOTHING = CostLine(0, 0)
#: What stands for a percentile of too few values.
_TOO_FEW = "–"
#: Heads of the table of gains, by names among `compare.ratios`.
_GAINS = {
    "output_tok_s": "output tokens/s",
    "ttft_s_p50": "TTFT p50 /",
    "ttft_s_p99": "TTFT p99 /",
    "e2e_s_p99": "e2e p99 /",
}
#: Heads of the table of errors, by names among `accuracy.COMPARED`.
_ERRORS = {
    "output_tok_s": "output tok/s",
    "itl_p50_s": "ITL p50",
    "ttft_p50_s": "TTFT p50",
    "ttft_p99_s": "TTFT p99",
    "e2e_p50_s": "e2e p50",
    "e2e_p99_s": "e2e p99",
}


def figures_table(
    figures: Mapping[str, JsonObject], loads: Mapping[str, float] | None = None
) -> Table:
    """One column for each run, from `summary.summarise`; a row that no run knows is left out.

    loads: what each run was offered, in times what it can serve, as far as that is known.
    """
    columns = list(map(_figure_cells, figures.values()))
    rows = [[label, *(column[label] for column in columns)] for label in columns[0]]
    rows.append(
        ["offered / what it can serve", *(_times((loads or {}).get(run)) for run in figures)]
    )
    return Table(["", *figures], [row for row in rows if any(row[1:])])


def _figure_cells(run: JsonObject) -> dict[str, str]:
    """All cells of a run's column by their rows' names; empty where nothing is known."""
    return {
        "served / sent": f"{run['served']} / {run['requests']}",
        "seconds": f"{run['seconds']:.2f}",
        **{label: number(run[name]) for name, label in _RATES.items()},
        **{
            f"{label} {shown}": quantile_cell(run[name] or {}, quantile)
            for name, label in _LATENCIES.items()
            for quantile, shown in _QUANTILES.items()
        },
        "queue": queue(run.get("backlog")),
        **{label: _share(run[name]) for name, label in _SHARES.items()},
        "cost per million output tokens": number(run["cost_per_million_tokens"]),
    }


def quantile_cell(spread: JsonObject, quantile: str) -> str:
    """A percentile of `summary.spread`; a dash for too few values, empty where unknown."""
    if not spread:
        return ""
    return duration(quantile_of(spread, quantile)) or _TOO_FEW


def queue(backlog: JsonObject | None, grew: str = "grew: p99 is the run's length") -> str:
    """Whether the queue grew, see `backlog.QueueGrowth`; empty where it is not known."""
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
    """Gains of continuous batching: times the throughput, and by what the waits are divided."""
    rows: list[list[str]] = []
    for name, gains in ratios.items():
        rows.append([f"over {name}", *(_times(gains[gain]) for gain in _GAINS)])
    return Table(["continuous", *_GAINS.values()], rows)


def errors_table(errors: Mapping[str, Mapping[str, float]]) -> Table:
    """Relative errors of predicted figures, one row for each policy."""
    rows = []
    for policy, off in errors.items():
        rows.append([policy, *(f"{off[name]:+.1%}" if name in off else "" for name in _ERRORS)])
    return Table(["", *_ERRORS.values()], rows)


def curve_table(points: Sequence[JsonObject]) -> Table:
    """p99 time to first token of each policy, one row a load."""
    rows: list[list[str]] = []
    for point in points:
        waits = map(_curve_cell, point["policies"].values())
        rows.append([f"{point['load']:g}", f"{point['rate']:.3g}", *waits])
    return Table(["load", "requests/s", *points[0]["policies"]], rows)


def _curve_cell(waits: Mapping[str, float | None]) -> str:
    """The wait, in brackets if its queue grows without bound."""
    wait = duration(waits["ttft_p99_s"])
    return f"({wait})" if (waits["share_of_capacity"] or 0) >= 1 else wait


def number(value: float | None) -> str:
    """With two digits after the point below a thousand."""
    if value is None:
        return ""
    return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """Seconds, or milliseconds below one."""
    if seconds is None:
        return ""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    digits = 0 if seconds >= 0.1 else 1
    return f"{1e3 * seconds:.{digits}f} ms"


def _share(value: float | None) -> str:
    """As a percentage."""
    return "" if value is None else f"{value:.1%}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"
