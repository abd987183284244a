"""Whether the platform that was asked for can be there at all; asked before anything is loaded or
fetched. Jax-free.

jax itself falls back to the CPU in silence where `JAX_PLATFORMS` lists an accelerator whose plugin
is missing. What is found here is quick to say no; `jitney.engine.core.build.start_jax` then asks
jax, which alone can say yes.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import pkgutil
from pathlib import Path

from jitney.engine.common.errors import ConfigError
from jitney.engine.config.extras import how_to_install
from jitney.engine.config.schema import EngineSection

#: The extras that bring what a platform needs, the usual one first.
_EXTRAS = {"cuda": ("cuda12", "cuda13"), "tpu": ("tpu",)}
#: What jax calls the devices of a platform.
_DEVICE_PLATFORMS = {"cpu": ("cpu",), "cuda": ("gpu", "cuda"), "tpu": ("tpu",)}
#: NVIDIA's driver, which CUDA programs load.
_DRIVER = "libcuda.so.1"
#: Where Linux shows the chips of a TPU machine: device files, or a PCI device made by Google.
_TPU_FILES = ("accel*", "vfio/[0-9]*")
_PCI_VENDORS = "/sys/bus/pci/devices/*/vendor"
_GOOGLE = "0x1ae0"


def prepare_platform(engine: EngineSection) -> None:
    """Set what jax reads from the environment, and refuse a platform that cannot be here
    (ConfigError, one line).

    Must come before jax is imported.
    """
    os.environ.update(engine.jax_environment)
    check_platform(engine.platform)


def check_platform(platform: str) -> None:
    """Raise ConfigError, naming what to install, if `platform` (auto, cpu, cuda, tpu) cannot be
    here.
    """
    if platform == "cuda":
        _check_cuda()
    elif platform == "tpu":
        _check_tpu()


def check_devices(platform: str, actual: str) -> None:
    """Raise ConfigError, naming what to install, if jax's devices are not those of `platform`
    (auto: whatever they are); actual: what jax calls them.

    jax falls back to the CPU in silence where a named platform's plugin is missing or does not
    start.
    """
    if platform == "auto" or actual in _DEVICE_PLATFORMS[platform]:
        return
    how = ""
    if platform in _EXTRAS:
        how = f": {_how_to_have(platform)}"
    raise ConfigError(
        f"platform {platform}: jax runs on {actual} here; see what jitney doctor says, and install "
        f"what the platform needs{how}"
    )


def _check_cuda() -> None:
    if not any("cuda" in name for name in _jax_plugins()):
        raise ConfigError(
            f"platform cuda: jax's CUDA plugin is not installed: {_how_to_have('cuda')}"
        )
    problem = _gpu_problem()
    if problem:
        raise ConfigError(
            f"platform cuda: {problem}; choose another platform, or see to the GPU and its driver "
            f"(the extra that brings jax's CUDA plugin: {_how_to_have('cuda')})"
        )


def _check_tpu() -> None:
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(f"platform tpu: libtpu is not installed: {_how_to_have('tpu')}")
    if not _tpu_chips_shown():
        raise ConfigError(
            "platform tpu: this machine shows no TPU chip; choose another platform, or run on a "
            f"TPU VM (the extra that brings libtpu: {_how_to_have('tpu')})"
        )


def _how_to_have(platform: str) -> str:
    """What to type to have what a platform of _EXTRAS needs."""
    return how_to_install(*_EXTRAS[platform])


def _jax_plugins() -> set[str]:
    """Names of the plugins that jax would load, such as xla_cuda12; found as jax finds them."""
    names = {point.name for point in importlib.metadata.entry_points(group="jax_plugins")}
    package = importlib.util.find_spec("jax_plugins")
    if package is not None and package.submodule_search_locations is not None:
        for module in pkgutil.iter_modules(package.submodule_search_locations):
            names.add(module.name)
    return names


def _gpu_problem() -> str:
    """Why NVIDIA's driver gives us no GPU; empty if it gives one. Makes no CUDA context and takes
    no GPU memory.
    """
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


def _tpu_chips_shown(root: Path = Path("/")) -> bool:
    """True if there is a sign of a TPU below `root`: a device file, or a PCI device of Google's
    (also its network card, since jax has the last word)."""
    if any(any((root / "dev").glob(pattern)) for pattern in _TPU_FILES):
        return True
    vendors = root.glob(_PCI_VENDORS.lstrip("/"))
    return any(file.read_text().strip() == _GOOGLE for file in vendors)
