"""Checks that the configured platform can exist, before anything is loaded. Imports no jax. Without
an accelerator's plugin jax silently falls back to the CPU; `start_jax` then asks jax.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import pkgutil
from pathlib import Path

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.extras import how_to_install

#: The extras that install a platform's packages, the usual one first.
_EXTRAS = {"cuda": ("cuda12", "cuda13"), "tpu": ("tpu",)}
#: jax's names for the devices of a platform.
_DEVICE_PLATFORMS = {"cpu": ("cpu",), "cuda": ("gpu", "cuda"), "tpu": ("tpu",)}
#: NVIDIA's driver library.
_DRIVER = "libcuda.so.1"
#: Signs of TPU chips on Linux: device files, or a PCI device made by Google.
_TPU_FILES = ("accel*", "vfio/[0-9]*")
_PCI_VENDORS = "/sys/bus/pci/devices/*/vendor"
_GOOGLE = "0x1ae0"


def check_platform(platform: str) -> None:
    """Raise ConfigError, naming what to install, if `platform` (auto, cpu, cuda, tpu) is absent."""
    if platform == "cuda":
        _check_cuda()
    elif platform == "tpu":
        _check_tpu()


def runs_on_device(platform: str) -> bool:
    """Whether an engine with this `platform` will probably run on a GPU or TPU; asks no jax."""
    if platform != "auto":
        return platform != "cpu"
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return False
    return any(map(_may_be_here, ("cuda", "tpu")))


def _may_be_here(platform: str) -> bool:
    try:
        check_platform(platform)
    except ConfigError:
        return False
    return True


def check_devices(platform: str, actual: str) -> None:
    """Raise ConfigError if jax, which falls back silently, runs on another platform (`actual`)."""
    if platform == "auto" or actual in _DEVICE_PLATFORMS[platform]:
        return
    how = ""
    if platform in _EXTRAS:
        how = f": {_how_to_install(platform)}"
    raise ConfigError(
        f"platform {platform}: jax runs on {actual} here; run jitney doctor, and install what the "
        f"platform needs{how}"
    )


def _check_cuda() -> None:
    if not any("cuda" in name for name in _jax_plugins()):
        raise ConfigError(
            f"platform cuda: jax's CUDA plugin is not installed: {_how_to_install('cuda')}"
        )
    problem = _gpu_problem()
    if problem:
        raise ConfigError(
            f"platform cuda: {problem}; choose another platform, or check the GPU and its driver "
            f"(the extra with jax's CUDA plugin: {_how_to_install('cuda')})"
        )


def _check_tpu() -> None:
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(f"platform tpu: libtpu is not installed: {_how_to_install('tpu')}")
    if not _finds_tpu():
        raise ConfigError(
            "platform tpu: this machine shows no TPU chip; choose another platform, or run on a "
            f"TPU VM (the extra with libtpu: {_how_to_install('tpu')})"
        )


def _how_to_install(platform: str) -> str:
    return how_to_install(*_EXTRAS[platform])


def _jax_plugins() -> set[str]:
    """Names of the plugins that jax would load, such as xla_cuda12."""
    names = {point.name for point in importlib.metadata.entry_points(group="jax_plugins")}
    package = importlib.util.find_spec("jax_plugins")
    if package is not None and package.submodule_search_locations is not None:
        for module in pkgutil.iter_modules(package.submodule_search_locations):
            names.add(module.name)
    return names


def _gpu_problem() -> str:
    """The reason why no GPU can be used, or "". Makes no CUDA context and takes no GPU memory."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return f"no NVIDIA driver ({_DRIVER}) on this machine"
    count = ctypes.c_int(0)
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status:
        return f"NVIDIA's driver finds no usable GPU (CUDA error {status})"
    if not count.value:
        return "NVIDIA's driver finds no GPU"
    return ""


def _finds_tpu(root: Path = Path("/")) -> bool:
    """True with a TPU's device file or a Google PCI device (maybe a network card) below `root`."""
    if any(any((root / "dev").glob(pattern)) for pattern in _TPU_FILES):
        return True
    vendors = root.glob(_PCI_VENDORS.lstrip("/"))
    return any(file.read_text().strip() == _GOOGLE for file in vendors)
