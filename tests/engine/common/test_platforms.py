"""A platform is what it says: one that is not here ends the command at once, before any model is
looked for.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from places import CONFIGS

from jitney.engine.cli import main
from jitney.engine.common import platforms
from jitney.engine.common.errors import ConfigError
from jitney.engine.config.layers import ResolvedConfig
from jitney.engine.core.jax_start import start_jax
from jitney.engine.core.llm import LLM
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.lab.device import worker
from jitney.engine.lab.device.rows import PartJob

COMMANDS = ["serve", "generate --prompt x", "chat", "bench policies", "bench step", "bench sweep"]


@pytest.fixture(autouse=True)
def nothing_left_in_the_environment(monkeypatch: pytest.MonkeyPatch):
    """The commands set what jax reads; each test hands the environment back as it was."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch):
    """A machine with neither plugin, where looking for a model is an error."""
    monkeypatch.setattr(platforms, "_jax_plugins", set)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "libtpu" else find(name, *rest),
    )
    monkeypatch.setattr(
        ModelSource, "resolve", lambda *words, **options: pytest.fail("a model was looked for")
    )


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1, said
    return said.err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("platform", "extra"), [("cuda", '".[cuda12]" (or cuda13)'), ("tpu", '".[tpu]"')]
)
@pytest.mark.usefixtures("bare")
def test_every_command_names_the_extra_at_once(
    capsys: pytest.CaptureFixture[str], command: str, platform: str, extra: str
):
    assert main([*command.split(), "--platform", platform, "--model", "owner/model"]) == 2
    line = one_line(capsys)
    assert line.startswith(f"jitney: platform {platform}: ") and f"pip install -e {extra}" in line


@pytest.mark.parametrize("name", ["h100", "l4", "v5e-1", "v6e-4"])
@pytest.mark.usefixtures("bare")
def test_the_configurations_of_devices_do_not_serve_on_a_cpu(
    capsys: pytest.CaptureFixture[str], name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JITNEY_API_KEYS", "k" * 32)
    assert main(["serve", "--config", str(CONFIGS / f"{name}.toml")]) == 2
    assert "pip install -e" in one_line(capsys)


@pytest.mark.usefixtures("bare")
def test_the_offline_api_and_bench_device_refuse_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    with pytest.raises(ConfigError, match=r'platform tpu: .*pip install -e "\.\[tpu\]"'):
        LLM("owner/model", platform="tpu")
    assert main(["bench", "device", "--platform", "cuda", "--out-dir", str(tmp_path)]) == 2
    assert "cuda12" in one_line(capsys) and not list(tmp_path.iterdir())


@pytest.mark.usefixtures("bare")
def test_doctor_reports_it_as_bad_and_runs_nothing_elsewhere(capsys: pytest.CaptureFixture[str]):
    assert (
        main(["doctor", "--json", "--platform", "cuda", "--port", "0", "--model", "owner/model"])
        == 1
    )
    found = json.loads(capsys.readouterr().out)
    for name in ("devices", "kernels", "one token"):
        assert found[name]["ok"] is False and "cuda12" in found[name]["value"]
    assert "weights and KV" not in found


def test_what_jax_then_runs_on_has_the_last_word(monkeypatch: pytest.MonkeyPatch):
    """The plugin is installed and a chip is shown, and yet jax starts on the CPU."""
    with pytest.raises(ConfigError, match=r"platform cuda: jax runs on cpu here.*\[cuda12\]"):
        start_jax(ResolvedConfig.load(flags={"platform": "cuda"}).config)
    with pytest.raises(ConfigError, match=r"platform tpu: jax runs on cpu here.*\[tpu\]"):
        worker._kernels_of(
            PartJob(
                part="floors",
                shape="tiny",
                dtype="auto",
                kernels="auto",
                page_size=16,
                seconds=1.0,
                platform="tpu",
            )
        )
    for name in ("auto", "cpu"):
        assert start_jax(ResolvedConfig.load(flags={"platform": name}).config)[0].platform == "cpu"
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="gpu")])
    assert start_jax(ResolvedConfig.load(flags={"platform": "cuda"}).config)[0].platform == "gpu"


@pytest.mark.parametrize(
    "command", ["serve", "generate --prompt x", "chat", "bench policies", "doctor"]
)
@pytest.mark.usefixtures("bare")
def test_unknown_kernels_are_refused_before_a_model_is_looked_for(
    capsys: pytest.CaptureFixture[str], command: str
):
    assert main([*command.split(), "--kernels", "foo"]) == 2
    line = one_line(capsys)
    assert (
        "--kernels" in line
        and "'auto', 'reference'" in line
        and "'triton'" in line
        and "not 'foo'" in line
    )


# What the machine shows


class Driver:
    """NVIDIA's driver with so many GPUs; status: what cuInit returns."""

    def __init__(self, count: int, status: int = 0):
        self.count, self.status = count, status

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.count
        return 0


@pytest.mark.parametrize(
    ("driver", "problem"),
    [
        (Driver(1), ""),
        (Driver(8), ""),
        (Driver(0), "finds no GPU"),
        (Driver(0, status=100), "CUDA error 100"),
    ],
)
def test_the_driver_is_asked_for_gpus(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, problem: str
):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(platforms, "_jax_plugins", lambda: {"xla_cuda12"})
    if not problem:
        platforms.check_platform("cuda")
        return
    with pytest.raises(ConfigError, match=f"platform cuda: NVIDIA's driver .*{problem}"):
        platforms.check_platform("cuda")


def test_a_machine_without_a_driver_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platforms, "_jax_plugins", lambda: {"xla_cuda13"})
    monkeypatch.setattr(platforms, "_DRIVER", "libno-such-driver.so.1")
    with pytest.raises(ConfigError, match=r"platform cuda: no NVIDIA driver \(libno-such-driver"):
        platforms.check_platform("cuda")


@pytest.mark.parametrize(
    ("file", "content", "shown"),
    [
        ("dev/accel0", "", True),
        ("dev/vfio/0", "", True),
        ("dev/vfio/vfio", "", False),
        ("dev/null", "", False),
        ("sys/bus/pci/devices/0000:00:04.0/vendor", "0x1ae0\n", True),
        ("sys/bus/pci/devices/0000:00:04.0/vendor", "0x10de\n", False),
    ],
)
def test_signs_of_a_tpu(tmp_path: Path, file: str, content: str, shown: bool):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert platforms._finds_tpu(tmp_path) is shown


def test_a_libtpu_without_a_chip_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr(platforms, "_finds_tpu", lambda: False)
    with pytest.raises(ConfigError, match="platform tpu: this machine shows no TPU chip"):
        platforms.check_platform("tpu")
    monkeypatch.setattr(platforms, "_finds_tpu", lambda: True)
    platforms.check_platform("tpu")


def test_plugins_are_found_as_jax_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "jax_plugins" / "xla_cuda99").mkdir(parents=True)
    (tmp_path / "jax_plugins" / "xla_cuda99" / "__init__.py").write_text(
        "raise RuntimeError('looked for, not loaded')"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "xla_cuda99" in platforms._jax_plugins()


def test_where_an_engine_will_run(monkeypatch: pytest.MonkeyPatch):
    assert platforms.runs_on_device("cuda") and platforms.runs_on_device("tpu")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert not any(map(platforms.runs_on_device, ("cpu", "auto")))
