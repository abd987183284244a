"""Set up jax in this process: devices, several hosts, kept programs, the allocator."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jitney.engine.common.cache_folder import compilation_cache_dir, make_private, why_no_room
from jitney.engine.common.errors import ConfigError
from jitney.engine.common.platforms import check_devices, runs_on_device
from jitney.engine.config import Config, EngineSection
from jitney.engine.core.executor.autotuning import programs_folder
from jitney.engine.core.executor.memory import claim_memory
from jitney.engine.core.executor.threads import use_processors

if TYPE_CHECKING:
    from jitney.engine.core.distributed.link import Hosts

_log = logging.getLogger("jitney.core")

#: Parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


#: Free disk space for a model's compiled programs; the default model's take about 10 MB on a CPU.
_PROGRAM_BYTES = 64 << 20


def start_jax(config: Config, hosts: Hosts | None = None) -> list[Any]:
    """Set up jax and return the `tensor_parallel` devices to run on, host by host."""
    if config.engine.threads or not runs_on_device(config.engine.platform):
        use_processors(config.engine.threads)
    libc = _glibc()
    if libc:
        # With an arena per thread, each would keep freed temporaries.
        libc.mallopt(_M_ARENA_MAX, 2)
    if hosts is not None:
        _start_distributed(hosts)
    devices = devices_of(config.engine)
    _keep_programs(config.engine, devices[0])
    if hosts is not None:
        return _of_each_host(devices, config.engine)
    n_devices = config.engine.tensor_parallel
    if len(devices) < n_devices:
        raise ConfigError(
            f"tensor_parallel {n_devices} needs as many devices; jax sees {len(devices)} "
            f"({devices[0].platform})"
        )
    return devices[:n_devices]


def _start_distributed(hosts: Hosts) -> None:
    """Start jax's distributed runtime, through which each host knows the devices of all."""
    # For CPUs; GPUs and TPUs have their own collectives.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        hosts.jax_address,
        hosts.n_hosts,
        hosts.host_id,
        cluster_detection_method="deactivate",
        coordinator_bind_address=hosts.jax_address,
    )


def _of_each_host(devices: list[Any], settings: EngineSection) -> list[Any]:
    """The first devices of each host, as many as its part of tensor_parallel."""
    chosen = []
    n_devices = settings.devices_here
    for host_id in range(settings.n_hosts):
        own = [device for device in devices if device.process_index == host_id]
        if len(own) < n_devices:
            raise ConfigError(
                f"tensor_parallel {settings.tensor_parallel} needs {n_devices} devices on each of "
                f"{settings.n_hosts} hosts; jax sees {len(own)} on host {host_id} "
                f"({devices[0].platform})"
            )
        chosen += own[:n_devices]
    return chosen


def _keep_programs(settings: EngineSection, device: Any) -> None:
    """Make jax keep its compiled programs and XLA's measurements in the folder, if there is one."""
    programs = open_compilation_cache(settings)
    if programs is not None:
        update = jax.config.update
        update("jax_compilation_cache_dir", str(programs_folder(programs, device)))
        reason = why_no_room(programs, _PROGRAM_BYTES)
        if reason:
            _log.warning("NEW COMPILED PROGRAMS ARE NOT KEPT: %s", reason)
        # Programs compiled in less time are read, but not written.
        update("jax_persistent_cache_min_compile_time_secs", math.inf if reason else 0.0)
        update("jax_persistent_cache_min_entry_size_bytes", 0)


def open_compilation_cache(engine: EngineSection) -> Path | None:
    """The folder of compiled programs; None: turned off, or (with a warning) not private."""
    if not engine.compilation_cache:
        return None
    folder = compilation_cache_dir()
    reason = make_private(folder)
    if reason:
        _log.warning(
            "COMPILED PROGRAMS ARE NOT KEPT, so every start compiles again: %s; set JITNEY_CACHE "
            "to another folder, or turn compilation_cache off",
            reason,
        )
        return None
    return folder


def devices_of(settings: EngineSection) -> list[Any]:
    """jax's devices, of which jax takes the share of memory in the settings. Raises ConfigError if
    they are not of the platform in the settings.
    """
    name = settings.platform
    claim_memory(os.environ, settings.memory_share)
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise ConfigError(f"platform {name}: {str(error).splitlines()[0]}") from error
    check_devices(name, devices[0].platform)
    return devices


def keep_freed_memory() -> None:
    """Return the memory that loading and compiling freed to the system, and from then on keep what
    steps free: XLA:CPU allocates temporaries in every step, and page faults cost 5 to 7 % of it.
    """
    libc = _glibc()
    if libc:
        libc.malloc_trim(0)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def _glibc() -> ctypes.CDLL | None:
    """glibc, whose allocator can be tuned; None with another C library."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        return ctypes.CDLL("libc.so.6")
    return None
