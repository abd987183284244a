"""An engine that a fleet has started: `jitney serve`, which stops when the fleet is gone.

The fleet holds the other end of its standard input and never writes: its end is the fleet's.
"""

from __future__ import annotations

import os
import signal
import threading

from jitney.engine.cli import main

_STANDARD_INPUT = 0


def _stop_with_the_fleet() -> None:
    # Not by sys.stdin: a thread inside of its lock makes the interpreter's end a fatal error.
    while os.read(_STANDARD_INPUT, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_stop_with_the_fleet, daemon=True).start()
    raise SystemExit(main())
