"""The bill of a run: its rows, device time and money by kind of row.

A step's device time is split evenly over its rows. A padding row costs as much as a useful one, or
nothing if padding is free (`engine.core.scheduler.buckets.Buckets`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import numpy as np

from jitney.engine.common.records import ROW_KINDS
from jitney.engine.common.requests import JsonDict


class CostLine(NamedTuple):
    """Rows and their device time."""

    rows: int
    seconds: float

    def money(self, price_per_hour: float) -> float:
        return price_per_hour * self.seconds / 3600


class Bill(dict[str, CostLine]):
    """Lines by kind of row and `idle`."""

    #: Name of the line of time without steps.
    idle: ClassVar[str] = "idle"

    @classmethod
    def of_steps(
        cls, records: np.ndarray, seconds: float, *, padding_is_free: bool = False
    ) -> Bill:
        """The bill of step records, [steps] STEP_DTYPE.

        `idle` is the rest of `seconds`, the run's wall-clock time, at least 0.
        """
        rows = np.stack([records[kind].astype(np.int64) for kind in ROW_KINDS], axis=1)
        paid = rows.copy()
        if padding_is_free:
            # A step with only padding rows still costs its time.
            padding = ROW_KINDS.index("padding")
            paid[rows[:, padding] < rows.sum(axis=1), padding] = 0
        step_s = records["device_s"].astype(np.float64)
        times = paid.T @ (step_s / np.maximum(1, paid.sum(axis=1)))
        counts: dict[str, int] = dict(zip(ROW_KINDS, rows.sum(axis=0).tolist(), strict=True))
        return cls._with_idle(counts, times.tolist(), seconds)

    @classmethod
    def of_totals(
        cls, rows: Mapping[str, int], busy_s: float, seconds: float, *, padding_is_free: bool
    ) -> Bill:
        """The bill of totals: `busy_s` is split evenly over all rows that cost time."""
        paid = dict(rows) | ({"padding": 0} if padding_is_free else {})
        row_s = busy_s / max(1, sum(paid[kind] for kind in ROW_KINDS))
        return cls._with_idle(rows, [row_s * paid[kind] for kind in ROW_KINDS], seconds)

    @classmethod
    def _with_idle(cls, rows: Mapping[str, int], times: list[float], seconds: float) -> Bill:
        """times: seconds of each of ROW_KINDS."""
        paid = zip(ROW_KINDS, times, strict=True)
        bill = cls({kind: CostLine(rows[kind], busy_s) for kind, busy_s in paid})
        bill[cls.idle] = CostLine(0, max(0.0, seconds - sum(times)))
        return bill

    def as_json(self, price_per_hour: float | None = None) -> dict[str, JsonDict]:
        """Lines as plain numbers; money only with a price."""
        plain: dict[str, JsonDict] = {name: line._asdict() for name, line in self.items()}
        if price_per_hour is not None:
            for name, line in self.items():
                plain[name]["money"] = line.money(price_per_hour)
        return plain
