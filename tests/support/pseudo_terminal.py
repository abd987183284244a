"""A command on a pseudo-terminal, as if a person typed at a keyboard."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

_CODE = "import sys; from jitney.engine.cli import main; sys.exit(main())"
#: Most seconds to wait for a text; only a failing test takes as long.
_PATIENCE_S = 120.0


class PseudoTerminal:
    """`jitney` with arguments. shown: all text that it has written so far."""

    def __init__(self, process: subprocess.Popen[bytes], master: int):
        self.process = process
        self.shown = ""
        self._master = master
        self._read_to = 0

    @classmethod
    @contextmanager
    def running(cls, *arguments: str) -> Iterator[Self]:
        master, slave = pty.openpty()
        environ = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environ,
            start_new_session=True,
            preexec_fn=lambda: _take_terminal(slave),
        )
        os.close(slave)
        try:
            yield cls(process, master)
        finally:
            process.kill()
            process.wait()
            os.close(master)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def until(self, text: str) -> None:
        """Wait until the command has written this text after the last one that was waited for."""
        deadline = time.monotonic() + _PATIENCE_S
        while text not in self.shown[self._read_to :]:
            assert time.monotonic() < deadline, f"no {text!r} in {self.shown[self._read_to :]!r}"
            self._read()
        self._read_to = self.shown.index(text, self._read_to) + len(text)

    def _read(self) -> None:
        if select.select([self._master], [], [], 0.1)[0]:
            try:
                self.shown += os.read(self._master, 1 << 16).decode(errors="replace")
            except OSError:  # the command has ended
                raise AssertionError(f"it ended: {self.shown!r}") from None

    def ended(self) -> int:
        """Wait for the command to end and return its exit status."""
        return self.process.wait(_PATIENCE_S)


def _take_terminal(slave: int) -> None:
    """Make it the controlling terminal of the new session, so that Ctrl-C sends a signal."""
    import fcntl
    import termios

    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
