"""A worker process whose tasks are instructions: `python -m obedient_worker`."""

from __future__ import annotations

import os
import sys
import time

import msgspec

from jitney.engine.common.worker_pipe import WorkerPipe


class Order(msgspec.Struct, frozen=True):
    """One of: answer with a text; exit; never answer."""

    text: str = ""
    dies: bool = False
    hangs: bool = False


class Obeyed(msgspec.Struct, frozen=True):
    """The text of the order, and the id of the process that carried it out."""

    text: str
    pid: int


def main() -> int:
    """Carry out orders until standard input ends."""
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
