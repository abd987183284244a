"""`jitney serve` as started by a fleet: it takes new variables from the fleet, and stops with it.

The fleet writes to standard input. Each line is a JSON object of environment variables to set
(null: to remove). At end of file the fleet is gone.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import select
import signal
import termios
import threading
import time

from jitney.engine.cli import main, serve
from jitney.engine.common.child_process import ADMIN_KEYS

_STANDARD_INPUT = 0
_MOST_BYTES = 1 << 16
#: Held while a message of the fleet is read and applied.
_reading = threading.Lock()


def _follow_the_fleet() -> None:
    # Not sys.stdin: a thread that holds its lock makes the interpreter's exit a fatal error.
    partial = b""
    while True:
        select.select([_STANDARD_INPUT], [], [])
        with _reading:
            data = os.read(_STANDARD_INPUT, _MOST_BYTES)
            *lines, partial = (partial + data).split(b"\n")
            for line in lines:
                _set_variables(json.loads(line))
        if not data:
            os.kill(os.getpid(), signal.SIGTERM)
            return


def _set_variables(environ: dict[str, str | None]) -> None:
    for name, value in environ.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if ADMIN_KEYS in environ:
        os.kill(os.getpid(), signal.SIGHUP)


def _catch_up() -> None:
    """Wait until every message that the fleet has sent so far is applied."""
    while True:
        with _reading:
            unread = array.array("i", [0])
            fcntl.ioctl(_STANDARD_INPUT, termios.FIONREAD, unread)
            if not unread[0]:
                return
        time.sleep(0.001)


if __name__ == "__main__":
    # The signal must not end this process before the server handles it by reading its keys again.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    serve.before_rereading.append(_catch_up)
    threading.Thread(target=_follow_the_fleet, daemon=True).start()
    raise SystemExit(main())
