"""What is measured of the device: rates of this machine, in proportion to its devices."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from jitney.engine.common.other_work import OtherWork
from jitney.engine.common.step_cost import DeviceCeiling
from jitney.engine.core.executor import ceiling
from jitney.engine.core.executor.ceiling import ceiling_or_none, kept_ceiling, measure_ceiling
from jitney.kernels.interface import KernelSet
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


@pytest.fixture
def measured(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often anything was measured: one number for each time. The cache folder is empty."""
    times: list[int] = []

    def measure(kernels: KernelSet, dtype: str, n_devices: int) -> DeviceCeiling:
        times.append(n_devices)
        return DeviceCeiling(bytes_s=5.0, operations_s=7.0)

    monkeypatch.setenv("JITNEY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ceiling, "measure_ceiling", measure)
    monkeypatch.setattr(OtherWork, "share", lambda self: 0.0)
    return times


def test_a_later_start_measures_nothing(measured: list[int]):
    kernels = select("cpu", "reference")
    first = kept_ceiling(kernels, "float32", 1)
    assert first == kept_ceiling(kernels, "float32", 1) == DeviceCeiling(bytes_s=5, operations_s=7)
    assert measured == [1]


def test_a_measurement_holds_for_its_devices_numbers_and_versions(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
):
    kernels = select("cpu", "reference")
    kept_ceiling(kernels, "float32", 1)
    kept_ceiling(kernels, "float32", 2)
    kept_ceiling(kernels, "bfloat16", 1)
    assert measured == [1, 2, 1]
    monkeypatch.setattr(ceiling, "version", lambda name: "another")
    kept_ceiling(kernels, "float32", 1)
    monkeypatch.setattr(ceiling, "processor_name", lambda: "another processor")
    kept_ceiling(kernels, "float32", 1)
    assert measured == [1, 2, 1, 1, 1]


@pytest.mark.parametrize("text", [b"", b"{", b'{"operations_s": 7.0}', b'{"bytes_s": "fast"}'])
def test_a_kept_file_that_cannot_be_read_is_measured_again(
    measured: list[int], tmp_path: Path, text: bytes
):
    kernels = select("cpu", "reference")
    kept_ceiling(kernels, "float32", 1)
    (file,) = (tmp_path / "cache" / "ceilings").iterdir()
    file.write_bytes(text)
    assert kept_ceiling(kernels, "float32", 1) == DeviceCeiling(bytes_s=5, operations_s=7)
    assert measured == [1, 1]


def test_what_was_measured_beside_other_programs_is_not_kept(
    measured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(OtherWork, "share", lambda self: 0.2)
    assert kept_ceiling(select("cpu", "reference"), "float32", 1) is not None
    assert not (tmp_path / "cache").exists()
