"""Measures the time of each kernel in a decode step, by jax's profiler."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
from jax.typing import DTypeLike
from msgspec.structs import replace

from jitney.engine.core import Bucket, Buckets, RandomModel, StepCase
from jitney.engine.lab.device.rows import PartJob, Row, Task, Tasks
from jitney.engine.lab.device.steps import StepBench
from jitney.kernels.interface import KernelSet

#: Steps under the profiler.
_STEPS = 8
#: Most kernels with their own row; those with the most time.
_MOST_KERNELS = 40
#: Characters of a kernel's name that are shown.
_NAME = 80
#: Names in a trace: prefix of a device's plane, where each stream is a line; plane of a CPU, and
#: prefix of the lines of its thread pool.
_DEVICE, _HOST, _CPU_LINE = "/device:", "/host:CPU", "tf_XLA"
#: Names of a CPU's events that contain others, or mark their end.
_AROUND = ("ThunkExecutor", "end: ")


@dataclass(slots=True)
class _Spent:
    """The seconds of each run of one kernel."""

    seconds: list[float] = field(default_factory=list)

    @property
    def total(self) -> float:
        return sum(self.seconds)


def step_kernels(job: PartJob, sets: Sequence[KernelSet], dtype: DTypeLike) -> Tasks:
    """The decode step with the most seats of the first group, at the longest short context."""
    seats, context = max(job.sizes.steps[0]), max(job.sizes.contexts[0])
    model = RandomModel(job.config, sets[0], dtype)
    bucket = Bucket(seats, seats)
    buckets = Buckets((bucket,), (Bucket(2 * seats, seats),))
    get = cache(partial(StepBench.of, job, model, buckets, context + job.page_size))
    row = job.row("kernels of a step", f"{seats} x {context:,}", sets[0].label)
    yield Task(row, partial(_kernel_rows, get, StepCase(bucket, (context - 1,) * seats)))


def _kernel_rows(get: Any, case: StepCase, row: Row) -> Iterator[Row]:
    """A row for all kernels together, then one for each, the longest first."""
    bench: StepBench = get()
    bench.engine.compile([case.bucket])
    spent = _profiled(bench, case)
    count = sum(len(each.seconds) for each in spent.values())
    if not count:
        yield row.noted("the profiler names no kernel here")
        return
    busy = sum(each.total for each in spent.values()) / _STEPS
    figures = {"kernels": count / _STEPS, "busy_s": busy}
    yield replace(row.timed([busy]), figures=figures, note=f"by the profiler, {_STEPS} steps")
    longest = sorted(spent.items(), key=lambda item: item[1].total, reverse=True)
    for name, each in longest[:_MOST_KERNELS]:
        figures = {"in_a_step": len(each.seconds) / _STEPS, "share": each.total / _STEPS / busy}
        own = replace(row, name="kernel of a decode step", case=f"{row.case}: {name[:_NAME]}")
        yield replace(own.timed([each.total / _STEPS]), figures=figures)


def _profiled(bench: StepBench, case: StepCase) -> dict[str, _Spent]:
    """Name of a kernel -> its seconds in `_STEPS` steps."""
    step = bench.engine.step(case)
    jax.block_until_ready(step.run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(_STEPS):
                output = step.run()
            jax.block_until_ready(output)
        [file] = Path(folder).rglob("*.xplane.pb")
        return _spent_in(jax.profiler.ProfileData.from_file(str(file)))


def _spent_in(trace: Any) -> dict[str, _Spent]:
    """Name of a kernel -> its seconds, from jax's `ProfileData`."""
    spent: dict[str, _Spent] = defaultdict(_Spent)
    for event in _events_of(list(trace.planes)):
        spent[event.name].seconds.append(1e-9 * event.duration_ns)
    return spent


def _events_of(planes: Sequence[Any]) -> Iterable[Any]:
    devices = [plane for plane in planes if plane.name.startswith(_DEVICE)]
    for plane in devices:
        for line in plane.lines:
            if line.name.startswith("Stream") or line.name == "XLA Ops":
                yield from line.events
    if devices:
        return
    for plane in planes:
        if plane.name == _HOST:
            for line in plane.lines:
                if line.name.startswith(_CPU_LINE):
                    yield from (one for one in line.events if not one.name.startswith(_AROUND))
