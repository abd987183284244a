"""The report of `jitney bench device`: a JSON file, and a Markdown page with every figure and its
floor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from jitney.engine.common.reports.page import Table
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.lab.device.parts import PARTS
from jitney.engine.lab.device.rows import About, Floors, Row
from jitney.engine.lab.device.run import DeviceResults
from jitney.engine.lab.simulation.roofline import SHAPES
from jitney.kernels.prompt_choices import PromptChoice, PromptChoices

#: FlashInfer is chosen if it takes at most this share of our time: the first start compiles its
#: kernels for minutes, which equal speed does not justify.
_WORTH = 0.95
_PACKAGES = ("jitney", "jax", "triton", "flashinfer-python")
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


@dataclass(frozen=True, slots=True)
class _Goal:
    """A goal: limits for a fraction."""

    what: str
    first: float  # the first limit
    then: float  # and the one after it
    most: bool = False  # not to exceed the limit instead

    def met(self, values: Sequence[float], limit: float) -> bool:
        """Whether every value keeps the limit."""
        if self.most:
            return max(values) < limit
        return min(values) >= limit


#: Goals as shares of the device's own copy and product rates in the same run; the gap's share is of
#: the step; `peer` is a ratio.
_GOALS = {
    "decode": _Goal("decode attention, contexts of 4k and more", 0.70, 0.85),
    "long": _Goal("decode attention, one sequence of 32k", 0.50, 0.65),
    "prefill": _Goal("prompt attention, 4k rows and more", 0.45, 0.65),
    "step": _Goal("whole decode step, 1 to 32 seats, short contexts", 0.70, 0.85),
    "gap": _Goal("host gap between steps, share of the step", 0.05, 0.01, most=True),
    "peer": _Goal("output tokens/s at 64 streams over transformers' continuous batching", 2.0, 2.0),
}


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """The results so far, as a file, as a page and in a few lines."""

    results: DeviceResults

    def as_json(self) -> JsonDict:
        results, plain = self.results, msgspec.to_builtins
        return {
            "about": plain(results.about),
            "shape": results.shape,
            "page_size": results.page_size,
            "floors": plain(results.floors),
            "goals": self.goals(),
            "numerics": self.numerics(),
            "finished": results.finished,
            "rows": [{**plain(row), "fraction": row.fraction} for row in results.rows],
            "seconds": results.seconds,
            "calls": results.calls,
            "budget_s": results.plan.seconds,
        }

    def goals(self) -> list[JsonDict]:
        """Each goal with its worst value, and whether all its values keep the limits; met: None if
        not measured.
        """
        return [self._judged(key, goal) for key, goal in _GOALS.items()]

    def _judged(self, key: str, goal: _Goal) -> JsonDict:
        values = _goal_values(self.results.rows, key) if self.results.real else []
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

    def markdown(self) -> str:
        """The Markdown page."""
        return "\n".join([*self._opening(), "", *self.goal_table(), "", *self._row_tables()])

    def numerics(self) -> str:
        """Whether answers were compared, and with what result."""
        results = self.results
        compared = [row for row in results.rows if row.error is not None]
        first = sum(row.part == "check" for row in compared)
        text = f"{len(compared)} cases compared ({first} of them by part check)"
        if "check" not in results.finished:
            text += "; part check is not finished"
        if results.wrong:
            names = "; ".join(f"{row.name}, {row.case}" for row in results.wrong)
            return f"**WRONG ANSWERS** in {len(results.wrong)}: {names}. {text}"
        return f"No wrong answer in {text}"

    def goal_table(self) -> Iterator[str]:
        """Lines with the goals and their worst measured values."""
        heads = ["goal", "first", "then", "measured (worst)", "figures", "first", "then"]
        rows = [_goal_cells(row) for row in self.goals()]
        yield from Table(heads, rows).markdown_lines()

    def part_table(self) -> Iterator[str]:
        """Lines with the number of rows with figures per part, and the reasons for the others."""
        heads = ["part", "rows with figures", "without", "why"]
        yield from Table(heads, list(self._part_cells())).markdown_lines()

    def _part_cells(self) -> Iterator[list[str]]:
        for part in PARTS:
            rows = [row for row in self.results.rows if row.part == part]
            reasons = Counter(row.note for row in rows if not row.settled)
            without = reasons.total()
            if rows:
                yield [part, str(len(rows) - without), str(without), "; ".join(reasons)]

    def prompt_choice(self) -> PromptChoice | None:
        """The kernels for attention of prompts on this device: the entry for the table
        `kernels/prompt_choices.json`. None until every set that can serve was measured with prompts
        of the same sizes, on an NVIDIA GPU.
        """
        results, about = self.results, self.results.about
        if about is None or not about.sm or not results.real:
            return None
        times = {name: _times_of(results.rows, name) for name in PromptChoices.serving}
        cases = set.intersection(*(set(times[name]) for name in PromptChoices.serving))
        if not cases:
            return None
        seconds = {
            name: round(sum(of_case[case] for case in cases), 9) for name, of_case in times.items()
        }
        ours, theirs = PromptChoices.serving
        return {
            "sm": about.sm,
            "head_dim": SHAPES[results.shape].head_dim,
            "by": theirs if seconds[theirs] < _WORTH * seconds[ours] else ours,
            "seconds": seconds,
            "rows": sorted(int(case.split()[0].replace(",", "")) for case in cases),
            "device": about.device,
            "versions": {
                name: about.versions[name] for name in _PACKAGES if name in about.versions
            },
        }

    def _opening(self) -> Iterator[str]:
        results = self.results
        about, floors = results.about, results.floors
        yield f"# jitney bench device: {results.shape} on {results.device}"
        yield ""
        if about is None:
            yield "The device could not be described."
            return
        if not results.real:
            yield _TINY_NOTE
            yield ""
        yield f"{self.numerics()}."
        yield _programs(about)
        if floors is not None:
            yield _floors_line(floors)
            yield _HOW_TO_READ
        yield f"{results.seconds:.0f} s were used, in {results.calls} calls."

    def _row_tables(self) -> Iterator[str]:
        for name, part in PARTS.items():
            rows = [_cells(row) for row in self.results.rows if row.part == name]
            if rows:
                yield f"## {name}: {part.about}"
                yield ""
                yield from Table(_HEAD, rows).markdown_lines()
                yield ""


def _goal_values(rows: Sequence[Row], goal: str) -> list[float]:
    """The values for a goal: the rows' `share` figure if they have one, else their fractions."""
    if goal == "peer":
        return _peer_ratio(rows)
    values = []
    for row in rows:
        share = row.figures.get("share", row.fraction)
        if row.goal == goal and share is not None:
            values.append(share)
    return values


