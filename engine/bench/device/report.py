"""The report of `jitney bench device`: one JSON file, and one Markdown page with every figure
beside its floor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from jitney.engine.bench.device.rows import GOALS, About, Floors, Goal, Row, goal_values
from jitney.engine.bench.device.run import PARTS, DeviceResults
from jitney.engine.report.page import Table
from jitney.engine.report.tables import markdown_lines
from jitney.engine.types import JsonDict, JsonObject

_VERDICTS = {None: "", True: "met", False: "**missed**"}
_HEAD = ("what", "case", "by", "time", "floor", "fraction", "spread", "error", "")
_TINY_NOTE = (
    "A tiny shape: it shows that everything runs and says nothing about a device. Its working sets "
    "lie in caches, so fractions may pass 100 %."
)
_HOW_TO_READ = (
    "A floor is the larger of least bytes over the first and least operations over the second; the "
    "fraction is floor over time. Times are medians; spread is (most - least) / median; error is "
    "the distance from the reference kernels, norm over norm."
)


def report_of(results: DeviceResults) -> JsonDict:
    """Everything, as plain data."""
    plain = msgspec.to_builtins
    return {
        "about": plain(results.about),
        "shape": results.shape,
        "page_size": results.page_size,
        "floors": plain(results.floors),
        "goals": _goals(results),
        "numerics": numerics(results),
        "finished": results.finished,
        "rows": [{**plain(row), "fraction": row.fraction} for row in results.rows],
        "seconds": results.seconds,
        "calls": results.calls,
        "budget_s": results.plan.seconds,
    }


def _goals(results: DeviceResults) -> list[JsonDict]:
    """Each goal with the worst value that counts for it, and whether all of them keep its limits;
    met None: not measured."""
    return [_judged(results, key, goal) for key, goal in GOALS.items()]


def _judged(results: DeviceResults, key: str, goal: Goal) -> JsonDict:
    values = goal_values(results.rows, key) if results.real else []
    return {
        "goal": key,
        "what": goal.what,
        "first": goal.first,
        "then": goal.then,
        "worst": _worst(goal, values),
        "counted": len(values),
        "met_first": goal.met(values, goal.first) if values else None,
        "met_then": goal.met(values, goal.then) if values else None,
    }


def _worst(goal: Goal, values: Sequence[float]) -> float | None:
    if not values:
        return None
    return max(values) if goal.most else min(values)


def markdown(results: DeviceResults) -> str:
    """The page."""
    return "\n".join([*_opening(results), "", *goal_table(results), "", *_row_tables(results)])


def numerics(results: DeviceResults) -> str:
    """Whether answers were compared, and with what result."""
    compared = [row for row in results.rows if row.error is not None]
    first = sum(row.part == "check" for row in compared)
    text = f"{len(compared)} cases compared ({first} of them by part check)"
    if "check" not in results.finished:
        text += "; part check is not finished"
    if results.wrong:
        names = "; ".join(f"{row.name}, {row.case}" for row in results.wrong)
        return f"**WRONG ANSWERS** in {len(results.wrong)}: {names}. {text}"
    return f"No wrong answer in {text}"


def _opening(results: DeviceResults) -> Iterator[str]:
    about, floors = results.about, results.floors
    yield f"# jitney bench device: {results.shape} on {results.device}"
    yield ""
    if about is None:
        yield "The device could not be described."
        return
    if not results.real:
        yield _TINY_NOTE
        yield ""
    yield f"{numerics(results)}."
    yield _programs(about)
    if floors is not None:
        yield _floors_line(floors)
        yield _HOW_TO_READ
    yield f"{results.seconds:.0f} s were used, in {results.calls} calls."


def _floors_line(floors: Floors) -> str:
    return (
        f"Floors, measured in this run: copy {floors.copy_bytes_s / 1e9:,.1f} GB/s (read + "
        f"written), products {floors.product_flops_s / 1e12:,.2f} TFLOP/s, one launch of many in "
        f"a row {1e6 * floors.launch_s:.1f} us."
    )


def _programs(about: About) -> str:
    text = f"{about.platform}, {about.kernels} kernels, {about.dtype}"
    if about.memory:
        text += f", {about.memory / 2**30:.1f} GiB for jax"
    versions = ", ".join(f"{name} {version}" for name, version in about.versions.items())
    return f"{text}; {versions}."


def goal_table(results: DeviceResults) -> Iterator[str]:
    """Goals beside the worst that was measured."""
    heads = ["goal", "first", "then", "measured (worst)", "figures", "first", "then"]
    rows = [_goal_cells(row) for row in _goals(results)]
    yield from markdown_lines(Table(heads, rows))


def _goal_cells(row: JsonObject) -> list[str]:
    """A row of `_goals`."""
    goal = GOALS[row["goal"]]
    worst = "not measured"
    if row["worst"] is not None:
        worst = _number(goal, row["worst"])
    return [
        goal.what,
        _bound(goal, goal.first),
        _bound(goal, goal.then),
        worst,
        str(row["counted"]),
        _VERDICTS[row["met_first"]],
        _VERDICTS[row["met_then"]],
    ]


def _number(goal: Goal, value: float) -> str:
    """A ratio as such, a share in percent."""
    if goal is GOALS["peer"]:
        return f"{value:.2f}x"
    return f"{value:.1%}"


def _bound(goal: Goal, limit: float) -> str:
    sign = "<" if goal.most else ">="
    return f"{sign} {_number(goal, limit)}"


def _row_tables(results: DeviceResults) -> Iterator[str]:
    for part, what in PARTS.items():
        rows = [_cells(row) for row in results.rows if row.part == part]
        if rows:
            yield f"## {part}: {what}"
            yield ""
            yield from markdown_lines(Table(_HEAD, rows))
            yield ""


def _cells(row: Row) -> list[str]:
    """One row of a table."""
    floor = _duration(row.floor_s)
    if floor:
        floor += f" ({row.bound})"
    return [
        row.name,
        row.case,
        row.by,
        _duration(row.seconds),
        floor,
        _percent(row.fraction),
        _percent(_spread(row)),
        _error(row.error),
        row.note or ", ".join(_figures(row)),
    ]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _spread(row: Row) -> float | None:
    """(most - least) / median, where there are repeats."""
    if not row.seconds or row.repeats < 2:
        return None
    return ((row.most or 0.0) - (row.least or 0.0)) / row.seconds


def _duration(seconds: float | None) -> str:
    """With a unit that suits; empty for None."""
    if seconds is None:
        return ""
    if seconds >= 1.0:
        return f"{seconds:.3f} s"
    if seconds >= 1e-3:
        return f"{seconds / 1e-3:.3f} ms"
    return f"{seconds / 1e-6:.1f} us"


def _figures(row: Row) -> Iterator[str]:
    """What else was read off."""
    for name, value in row.figures.items():
        yield _figure(name, value)


def _figure(name: str, value: float) -> str:
    kind = name.removesuffix("_s")
    if name == "share":
        return f"{value:.2%} of the step"
    if kind == name:
        return f"{value:,.0f} {name}"
    if kind in ("tokens", "requests"):
        return f"{value:,.1f} {kind}/s"
    return f"{kind} {_duration(value)}"
