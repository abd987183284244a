"""How many threads a CPU's steps are computed with, and on which processors.

XLA and the native kernels start a thread for each processor that the process may run on. That is
too many in a container whose quota is less: the threads that wait for the others use the quota up,
and all of them stand still until the next period. Two hyperthreads of one core share its
multipliers, so a second thread there has nothing to multiply with.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jitney.engine.common.errors import ConfigError

_log = logging.getLogger("jitney.core")

_ROOT = Path("/")
_TOPOLOGY = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_GROUPS = "sys/fs/cgroup"


@dataclass(frozen=True, slots=True)
class _Processors:
    """Those to compute on, and why no others."""

    #: Numbers, ascending.
    chosen: tuple[int, ...]
    #: That the process may run on.
    allowed: int
    #: Cores of these: processors that share nothing.
    cores: int
    #: Processors whose time the control group allows; None: all of it.
    quota: float | None
    #: Threads that were asked for, 0: as many as are useful.
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


@cache  # once for each number: what is chosen is all that is allowed later
def use_processors(wanted: int) -> None:
    """Have this process, and the threads that it starts from here on, run on the processors that
    steps should be computed on; must come before jax starts its threads. wanted: 0 for as many as
    are useful. Raises ConfigError for more than there are.
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
    """What `use_processors` would choose of those that this process may run on now; where the
    system tells nothing, all that there are. Raises ConfigError.
    """
    return _choose_processors(own_processors(), wanted)


def own_processors() -> Sequence[int]:
    """Numbers of those that this process may run on now."""
    if not hasattr(os, "sched_getaffinity"):
        return range(os.cpu_count() or 1)
    return sorted(os.sched_getaffinity(0))


def _choose_processors(allowed: Sequence[int], wanted: int, root: Path = _ROOT) -> _Processors:
    """Of the processors that the process may run on: one of each core, as many as the quota holds;
    or as many as are wanted. ConfigError for more than are allowed.
    """
    if wanted > len(allowed):
        raise ConfigError(
            f"threads: {wanted} are more than the {len(allowed)} processors that may be used here"
        )
    first, others = _by_core(allowed, root)
    quota = _quota(root)
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
    """Processors of the same core, as far as the system tells; such as "0,32" or "0-1"."""
    try:
        text = (root / _TOPOLOGY.format(number)).read_text()
        return set(_numbers_in(text.strip()))
    except (OSError, ValueError):
        return {number}


def _numbers_in(ranges: str) -> Iterator[int]:
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        yield from range(int(low), int(high or low) + 1)


def _quota(root: Path) -> float | None:
    """Processors whose time the control groups that this process is in allow it, the least of
    them; None: no limit.
    """
    quotas = [quota for folder in _groups(root) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def _groups(root: Path) -> Iterator[Path]:
    """Folders of the control groups that limit this process, versions 2 and 1. In a container the
    path that the kernel tells may not be visible; the folders above it are looked at as well.
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
    """What one group allows; None where it sets no limit or cannot be read."""
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
