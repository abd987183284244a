"""A worker that does what its tasks say: `python -m obedient_worker`."""

from __future__ import annotations

import os
import sys
import time

import msgspec

from jitney.engine.common.worker_pipe import WorkerPipe


class Order(msgspec.Struct, frozen=True):
    """One of: a text to answer with; the end of the process; an answer that does not come."""

    text: str = ""
    dies: bool = False
    hangs: bool = False


class Obeyed(msgspec.Struct, frozen=True):
    """What was ordered, and who obeyed."""

    text: str
    pid: int


def main() -> int:
    """Obey until standard input ends."""
    pipe = WorkerPipe()
    while (request := pipe.read()) is not None:
        order = msgspec.msgpack.decode(request, type=Order)
        if order.dies:
            os._exit(7)
        if order.hangs:
            time.sleep(600)
        pipe.send(Obeyed(order.text, os.getpid()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
