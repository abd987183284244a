"""Removes meaningless lines that XLA writes to standard error while it compiles."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from jitney.engine.common.child_process import child_environ

#: Text of a meaningless line, by platform. XLA reports a calculation error when arguments take more
#: than 80 % of a GPU's memory, as weights and pool are meant to.
MEANINGLESS = {"gpu": "exceeds the base limit"}
#: Seconds to wait for the last lines after the end of output.
_LAST_LINES_S = 2.0
_FILTER = """
import sys
for line in sys.stdin.buffer:
    if sys.argv[1].encode() not in line:
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
"""


@contextlib.contextmanager
def left_out(part: str | None) -> Iterator[None]:
    """Remove lines that contain `part` from the process's standard error; None: no lines.

    A separate process passes on the other lines, so that the last output of a crash is not lost.
    """
    if part is None:
        yield
        return
    sys.stderr.flush()
    own = os.dup(2)
    command = [sys.executable, "-I", "-S", "-c", _FILTER, part]
    # In a session of its own: a signal to the group must not end it before this process.
    passing = subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=own, env=child_environ(), start_new_session=True
    )
    assert passing.stdin is not None  # a pipe was asked for
    os.dup2(passing.stdin.fileno(), 2)
    passing.stdin.close()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(own, 2)
        os.close(own)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a child holds the pipe open
            passing.wait(_LAST_LINES_S)
