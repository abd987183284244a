"""Child processes that run one of Jitney's modules."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping
from typing import IO

#: Environment variables of users' and administrators' keys, which are hidden from children.
API_KEYS, ADMIN_KEYS = "JITNEY_API_KEYS", "JITNEY_ADMIN_KEYS"
#: asyncio's own limit on a line of a child's output, bytes.
_LINE_BYTES = 1 << 16


def child_environ() -> dict[str, str]:
    """This process's environment without API keys."""
    return {name: value for name, value in os.environ.items() if name not in (API_KEYS, ADMIN_KEYS)}


async def start_child(
    module: str,
    *arguments: str,
    stdout: int | None = asyncio.subprocess.PIPE,
    stderr: int | IO[bytes] | None = None,
    env: Mapping[str, str] | None = None,
    limit: int = _LINE_BYTES,
) -> asyncio.subprocess.Process:
    """Start a module with a pipe to its standard input. Raises OSError.

    stdout, stderr: None: inherited. env: its environment; None: `child_environ`. limit: most bytes
    of a line of output.
    """
    # -P: modules of the working folder must not be importable (a clone has a folder `kernels`).
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        module,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=child_environ() if env is None else env,
        limit=limit,
    )


def last_line(errors: IO[bytes]) -> str:
    """The last line that a child wrote to this file, as the reason of its end."""
    errors.seek(0)
    said = errors.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(said) if line.strip()), "nothing said")[:300]


async def end_child(process: asyncio.subprocess.Process) -> None:
    """Kill a process if it still runs, and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
