"""Threads of a CPU's steps, on systems that are made of files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jitney.engine.common.errors import ConfigError
from jitney.engine.core.executor.threads import _choose_processors


def make_system(root: Path, siblings: list[str], files: dict[str, str]) -> Path:
    for number, ranges in enumerate(siblings):
        topology = f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"
        files[topology] = ranges + "\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_one_thread_for_each_core(tmp_path: Path):
    by_number = make_system(tmp_path / "a", ["0,2", "1,3", "0,2", "1,3"], {})
    chosen = _choose_processors(range(4), 0, by_number)
    assert chosen.chosen == (0, 1) and str(chosen) == "2 threads: 4 processors, 2 cores"
    assert _choose_processors([1, 2, 3], 0, by_number).chosen == (1, 2)
    assert _choose_processors(range(4), 3, by_number).chosen == (0, 1, 2)
    beside = make_system(tmp_path / "b", ["0-1", "0-1", "2-3", "2-3"], {})
    assert _choose_processors(range(4), 0, beside).chosen == (0, 2)


def test_a_system_that_tells_nothing_is_used_whole(tmp_path: Path):
    assert _choose_processors([0, 5], 0, tmp_path).chosen == (0, 5)
    odd = make_system(tmp_path, ["many"], {"proc/self/cgroup": "0::/a\n"})
    assert _choose_processors([0, 1], 0, odd).chosen == (0, 1)


@pytest.mark.parametrize(
    ("files", "quota", "threads"),
    [
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5, 1),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, None, 4),
        ({"sys/fs/cgroup/pod/box/cpu.max": "400000 100000\n"}, 4.0, 4),
        (
            {
                "sys/fs/cgroup/pod/box/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/pod/cpu.max": "250000 100000\n",
            },
            2.5,
            2,
        ),
        ({"sys/fs/cgroup/cpu.max": "5000 100000\n"}, 0.05, 1),
        ({"sys/fs/cgroup/cpu.max": "no number\n"}, None, 4),
    ],
)
def test_no_more_threads_than_the_quota_holds(
    files: dict[str, str], quota: float | None, threads: int, tmp_path: Path
):
    root = make_system(tmp_path, [], files | {"proc/self/cgroup": "0::/pod/box\n"})
    chosen = _choose_processors(range(4), 0, root)
    assert chosen.quota == quota and len(chosen.chosen) == threads
    assert len(_choose_processors(range(4), 3, root).chosen) == 3, "who asks knows"


def test_the_quota_of_the_older_control_groups(tmp_path: Path):
    files = {
        "proc/self/cgroup": "5:memory:/box\n4:cpu,cpuacct:/box\n",
        "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "200000\n",
        "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    chosen = _choose_processors(range(4), 0, make_system(tmp_path, [], files))
    assert str(chosen) == "2 threads: 4 processors, 4 cores, a quota of 2"


def test_more_than_there_are_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="threads: 3 are more than the 2 processors"):
        _choose_processors([0, 1], 3, tmp_path)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not offer it")
def test_the_process_and_its_threads_are_held_to_them():
    code = (
        "import os\n"
        "from jitney.engine.core.executor.threads import use_processors\n"
        "use_processors(1)\n"
        "print(len(os.sched_getaffinity(0)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "1", done.stderr
