"""An engine that a fleet has started: `jitney serve`, which stops when the fleet is gone.

The fleet holds the other end of its standard input: a line there is the keys that are accepted from
now on, as the environment has them, and its end is the fleet's.
"""

from __future__ import annotations

import os
import signal
import threading

from jitney.engine.cli import main
from jitney.engine.fleet import ADMIN_KEYS

_STANDARD_INPUT = 0
_MOST_BYTES = 1 << 16


def _follow_the_fleet() -> None:
    # Not by sys.stdin: a thread inside of its lock makes the interpreter's end a fatal error.
    begun = b""
    while part := os.read(_STANDARD_INPUT, _MOST_BYTES):
        *lines, begun = (begun + part).split(b"\n")
        for keys in lines:
            os.environ[ADMIN_KEYS] = keys.decode()
            os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    # Until the server reads its keys again at this signal it has not read them for the first time.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    threading.Thread(target=_follow_the_fleet, daemon=True).start()
    raise SystemExit(main())
