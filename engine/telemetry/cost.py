"""The ledger report: where the rows, the device's time and the money of a run went, by kind and by
request.

A step's device time is split over the rows it computed, evenly: a padding row costs as much as a
useful one. Times are whole nanoseconds and are cut at the rounded-down edges of cumulated rows, so
the parts of a step, a run or a request always add up to the whole, to the nanosecond.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from jitney.engine.records import ROW_KINDS
from jitney.engine.scheduler.plan import Plan

#: What a bill has a line for: every kind of row (padding first, so that both splits cut it alike),
#: and no step at all.
SPLIT_ORDER = ("padding", *(kind for kind in ROW_KINDS if kind != "padding"))
IDLE = "idle"
NANO = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Line:
    """Rows (each is one token's way through the model) and the device time they took."""

    rows: int
    nanoseconds: int

    @property
    def seconds(self) -> float:
        return self.nanoseconds / NANO

    def money(self, price_per_hour: float) -> float:
        """What that time costs, in the price's own unit."""
        return price_per_hour * self.nanoseconds / (3600 * NANO)


def _nanoseconds(records: np.ndarray) -> np.ndarray:
    """Device time of each step [steps] i8, rounded."""
    return np.rint(records["device_s"].astype(np.float64) * NANO).astype(np.int64)


def split(total: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Cut totals [n] i8 in proportion to rows [n, k] i8; each row of the result [n, k] i8 adds up
    to its total.
    """
    edges = np.cumsum(rows.astype(np.int64), axis=1)
    whole = np.maximum(1, edges[:, -1:])
    return np.diff(total[:, None] * edges // whole, axis=1, prepend=0)


def bill(records: np.ndarray, seconds: float) -> dict[str, Line]:
    """Rows and device time by kind, of steps [steps] STEP_DTYPE, and `idle`: the run's other time.

    Idle is what is left of `seconds`, the run's wall-clock time; none if the steps took longer than
    that.
    """
    rows = np.stack([records[kind].astype(np.int64) for kind in SPLIT_ORDER], axis=1)
    parts = split(_nanoseconds(records), rows)
    lines = {
        kind: Line(int(rows[:, at].sum()), int(parts[:, at].sum()))
        for at, kind in enumerate(SPLIT_ORDER)
    }
    busy = sum(line.nanoseconds for line in lines.values())
    return {kind: lines[kind] for kind in ROW_KINDS} | {
        IDLE: Line(0, max(0, round(seconds * NANO) - busy))
    }


class RowOwners:
    """Whose rows each step computed; told every plan once, when it is packed. Costs three appends
    per chunk.
    """

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}  # request id -> its number here, in order of first rows
        self._steps, self._owners, self._rows = array("q"), array("q"), array("q")

    def note(self, plan: Plan) -> None:
        """Take down the rows of a plan."""
        steps, owners, rows, numbers = self._steps, self._owners, self._rows, self.requests
        for chunk in plan.chunks:
            steps.append(plan.number)
            owners.append(numbers.setdefault(chunk.seq.request.id, len(numbers)))
            rows.append(chunk.count)

    def bill(self, records: np.ndarray) -> tuple[dict[str, Line], Line]:
        """(rows and device time of each request, the rest: padding) of steps [steps] STEP_DTYPE in
        order.

        A request pays for its own rows alone, computed in vain or not; padding is nobody's. Both
        together are exactly the device time of the records. Rows of steps that have no record are
        left out.
        """
        steps, owners, rows = (
            np.frombuffer(column, np.int64) for column in (self._steps, self._owners, self._rows)
        )
        kept = np.isin(steps, records["step"])
        at = np.searchsorted(records["step"], steps[kept])
        owners, rows = owners[kept], rows[kept]
        total, computed, padding = (
            _nanoseconds(records),
            records["bucket_tokens"].astype(np.int64),
            records["padding"].astype(np.int64),
        )
        own = _cut(total, computed, padding, at, rows)
        count = len(self.requests)
        per_rows, per_time = (np.zeros(count, np.int64) for _ in range(2))
        np.add.at(per_rows, owners, rows)
        np.add.at(per_time, owners, own)
        lines = {
            name: Line(int(per_rows[number]), int(per_time[number]))
            for name, number in self.requests.items()
        }
        return lines, Line(
            int(padding.sum()), int((total * padding // np.maximum(1, computed)).sum())
        )


def _cut(
    total: np.ndarray, computed: np.ndarray, padding: np.ndarray, at: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """Device time [m] i8 of entries that have `rows` [m] in step `at` [m], behind the step's
    padding.
    """
    ends = np.cumsum(rows)
    before = ends - rows
    first = np.searchsorted(at, at)  # each entry's first neighbour in the same step
    ends, before = (padding[at] + column - before[first] for column in (ends, before))
    whole = np.maximum(1, computed[at])
    return total[at] * ends // whole - total[at] * before // whole


def as_json(
    lines: dict[str, Line], price_per_hour: float | None = None
) -> dict[str, dict[str, Any]]:
    """Lines as plain numbers; money only with a price."""
    return {
        name: {"rows": line.rows, "seconds": line.seconds}
        | ({} if price_per_hour is None else {"money": line.money(price_per_hour)})
        for name, line in lines.items()
    }
