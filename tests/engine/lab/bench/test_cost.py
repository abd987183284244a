"""The bill of a run: every nanosecond and every row is somebody's, exactly once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitney.engine.common.records import ROW_KINDS, STEP_DTYPE
from jitney.engine.lab.bench.cost import Bill, CostLine, _split


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
    assert lines["prefill"] == CostLine(2, 250_000_000) and lines["padding"] == CostLine(
        2, 250_000_000
    )
    assert lines["decode"] == CostLine(4, 250_000_000) and lines["idle"] == CostLine(0, 250_000_000)
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
    exact = sum(round(float(np.float32(s)) * 1e9) for s, _ in steps)
    for free in (False, True):
        lines = Bill.of_steps(records, seconds=0.0, padding_is_free=free)
        assert sum(line.nanoseconds for line in lines.values()) == exact
        assert sum(line.rows for line in lines.values()) == sum(sum(rows) for _, rows in steps)
        assert all(line.nanoseconds >= 0 for line in lines.values())


def test_padding_that_is_free_is_not_paid_for():
    records = np.concatenate((step(1, 0.5, prefill=2, padding=2), step(2, 0.25, padding=4)))
    lines = Bill.of_steps(records, seconds=1.0, padding_is_free=True)
    assert lines["prefill"] == CostLine(2, 500_000_000)
    assert lines["padding"] == CostLine(6, 250_000_000), "somebody pays for a step of nothing else"


@given(st.integers(0, 10**11), st.lists(st.integers(0, 65536), min_size=1, max_size=50).filter(any))
def test_a_part_is_within_a_nanosecond_of_its_share(total: int, rows: list[int]):
    (parts,) = _split(np.array([total]), np.array([rows])).tolist()
    assert sum(parts) == total
    assert all(
        abs(part - total * count / sum(rows)) <= 1 for part, count in zip(parts, rows, strict=True)
    )
