"""The bill of a run: all of its time and every row is somebody's, once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitney.engine.common.records import ROW_KINDS, STEP_DTYPE
from jitney.engine.lab.bench.cost import Bill, CostLine


def step(number: int, device_s: float, **rows: int) -> np.ndarray:
    record = np.zeros(1, STEP_DTYPE)
    record["step"], record["device_s"] = number, device_s
    for kind, count in rows.items():
        record[kind] = count
    record["bucket_tokens"] = sum(rows.values())
    return record


def test_a_step_is_paid_for_row_by_row():
    records = np.concatenate((step(1, 0.5, prefill=2, padding=2), step(2, 0.25, decode=4)))
    lines = Bill.of_steps(records, seconds=1.0)
    assert lines["prefill"] == CostLine(2, 0.25) and lines["padding"] == CostLine(2, 0.25)
    assert lines["decode"] == CostLine(4, 0.25) and lines["idle"] == CostLine(0, 0.25)
    assert lines.as_json(price_per_hour=3600.0)["idle"] == {
        "rows": 0,
        "seconds": 0.25,
        "money": pytest.approx(0.25),
    }
    assert "money" not in lines.as_json()["idle"]


_ROWS = st.lists(st.integers(0, 4096), min_size=len(ROW_KINDS), max_size=len(ROW_KINDS)).filter(any)


@given(
    st.lists(
        st.tuples(st.floats(0, 30), _ROWS),
        min_size=1,
        max_size=20,
    )
)
def test_the_lines_add_up_to_the_device_time(steps: list[tuple[float, list[int]]]):
    records = np.concatenate(
        [step(n, s, **dict(zip(ROW_KINDS, rows, strict=True))) for n, (s, rows) in enumerate(steps)]
    )
    device_s = sum(float(np.float32(s)) for s, _ in steps)
    for free in (False, True):
        lines = Bill.of_steps(records, seconds=0.0, padding_is_free=free)
        assert sum(line.seconds for line in lines.values()) == pytest.approx(device_s)
        assert sum(line.rows for line in lines.values()) == sum(sum(rows) for _, rows in steps)
        assert all(line.seconds >= 0 for line in lines.values())
