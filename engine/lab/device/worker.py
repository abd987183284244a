"""Runs one part of `jitney bench device` in its own process: a job on standard input, a line of
JSON per row on standard output.

The process is separate so that a part that dies, hangs or fills the memory does not affect others,
and so that parts can have different settings that jax reads at its start.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from jitney.engine.lab.device.parts import PARTS
from jitney.engine.lab.device.rows import About, Floors, PartJob, Row, Sizes, Tasks

if TYPE_CHECKING:
    import numpy as np

    from jitney.kernels.interface import KernelSet

_PACKAGE = "jitney.engine.lab.device"
_PACKAGES = (
    "jitney",
    "jax",
    "jaxlib",
    "jax-triton",
    "triton",
    "libtpu",
    "torch",
    "transformers",
    "vllm",
    "flashinfer-python",
    "jax-tvm-ffi",
)


class PartMessage(msgspec.Struct, omit_defaults=True):
    """A line that the process prints."""

    row: Row | None = None
    about: About | None = None
    floors: Floors | None = None


def _main() -> int:
    """Run the job; exit status 0."""
    job = msgspec.json.decode(sys.stdin.read(), type=PartJob)
    for line in _lines_of(job):
        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
        sys.stdout.flush()
    return 0


def _lines_of(job: PartJob) -> Iterator[PartMessage]:
    if job.part == job.ABOUT:
        sets, dtype = _kernels_of(job)
        yield PartMessage(about=_about_device(sets[0], dtype))
        return
    if job.part == "floors":
        _, dtype = _kernels_of(job)
        yield PartMessage(floors=_floors_in(dtype))
        return
    part = PARTS[job.part]
    module, _, name = part.tasks.partition(":")
    make: Callable[..., Tasks] = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)
    tasks = make(job, *_kernels_of(job)) if part.starts_jax else make(job)
    for row in _rows_of(job, tasks):
        yield PartMessage(row=row)


def _rows_of(job: PartJob, tasks: Tasks) -> Iterator[Row]:
    """The rows of all tasks without a result from an earlier call. An exception becomes a row with
    a note; no task begins once the time is up.
    """
    until = time.monotonic() + job.seconds
    for task in tasks:
        if task.row.of in job.settled:
            continue
        if time.monotonic() > until:
            yield task.row.noted(f"not run: {task.row.NO_TIME}")
            continue
        try:
            yield from task.run(task.row)
        except Exception as error:  # after any driver error, the next case may still work
            yield task.row.noted(_failure(error))


def _failure(error: Exception) -> str:
    words = " ".join(str(error).split())[:200]
    return f"failed: {type(error).__name__}: {words}"


def _kernels_of(job: PartJob) -> tuple[Sequence[KernelSet], np.dtype]:
    """(the chosen kernel set and the one to compare with, dtype); starts jax."""
    from jitney.engine.config import ResolvedConfig
    from jitney.engine.core import start_device

    config = ResolvedConfig.load(flags={"platform": job.platform, "dtype": job.dtype}).config
    return start_device(config, filter(None, (job.kernels, job.against)))


def _floors_in(dtype: np.dtype) -> Floors:
    """Measure the rates of the device."""
    import jax

    from jitney.engine.lab.device.timing import measure_floors

    return measure_floors(Sizes.on(jax.devices()[0].platform), dtype)


def _about_device(kernels: KernelSet, dtype: np.dtype) -> About:
    import jax

    from jitney.engine.core import name_of

    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    return About(
        device=device.device_kind,
        platform=device.platform,
        kernels=kernels.label,
        kernel_set=kernels.name,
        dtype=str(dtype),
        memory=stats.get("bytes_limit", 0),
        versions=_versions(),
        choices=name_of(device) if jax.config.jax_compilation_cache_dir else "",
        sm=_compute_capability(),
    )


def _compute_capability() -> int:
    """Compute capability of an NVIDIA GPU, as 90 for 9.0; 0 for anything else."""
    from jitney.kernels.interface import KernelError
    from jitney.kernels.select import compute_capability

    try:
        return compute_capability()
    except KernelError:
        return 0


def _versions() -> dict[str, str]:
    """Versions of the installed packages on which the figures depend."""
    versions = {}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


if __name__ == "__main__":
    sys.exit(_main())