def _peer_ratio(rows: Sequence[Row]) -> list[float]:
    """Our tokens/s divided by the peer's on the same batch of requests, if both were measured."""
    rates: dict[str, float] = {}
    for row in rows:
        if row.goal in ("peer", "peer's") and "tokens_s" in row.figures:
            rates.setdefault(row.goal, row.figures["tokens_s"])
    if len(rates) < 2:
        return []
    return [rates["peer"] / rates["peer's"]]


def _worst(goal: _Goal, values: Sequence[float]) -> float | None:
    if not values:
        return None
    return max(values) if goal.most else min(values)


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


def _goal_cells(row: JsonObject) -> list[str]:
    goal = _GOALS[row["goal"]]
    sign = "<" if goal.most else ">="
    return [
        goal.what,
        f"{sign} {_number(goal, goal.first)}",
        f"{sign} {_number(goal, goal.then)}",
        "not measured" if row["worst"] is None else _number(goal, row["worst"]),
        str(row["counted"]),
        _VERDICTS[row["met_first"]],
        _VERDICTS[row["met_then"]],
    ]


def _number(goal: _Goal, value: float) -> str:
    """The value as text: a ratio as a number, a share in percent."""
    return f"{value:.2f}x" if goal is _GOALS["peer"] else f"{value:.1%}"


def _cells(row: Row) -> list[str]:
    floor = _duration(row.floor_s)
    if floor:
        floor += f" ({row.bound})"
    spread = None
    if row.seconds and row.repeats >= 2:
        spread = ((row.most or 0.0) - (row.least or 0.0)) / row.seconds
    figures = (_figure(name, value) for name, value in row.figures.items())
    return [
        row.name,
        row.case,
        row.by,
        _duration(row.seconds),
        floor,
        _percent(row.fraction),
        _percent(spread),
        "" if row.error is None else f"{row.error:.1e}",
        row.note or ", ".join(figures),
    ]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _duration(seconds: float | None) -> str:
    """Seconds as text with a suitable unit; empty for None."""
    if seconds is None:
        return ""
    if seconds >= 1.0:
        return f"{seconds:.3f} s"
    if seconds >= 1e-3:
        return f"{seconds / 1e-3:.3f} ms"
    return f"{seconds / 1e-6:.1f} us"


def _figure(name: str, value: float) -> str:
    kind = name.removesuffix("_s")
    if name == "share":
        return f"{value:.2%} of the step"
    if kind == name:
        return f"{value:,.0f} {name}"
    if kind in ("tokens", "requests"):
        return f"{value:,.1f} {kind}/s"
    return f"{kind} {_duration(value)}"


def _times_of(rows: Sequence[Row], name: str) -> dict[str, float]:
    """Seconds of each case of prompts by these kernels, for cases with right answers."""
    seconds_by_case = {}
    for row in rows:
        by = row.by.partition(" ")[0]  # without the instructions: "flashinfer (fa3)"
        if (row.name, by) == ("prompt attention", name) and row.seconds is not None:
            seconds_by_case[row.case] = row.seconds
    return seconds_by_case
