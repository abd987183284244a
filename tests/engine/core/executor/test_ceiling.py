"""What is measured of the device: rates of this machine, in proportion to its devices."""

from __future__ import annotations

import jax
import pytest

from jitney.engine.core.executor import ceiling
from jitney.engine.core.executor.ceiling import ceiling_or_none, measure_ceiling
from jitney.kernels.select import select


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ceiling, "_READ_BYTES", {True: 1 << 20, False: 1 << 20})
    monkeypatch.setattr(ceiling, "_PRODUCT", {True: (16, 128), False: (16, 128)})


def test_rates_are_work_over_time(small, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ceiling, "_least_seconds", lambda step, x: (step(x), 0.5)[1])
    of_two = measure_ceiling(select("cpu", "auto"), "float32", n_devices=2)
    assert of_two.bytes_s == 2 * (1 << 20) / 0.5
    assert of_two.operations_s == 2 * (2 * 16 * 128 * 128) / 0.5


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_every_kernel_set_can_be_measured(small, kernels: str):
    found = measure_ceiling(select("cpu", kernels), "float32")
    assert found.bytes_s > 0 and found.operations_s and found.operations_s > 0


def test_a_full_memory_leaves_it_unknown(small, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> float:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room\nmore")

    monkeypatch.setattr(ceiling, "_least_seconds", full)
    assert ceiling_or_none(select("cpu", "reference"), "float32", 1) is None
