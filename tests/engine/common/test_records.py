"""The ledger: a ring that forgets, totals that do not, and a sum that must close."""

from __future__ import annotations

import pytest

from jitney.engine.common.records import _SUMMED, ROW_KINDS, STEP_DTYPE, Ledger

NAMES = STEP_DTYPE.names or ()


def fields(step: int, **given: float) -> dict[str, float]:
    """A record of 8 rows, all padding unless given."""
    return {name: 0 for name in NAMES} | {"step": step, "bucket_tokens": 8, "padding": 8} | given


def test_since_returns_the_newer_ones_oldest_first():
    ledger = Ledger(capacity=4)
    assert ledger.since(0).tolist() == [] and len(ledger) == 0
    for step in range(1, 8):
        ledger.record(**fields(step))
        kept = list(range(max(1, step - 3), step + 1))
        assert ledger.since(0)["step"].tolist() == kept
        assert ledger.since(step - 2)["step"].tolist() == [s for s in kept if s > step - 2]
        assert ledger.since(step).tolist() == []
    assert (len(ledger), ledger.steps) == (4, 7)


def test_what_since_returns_does_not_change():
    ledger = Ledger(capacity=2)
    ledger.record(**fields(1))
    kept = ledger.since(0)
    for step in (2, 3):
        ledger.record(**fields(step))
    assert kept["step"].tolist() == [1]


@pytest.mark.parametrize("capacity", [1, 2, 3, 300])
@pytest.mark.parametrize("asks_every", [1, 2, 7, 1000])
def test_totals_outlive_the_ring(capacity: int, asks_every: int):
    ledger = Ledger(capacity=capacity)
    for step in range(1, 601):
        ledger.record(**fields(step, padding=3, decode=5, finished=step))
        if step % asks_every == 0 or step == 600:
            grown = {
                "bucket_tokens": 8 * step,
                "padding": 3 * step,
                "decode": 5 * step,
                "finished": step * (step + 1) // 2,
            }
            assert ledger.totals == dict.fromkeys(_SUMMED, 0) | grown


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_a_row_too_many_does_not_close(kind: str):
    ledger = Ledger()
    ledger.record(**fields(1))
    assert ledger.closes()
    ledger.record(**fields(2, **{kind: 9 if kind == "padding" else 1}))
    assert not ledger.closes()
