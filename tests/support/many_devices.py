"""Runs programs of this folder that need several CPU devices, each in its own process, since the
number of devices must be set before jax starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from places import SUPPORT

from jitney.engine.common.cache_folder import compilation_cache_dir

#: Most seconds of a program; on a busy machine programs compile for minutes.
_LIMIT_S = 1170


def run_on_devices(
    program: str, folder: Path, jobs: list[tuple[str, str, list[Any]]] | None = None
) -> dict[str, np.ndarray]:
    """Run `program` with eight CPU devices, compiled without optimization; return the arrays that
    it writes, by name.

    folder: for the file of jobs, the program's first argument if there are any, and for the file of
    arrays, its last argument.
    """
    arguments = []
    if jobs is not None:
        (folder / "jobs.json").write_text(json.dumps(jobs))
        arguments.append(str(folder / "jobs.json"))
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    # Compiled programs that did not change since the last run are in the user's cache.
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(compilation_cache_dir() / "tests"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(1 << 29),
    }
    done = subprocess.run(
        [sys.executable, str(SUPPORT / program), *arguments, str(folder / "out.npz")],
        env=os.environ | cache | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(np.load(folder / "out.npz"))
