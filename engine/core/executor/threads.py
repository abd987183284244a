"""Chooses the number of threads for a CPU's steps, and their processors.

XLA and the native kernels start a thread per allowed processor. If a container's quota is smaller,
waiting threads use it up and all threads stop until the next period; and two hyperthreads of a core
share its multipliers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.machine import own_processors

_log = logging.getLogger("jitney.core")

_ROOT = Path("/")
_TOPOLOGY = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_GROUPS = "sys/fs/cgroup"


@dataclass(frozen=True, slots=True)
class _Processors:
    """The processors to compute on, and the reasons for this choice."""

    #: Numbers of the chosen processors, ascending.
    chosen: tuple[int, ...]
    #: Number of processors on which the process may run.
    allowed: int
    #: Number of cores among these.
    cores: int
    #: Processor time that the control group allows, in processors; None: no limit.
    quota: float | None
    #: Requested number of threads; 0: as many as are useful.
    wanted: int

    def __str__(self) -> str:
        count = len(self.chosen)
        words = f"{count} thread{'' if count == 1 else 's'}"
        if self.wanted:
            return f"{words}, as asked for"
        reasons = [f"{self.allowed} processors", f"{self.cores} cores"]
        if self.quota is not None:
            reasons.append(f"a quota of {self.quota:g}")
        return f"{words}: {', '.join(reasons)}"


@cache  # only once: afterwards only the chosen processors are allowed
def use_processors(wanted: int) -> None:
    """Restrict this process and its later threads to useful processors, before jax starts its own.
    wanted: how many; 0: as many as are useful. Raises ConfigError for more than there are.
    """
    if not hasattr(os, "sched_setaffinity"):
        if wanted:
            raise ConfigError("threads: this system does not let a process choose its processors")
        return
    processors = processors_here(wanted)
    if len(processors.chosen) < processors.allowed:
        os.sched_setaffinity(0, processors.chosen)
    _log.info("steps are computed with %s", processors)


def processors_here(wanted: int) -> _Processors:
    """The processors that `use_processors` would choose now. Raises ConfigError."""
    return _choose_processors(own_processors(), wanted)


def _choose_processors(allowed: Sequence[int], wanted: int, root: Path = _ROOT) -> _Processors:
    """Choose one processor of each core within the quota, or `wanted` processors. Raises
    ConfigError.
    """
    if wanted > len(allowed):
        raise ConfigError(
            f"threads: {wanted} are more than the {len(allowed)} processors that may be used here"
        )
    first, others = _by_core(allowed, root)
    quotas = [quota for folder in _groups(root) if (quota := _quota_of(folder)) is not None]
    quota = min(quotas, default=None)
    count = wanted or len(first)
    if quota is not None and not wanted:
        count = min(count, max(1, int(quota)))
    chosen = tuple(sorted((first + others)[:count]))
    return _Processors(
        chosen=chosen, allowed=len(allowed), cores=len(first), quota=quota, wanted=wanted
    )


def _by_core(allowed: Sequence[int], root: Path) -> tuple[list[int], list[int]]:
    """The first allowed processor of each core, and the others."""
    first: list[int] = []
    others: list[int] = []
    seen: set[int] = set()
    for number in allowed:
        (others if number in seen else first).append(number)
        seen |= _siblings(number, root)
    return first, others


def _siblings(number: int, root: Path) -> set[int]:
    """Processors of the same core, from the system's list, such as "0,32" or "0-1"."""
    try:
        text = (root / _TOPOLOGY.format(number)).read_text()
        return set(_numbers_in(text.strip()))
    except (OSError, ValueError):
        return {number}


def _numbers_in(ranges: str) -> Iterator[int]:
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        yield from range(int(low), int(high or low) + 1)


def _groups(root: Path) -> Iterator[Path]:
    """Folders of the control groups (versions 2 and 1) that limit this process, and those above,
    since a container may hide the path.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / _GROUPS / controllers
        folder = top / path.lstrip("/")
        yield from (place for place in (folder, *folder.parents) if place.is_relative_to(top))


def _quota_of(folder: Path) -> float | None:
    """Number of processors that a control group allows; None if it has no limit or cannot be
    read.
    """
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        if quota == "max" or int(quota) <= 0:
            return None
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
