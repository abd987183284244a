"""Formats the tables of `device_h200.json`: one run of `jitney bench device` and `jitney bench
serve` on a device.

The file has the rows of the bench's own file, except those of power and of cases that ran out of
time, and the figures of each load over HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from jitney.engine.common.reports.page import Table
from jitney.engine.lab.device.report import DeviceReport
from jitney.engine.lab.device.rows import About, Floors, Row
from jitney.engine.lab.device.run import DevicePlan, DeviceResults

type _Report = dict[str, Any]

_DECODE = [("decode step", f"{seats} x 1,024, bfloat16") for seats in (1, 8, 32)]
#: Labels of the lines of `shares`, with the (name, case) of the rows that each line covers.
_SHARES = {
    "decode step, bfloat16, 1 / 8 / 32 seats of 1,024 tokens": _DECODE,
    "the same, fp8 weights": [("decode step", f"{seats} x 1,024, fp8") for seats in (1, 8, 32)],
    "prompt step, 512 / 2,048 / 4,096 rows": [
        ("prompt step", f"{rows} rows, bfloat16") for rows in ("512", "2,048", "4,096")
    ],
    "decode attention, 32 x 4,096 / 1 x 32,768 / 256 x 4,096": [
        ("decode attention", case) for case in ("32 x 4,096", "1 x 32,768", "256 x 4,096")
    ],
    "the same, int8 pool (32 x 4,096 / 1 x 32,768)": [
        ("decode attention", f"{case}, int8 KV") for case in ("32 x 4,096", "1 x 32,768")
    ],
    "prompt attention, 4,096 / 8,192 rows": [
        ("prompt attention", f"{rows} rows") for rows in ("4,096", "8,192")
    ],
    "closed loop of 64 streams": [("closed loop", "64 streams, bfloat16")],
}


def page(report: _Report) -> str:
    """All rows, as on the bench's own page."""
    results = DeviceResults(
        DevicePlan(shape=report["shape"], page_size=report["page_size"]),
        about=msgspec.convert(report["about"], About),
        floors=msgspec.convert(report["floors"], Floors),
        rows=_rows(report),
        seconds=report["seconds"],
        calls=report["calls"],
        finished=report["finished"],
    )
    origin = f"{report['date']}, driver {report['driver']}. Written by `tables.py` from the JSON."
    title, rest = DeviceReport(results).markdown().split("\n", 1)
    return f"{title}\n\n{origin}\n{rest.rstrip()}\n"


def serve(report: _Report) -> Iterator[str]:
    """A row for each load over HTTP."""
    heads = [
        "streams",
        "output tok/s",
        "all tok/s",
        "first token p50 / p99, ms",
        "time per output token p50, ms",
        "padding, % of rows",
        "idle, % of the time",
    ]
    yield from Table(heads, [_served(run) for run in report["serve"]]).markdown_lines()


def _served(run: _Report) -> list[str]:
    first, ledger = run["ttft_s"], run["ledger"]
    rows = sum(kind["rows"] for kind in ledger.values())
    seconds = sum(kind["seconds"] for kind in ledger.values())
    return [
        str(run["streams"]),
        f"{run['output_tok_s']:,.0f}",
        f"{run['total_tok_s']:,.0f}",
        f"{1e3 * first['p50']:,.0f} / {1e3 * first['p99']:,.0f}",
        f"{1e3 * run['tpot_s']['p50']:.1f}",
        f"{100 * ledger['padding']['rows'] / rows:.0f}",
        f"{100 * ledger['idle']['seconds'] / seconds:.1f}",
    ]


def shares(report: _Report) -> Iterator[str]:
    """Floor times divided by measured times, for some rows."""
    rows = {(row.name, row.case): row for row in _rows(report) if row.part != "cublas"}
    lines = []
    for name, cases in _SHARES.items():
        lines.append([name, *_shares_of([rows[case] for case in cases])])
    yield from Table(["what", "share", "time"], lines).markdown_lines()


def _shares_of(rows: Sequence[Row]) -> tuple[str, str]:
    """(shares in percent, times) of one line of `shares`."""
    seconds = [row.seconds or 0.0 for row in rows]
    percent = " / ".join(f"{100 * (row.fraction or 0.0):.0f}" for row in rows)
    units = (1.0, 2, "s"), (1e3, 1, "ms"), (1e6, 0, "us")
    scale, digits, unit = next(unit for unit in units if unit[0] * min(seconds) > 1)
    times = " / ".join(f"{scale * each:,.{digits}f}" for each in seconds)
    return f"{percent} %", f"{times} {unit}"


def short(report: _Report) -> Iterator[str]:
    """One line, for docs/devices.md."""
    speeds = {run["streams"]: f"{run['output_tok_s']:,.0f}" for run in report["serve"]}
    rows = {(row.name, row.case): row for row in _rows(report) if row.part == "steps"}
    heads = [
        "device, model, date",
        f"output tok/s over HTTP, {' / '.join(map(str, speeds))} streams",
        "decode step, share of the device's own bandwidth",
        "ready after",
    ]
    line = [
        f"{report['about']['device']}, 8B Llama in {report['about']['dtype']}, {report['date']}",
        " / ".join(speeds.values()),
        _shares_of([rows[case] for case in _DECODE])[0],
        f"{report['start']['ready_s']} s",
    ]
    yield from Table(heads, [line]).markdown_lines()


def sentence(report: _Report) -> Iterator[str]:
    """One sentence, for the front page."""
    speeds = {run["streams"]: f"{run['output_tok_s']:,.0f}" for run in report["serve"]}
    yield (
        f"An 8B Llama in {report['about']['dtype']} on one {report['about']['device']} "
        f"({report['date']}, prompts and outputs of 256 tokens, of one"
    )
    yield (
        f"stream 128 and 200): {speeds[1]} output tok/s with one stream, {speeds[32]} with 32, "
        f"{speeds[256]} with 256."
    )


def _rows(report: _Report) -> list[Row]:
    return msgspec.convert(report["rows"], list[Row])


#: Functions by the view name in a page's mark.
VIEWS: dict[str, Callable[[_Report], Iterator[str]]] = {
    "serve": serve,
    "shares": shares,
    "short": short,
    "sentence": sentence,
}
