"""The core in a process of its own: `python -P -m jitney.engine.process.main`, started by
`jitney.engine.process.supervisor`.

The parent writes one line of JSON (`Start`) to our standard input and then holds that pipe open:
its end is how we notice that the parent is gone, however it died. Messages go over two one-way
ZeroMQ sockets in the parent's private folder (`jitney.engine.messages`).
"""

from __future__ import annotations

import gc
import importlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from jitney.engine import messages
from jitney.engine.checkpoints.sources import ModelSource, resolve
from jitney.engine.config.schema import Config
from jitney.engine.errors import ErrorInfo, JitneyError, RequestError
from jitney.engine.types import EngineInfo

if TYPE_CHECKING:
    from jitney.engine.core import EngineCore

log = logging.getLogger("jitney.core")

#: Seconds between two ticks of an idle core, and idle ticks between two conservation checks of the
#: page pool.
TICK_S = 1.0
_CHECK_EVERY = 10
#: What makes the core; a test names one that needs no model.
BUILDER = "jitney.engine.build:build_engine"

_Builder = Callable[
    [Config, ModelSource, Callable[[messages.Progress], None]], "tuple[EngineCore, EngineInfo]"
]


class Start(msgspec.Struct, frozen=True):
    """The parent's one line."""

    #: Sections of the configuration.
    config: dict[str, Any]
    #: Of the two sockets.
    folder: str
    builder: str = BUILDER
    log_level: str = "info"


def to_core_address(folder: str) -> str:
    return f"ipc://{folder}/to"


def from_core_address(folder: str) -> str:
    return f"ipc://{folder}/from"


def main() -> int:
    """Run one core until Shutdown; returns the exit status (0: as asked, 1: after a
    Fatal).
    """
    # Ctrl-C and a service manager's SIGTERM reach the whole group; the parent drains, and then
    # sends Shutdown.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
    )
    # At INFO it names the platforms that are absent.
    logging.getLogger("jax").setLevel(logging.WARNING)
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    logging.getLogger().setLevel(start.log_level.upper())
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with (
        zmq.Context() as context,
        context.socket(zmq.PULL) as inbox,
        context.socket(zmq.PUSH) as outbox,
    ):
        for socket, address in (
            (inbox, to_core_address(start.folder)),
            (outbox, from_core_address(start.folder)),
        ):
            # A bound would drop or block; the scheduler's caps bound what is in flight.
            socket.set_hwm(0)
            socket.linger = 2000  # milliseconds for the last messages
            socket.connect(address)
        return _guarded(start, inbox, outbox)


def _die_with_parent() -> None:
    """Leave at once when the parent's end of the pipe closes: an orphan would keep the device and
    answer nobody.
    """
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def _guarded(start: Start, inbox: zmq.Socket, outbox: zmq.Socket) -> int:
    """Build and serve; an exception becomes one Fatal line for the parent and a traceback in the
    log.
    """
    try:
        _build_and_serve(start, inbox, outbox)
    except Exception as error:
        message = str(error)
        if not isinstance(error, JitneyError):
            log.exception("the engine core stopped")
            message = f"{type(error).__name__}: {error}"
        line = " ".join(message.split())[:500]
        outbox.send(messages.encode(messages.Fatal(ErrorInfo("engine_dead", line))))
        return 1
    return 0


def _build_and_serve(start: Start, inbox: zmq.Socket, outbox: zmq.Socket) -> None:
    def report(progress: messages.Progress) -> None:
        outbox.send(messages.encode(progress))

    config = Config.model_validate(start.config, strict=False)
    source = resolve(config.model.id, revision=config.model.revision or None)
    core, info = _builder(start.builder)(config, source, report)
    core.on_first_step = lambda step: outbox.send(messages.encode(messages.FirstStep(step)))
    for message in _received(inbox, 0.0):  # the tokenizer, as a rule: to read it takes a while
        _handle(core, message, outbox)
    outbox.send(messages.encode(messages.Ready(info)))
    _serve(core, inbox, outbox)


def _builder(name: str) -> _Builder:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _serve(core: EngineCore, inbox: zmq.Socket, outbox: zmq.Socket) -> None:
    """Answer messages and step while there is work; return on Shutdown, after the current step."""
    gc.collect()
    # weights, executables and modules live for ever: no collection needs to look at them again
    gc.freeze()
    idle_ticks, next_tick = 0, 0.0
    while True:
        wait_s = min(TICK_S, core.pause_s) if core.has_work else TICK_S
        for message in _received(inbox, wait_s):
            if isinstance(message, messages.Shutdown):
                return
            _handle(core, message, outbox)
        if core.has_work:
            outbox.send(messages.encode(core.step()))
            idle_ticks = 0
        elif time.monotonic() >= next_tick:
            outbox.send(messages.encode(messages.Tick(waiting=0)))
            next_tick = time.monotonic() + TICK_S
            idle_ticks += 1
            if idle_ticks % _CHECK_EVERY == 0:
                core.check()


def _received(inbox: zmq.Socket, wait_s: float) -> Iterator[messages.ToCore]:
    """Messages that are here now, or that come within `wait_s` seconds."""
    if wait_s and not inbox.poll(math.ceil(wait_s * 1000)):
        return
    while True:
        try:
            yield messages.decode_to_core(inbox.recv(zmq.NOBLOCK))
        except zmq.Again:
            return


def _handle(core: EngineCore, message: messages.ToCore, outbox: zmq.Socket) -> None:
    """Give one message to the core; its consequences come out of the next step."""

    def alive() -> None:
        outbox.send(messages.encode(messages.Tick(waiting=0)))

    match message:
        case messages.Add(request=request):
            core.add(request)
        case messages.Abort(request_id=request_id, index=index, reason=reason):
            core.abort(request_id, index, reason)
        case messages.AskSeatMap(ticket=ticket, seats=seats):
            if core.has_work:
                core.ask(message)  # answered after the next plan
            else:
                outbox.send(messages.encode(core.seat_map(ticket, seats=seats)))
        case messages.Tokenizer(json=tokenizer):
            core.learn(tokenizer)
        case messages.Sleep(ticket=ticket):
            outbox.send(messages.encode(_done(ticket, lambda: core.sleep(alive))))
        case messages.Wake(ticket=ticket):
            core.wake(alive)
            outbox.send(messages.encode(messages.Done(ticket)))
        case messages.ResetPrefixCache(ticket=ticket):
            core.reset_prefix_cache()
            outbox.send(messages.encode(messages.Done(ticket)))
        case messages.Shutdown():
            pass


def _done(ticket: int, work: Callable[[], int]) -> messages.Done:
    """Do it, and say so."""
    try:
        return messages.Done(ticket, freed=work())
    except RequestError as error:
        return messages.Done(ticket, error.info)


if __name__ == "__main__":
    sys.exit(main())
