"""An engine that a fleet has started: `jitney serve`, which stops when the fleet is gone.

The fleet holds the other end of its standard input: a line there is JSON, variables of the
environment as they are from now on (null: without), and its end is the fleet's.
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
from jitney.engine.fleet import ADMIN_KEYS

_STANDARD_INPUT = 0
_MOST_BYTES = 1 << 16
#: Held while what the fleet has said is read and taken in.
_reading = threading.Lock()


def _follow_the_fleet() -> None:
    # Not by sys.stdin: a thread inside of its lock makes the interpreter's end a fatal error.
    begun = b""
    while True:
        select.select([_STANDARD_INPUT], [], [])
        with _reading:
            part = os.read(_STANDARD_INPUT, _MOST_BYTES)
            *lines, begun = (begun + part).split(b"\n")
            for line in lines:
                _take(json.loads(line))
        if not part:
            os.kill(os.getpid(), signal.SIGTERM)
            return


def _take(environ: dict[str, str | None]) -> None:
    for name, value in environ.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if ADMIN_KEYS in environ:
        os.kill(os.getpid(), signal.SIGHUP)


def _catch_up() -> None:
    """Wait until all is taken in that the fleet has said by now."""
    while True:
        with _reading:
            waiting = array.array("i", [0])
            fcntl.ioctl(_STANDARD_INPUT, termios.FIONREAD, waiting)
            if not waiting[0]:
                return
        time.sleep(0.001)


if __name__ == "__main__":
    # Until the server reads its keys again at this signal it has not read them for the first time.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    serve.before_rereading.append(_catch_up)
    threading.Thread(target=_follow_the_fleet, daemon=True).start()
    raise SystemExit(main())
