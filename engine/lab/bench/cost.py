"""The bill of a run: its rows, device time and money by kind of row.

A step's device time is split evenly over its rows. A padding row costs as much as a useful one, or
nothing where padding is free (`engine.core.scheduler.buckets.Buckets`). Times are integer
nanoseconds, cut at rounded-down edges of cumulated rows, so that parts add up exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import numpy as np

from jitney.engine.common.records import ROW_KINDS
from jitney.engine.common.requests import JsonDict

#: Kinds of rows in the order of splitting: padding first, so that both splits round it alike.
_SPLIT_ORDER = ("padding", *(kind for kind in ROW_KINDS if kind != "padding"))
_NANO = 1_000_000_000


@dataclass(frozen=True, slots=True)
class CostLine:
    """Rows and their device time."""

    rows: int
    nanoseconds: int

    @property
    def seconds(self) -> float:
        return self.nanoseconds / _NANO

    def money(self, price_per_hour: float) -> float:
        """The cost of the time, in the price's unit."""
        return price_per_hour * self.nanoseconds / (3600 * _NANO)


class Bill(dict[str, CostLine]):
    """Lines by kind of row and `idle`, or by request."""

    #: Name of the line of time without steps.
    idle: ClassVar[str] = "idle"

    @classmethod
    def of_steps(
        cls, records: np.ndarray, seconds: float, *, padding_is_free: bool = False
    ) -> Bill:
        """The bill of step records, [steps] STEP_DTYPE.

        `idle` is the rest of `seconds`, the run's wall-clock time, at least 0.
        """
        rows = np.stack([records[kind].astype(np.int64) for kind in _SPLIT_ORDER], axis=1)
        paid = rows.copy()
        if padding_is_free:
            paid[:, 0] = _costly_padding(rows.sum(axis=1), rows[:, 0])
        times = _split(_nanoseconds(records), paid)
        lines = _lines(_SPLIT_ORDER, rows.sum(axis=0).tolist(), times.sum(axis=0).tolist())
        return cls._with_idle(lines, int(times.sum()), seconds)

    @classmethod
    def of_totals(
        cls,
        rows: Mapping[str, int],
        busy_s: float,
        seconds: float,
        *,
        padding_is_free: bool = False,
    ) -> Bill:
        """The bill of totals: `busy_s` of all steps is split evenly over rows, by kind, without
        padding if that is free.
        """
        counts = [rows[kind] for kind in _SPLIT_ORDER]
        paid = [0, *counts[1:]] if padding_is_free else counts
        busy = round(busy_s * _NANO)
        return cls._with_idle(_lines(_SPLIT_ORDER, counts, _shares(busy, paid)), busy, seconds)

    @classmethod
    def _with_idle(cls, lines: Mapping[str, CostLine], busy: int, seconds: float) -> Bill:
        """The lines in the order of ROW_KINDS, and `idle`: `seconds` less `busy` nanoseconds."""
        bill = cls({kind: lines[kind] for kind in ROW_KINDS})
        bill[cls.idle] = CostLine(0, max(0, round(seconds * _NANO) - busy))
        return bill

    def as_json(self, price_per_hour: float | None = None) -> dict[str, JsonDict]:
        """Lines as plain numbers; money only with a price."""
        return {name: _plain(line, price_per_hour) for name, line in self.items()}


def _nanoseconds(records: np.ndarray) -> np.ndarray:
    """Device time of each step [steps] i8, rounded."""
    return np.rint(records["device_s"].astype(np.float64) * _NANO).astype(np.int64)


def _split(total: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Cut totals [n] i8 in proportion to rows [n, k] i8; each row of the result [n, k] i8 adds up
    to its total.
    """
    edges = np.cumsum(rows.astype(np.int64), axis=1)
    whole = np.maximum(1, edges[:, -1:])
    return np.diff(total[:, None] * edges // whole, axis=1, prepend=0)


def _costly_padding(computed: np.ndarray, padding: np.ndarray) -> np.ndarray:
    """Padding rows [steps] that cost time where padding is free: those of steps of padding only."""
    return np.where(padding == computed, padding, 0)


def _shares(total: int, counts: Sequence[int]) -> list[int]:
    """`total` in proportion to the counts, in Python's integers, which never overflow."""
    whole = max(1, sum(counts))
    edges = [total * before // whole for before in accumulate(counts, initial=0)]
    return [high - low for low, high in pairwise(edges)]


def _lines(names: Iterable[str], rows: Sequence[int], times: Sequence[int]) -> Bill:
    """Lines by name; rows and times: one per name."""
    return Bill(zip(names, map(CostLine, rows, times), strict=True))


def _plain(line: CostLine, price_per_hour: float | None) -> JsonDict:
    plain: JsonDict = {"rows": line.rows, "seconds": line.seconds}
    if price_per_hour is not None:
        plain["money"] = line.money(price_per_hour)
    return plain
