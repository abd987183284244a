"""Lines that the compiler writes and users need not see."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os
from jitney.engine.core.executor.compiler_messages import MEANINGLESS, left_out

os.write(2, b"before\\n")
with left_out(MEANINGLESS["gpu"]):
    os.write(2, b"E1 The byte size (9) exceeds the base limit (8). This indicates an error\\n")
    os.write(2, b"inside\\n")
os.write(2, b"exceeds the base limit, outside\\n")
with left_out(MEANINGLESS["gpu"]):
    os.write(2, b"last words\\n")
    os.abort()
"""


def test_a_meaningless_line_is_left_out_and_a_crash_keeps_its_last_words():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.splitlines() == [
        "before",
        "inside",
        "exceeds the base limit, outside",
        "last words",
    ]
    assert done.returncode != 0
