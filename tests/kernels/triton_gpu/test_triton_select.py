"""Who gets the Triton kernels, who is told why not, and the traps of the versions they need."""

from __future__ import annotations

import importlib
import logging
import os
from importlib import metadata
from types import SimpleNamespace
from typing import Any, get_args

import jax
import pytest

from jitney.engine.config.schema import _KernelsName
from jitney.kernels.interface import KernelError
from jitney.kernels.select import _BEST, _KERNEL_SETS, _triton_for, select
from jitney.kernels.triton_gpu import launch

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def forget() -> None:
    """Each test asks anew what can run."""
    _triton_for.cache_clear()


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What importlib.metadata says is installed."""
    found = {"jax": "0.11.2", "jax-triton": "0.4.1", "triton": "3.9.0"}

    def version(name: str) -> str:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "version", version)
    return found


def pretend(monkeypatch: pytest.MonkeyPatch, **device: Any) -> None:
    """jax sees one device with these attributes."""
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(**device)])


def test_a_gpu_gets_triton(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, platform="gpu", compute_capability="9.0", device_kind="H100")
    kernels = select("gpu")
    assert kernels.name == "triton"
    assert kernels.threshold is not None
    assert kernels is select("gpu", "triton")  # one constant of all jitted steps


def test_a_named_set_that_cannot_run_says_why():
    with pytest.raises(KernelError, match="kernels triton need an NVIDIA GPU; jax runs on cpu"):
        select("cpu", "triton")


@pytest.mark.parametrize(
    "device,message",
    [
        (
            {"platform": "gpu", "compute_capability": "7.5", "device_kind": "T4"},
            "capability 8.0; this T4 has 7.5",
        ),
        (
            {"platform": "gpu", "compute_capability": "gfx942", "device_kind": "MI300"},
            "need an NVIDIA GPU",
        ),
    ],
)
def test_a_gpu_that_cannot_run_them_says_so_unless_the_reference_is_named(
    monkeypatch: pytest.MonkeyPatch, device: dict[str, str], message: str
):
    pretend(monkeypatch, **device)
    with pytest.raises(KernelError, match=message):
        select("gpu", "triton")
    with pytest.raises(
        KernelError,
        match=f"{message}.*; or run the slow reference by its name, --kernels reference",
    ):
        select("gpu")
    assert select("gpu", "reference").name == "reference"


def test_a_tpu_that_jax_does_not_see_gets_no_reference_in_silence():
    with pytest.raises(
        KernelError, match=r"kernels pallas need a TPU; jax runs on cpu.*--kernels reference"
    ):
        select("tpu")


def test_a_cpu_gets_the_reference_in_place_of_its_own_kernels_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken() -> None:
        raise KernelError("kernels native cannot run here: no compiler")

    monkeypatch.setitem(_KERNEL_SETS, _BEST["cpu"], broken)
    with caplog.at_level(logging.WARNING):
        assert select("cpu").name == "reference"
    (line,) = caplog.records
    assert (
        line.getMessage()
        == "kernels native cannot run here: no compiler; the slower reference kernels serve"
    )


def test_the_configuration_knows_every_set_by_name():
    assert get_args(_KernelsName) == ("auto", *_KERNEL_SETS)


def test_an_unknown_card_is_refused_with_one_line(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, platform="gpu", compute_capability="12.2", device_kind="RTX 6090")
    with pytest.raises(
        KernelError, match=r"compute capability 12\.2 is not known.*--kernels reference$"
    ):
        select("gpu")


def test_jax_triton_that_is_missing_or_too_old_is_named(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]
):
    pretend(monkeypatch, platform="gpu", compute_capability="9.0", device_kind="H100")
    versions["jax"] = "0.12.0.1"
    with pytest.raises(
        KernelError, match=r"jax-triton 0\.4\.1 fails with jax 0\.12\.0\.1; install jax<0\.12"
    ):
        select("gpu", "triton")
    versions["jax-triton"] = "0.4.2"
    assert select("gpu", "triton").name == "triton"
    _triton_for.cache_clear()
    del versions["jax-triton"]
    with pytest.raises(
        KernelError, match=r'jax-triton is not installed: pip install -e "\.\[cuda12\]"'
    ):
        select("gpu", "triton")


@pytest.mark.parametrize(
    "version,numbers", [("0.12.0.1", (0, 12, 0, 1)), ("3.9.0rc1", (3, 9)), ("0.11", (0, 11))]
)
def test_versions_are_read_up_to_what_is_no_number(version: str, numbers: tuple[int, ...]):
    assert launch._release(version) == numbers


def test_an_old_triton_gets_the_constant_that_keeps_its_backend_alive(
    monkeypatch: pytest.MonkeyPatch,
):
    driver = importlib.import_module("triton.backends.nvidia.driver")
    monkeypatch.delattr(driver, "TMA_TF32", raising=False)
    launch._name_tf32()
    assert driver.TMA_TF32 == 11


def test_importing_jax_triton_leaves_the_cache_folder_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    monkeypatch.setattr(
        importlib,
        "import_module",
        lambda name: (
            os.environ.pop("TRITON_CACHE_DIR", None) if name == "jax_triton" else None,
            SimpleNamespace(TMA_TF32=11),
        )[1],
    )
    launch._jax_triton()
    assert os.environ["TRITON_CACHE_DIR"] == "/somewhere"
