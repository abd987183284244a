"""The core's process, started by `engine.server.process.supervisor`. The parent writes a line of
JSON (`Start`) to its standard input and keeps that pipe open: end of file means that the parent is
gone. Messages go over two one-way ZeroMQ sockets.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from jitney.engine.common import messages
from jitney.engine.common.core_start import Start, remove_folder
from jitney.engine.common.engine_info import EngineInfo
from jitney.engine.common.errors import JitneyError, RequestError
from jitney.engine.common.terminal import VisibleFormatter
from jitney.engine.config import Config
from jitney.engine.core.weights.checkpoints.sources import ModelSource

if TYPE_CHECKING:
    from jitney.engine.core.distributed.link import Leader, Worker
    from jitney.engine.core.distributed.lockstep import LockstepCore
    from jitney.engine.core.engine_core import EngineCore
    from jitney.engine.core.executor.hosts import Follower

_log = logging.getLogger("jitney.core")

#: Seconds that a follower waits for the first host before it checks for a shutdown.
_LISTEN_S = 0.2
#: Seconds between ticks of an idle core, and ticks between checks of the page pool.
_TICK_S = 1.0
_CHECK_EVERY = 10
#: Milliseconds for the last messages.
_LINGER_MS = 2000
#: Builds the follower on the other hosts of an engine.
_FOLLOWER = "jitney.engine.core.build:build_follower"
_decode = msgspec.msgpack.Decoder(messages.ToCore).decode
#: Sends one message to the parent.
type _Send = Callable[[messages.FromCore], None]


def main() -> int:
    """Run one core until Shutdown; returns the exit status (1: after a Fatal)."""
    # These signals reach the whole group; the parent drains, and then sends Shutdown.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(VisibleFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # At INFO it names the platforms that are absent.
    logging.getLogger("jax").setLevel(logging.WARNING)
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    logging.getLogger().setLevel(start.log_level.upper())
    threading.Thread(target=_die_with_parent, args=(start.folder,), daemon=True).start()
    with (
        zmq.Context() as context,
        context.socket(zmq.PULL) as inbox,
        context.socket(zmq.PUSH) as outbox,
    ):
        for socket, address in (
            (inbox, start.to_core),
            (outbox, start.from_core),
        ):
            # No high-water mark, which would drop messages or block; the scheduler bounds their
            # number.
            socket.set_hwm(0)
            socket.linger = _LINGER_MS
            socket.connect(address)

        def send(message: messages.FromCore) -> None:
            outbox.send(messages.encode(message))

        status = _guarded(start, inbox, send)
    if start.config.get("engine", {}).get("n_hosts", 1) > 1:
        # At a normal exit jax would wait for the other hosts, which may be gone.
        os._exit(status)
    return status


def _die_with_parent(folder: str) -> None:
    """End with the parent, since an orphan would hold the device; removes the sockets' folder."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    remove_folder(folder)
    os._exit(1)


def _guarded(start: Start, inbox: zmq.Socket, send: _Send) -> int:
    """Build and serve; an exception becomes one Fatal line, with a traceback in the log."""
    try:
        _build_and_serve(start, inbox, send)
    except Exception as error:
        code = messages.Fatal.refused if isinstance(error, JitneyError) else "engine_dead"
        send(messages.Fatal.of(_in_one_line(error), code))
        return 1
    return 0


def _in_one_line(error: Exception) -> str:
    """The error's message; unexpected ones leave a traceback in the log."""
    if isinstance(error, JitneyError):
        return str(error)
    _log.exception("the engine core stopped")
    return f"{type(error).__name__}: {error}"


def _build_and_serve(start: Start, inbox: zmq.Socket, send: _Send) -> None:
    config = Config.model_validate(start.config, strict=False)
    source = ModelSource.of(config)
    if config.engine.n_hosts > 1:
        # Imported here: only engines on several hosts need it.
        from jitney.engine.core.distributed.meeting import met

        with met(config, source, send, start.from_core, start.adapters) as hosts:
            _serve_together(start, config, source, hosts, inbox, send)
        return
    core, info = _builder(start.builder)(config, source, send, **_numbered(start))
    _start_serving(core, info, inbox, send)


def _numbered(start: Start) -> dict[str, Any]:
    """Keyword arguments for the core's builder: the adapter numbers of an earlier core."""
    return {"adapters": start.adapters} if start.adapters else {}


def _start_serving(
    core: EngineCore,
    info: EngineInfo,
    inbox: zmq.Socket,
    send: _Send,
    joined: LockstepCore | None = None,
) -> None:
    """Report that the core is ready, and serve. joined: the core, if it runs in lockstep."""
    core.on_first_step = lambda step: send(messages.FirstStep(step))
    for message in _received(inbox, 0.0):  # usually the tokenizer, which takes a while to read
        _handle(core, message, send)
    send(messages.Ready(info))
    _serve(core, inbox, send, joined)


def _builder(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _serve_together(
    start: Start,
    config: Config,
    source: ModelSource,
    hosts: Leader | Worker,
    inbox: zmq.Socket,
    send: _Send,
) -> None:
    from jitney.engine.core.distributed.link import Leader

    in_lockstep = config.engine.data_parallel > 1
    if isinstance(hosts, Leader) or in_lockstep:
        build = _builder(start.builder)
        core, info = build(config, source, send, hosts, **_numbered(start))
        _start_serving(core, info, inbox, send, core if in_lockstep else None)
        return
    follower, info = _builder(_FOLLOWER)(config, source, send, hosts)
    if follower.adapters is not None:
        follower.adapters.on_accepted = lambda folders: send(messages.AdaptersFollowed(folders))
    send(messages.Ready(info))
    # In a thread: only the first host limits how long a step may take.
    threading.Thread(target=_tick, args=(start.from_core,), daemon=True).start()
    _freeze()
    left = _follow(follower, hosts, lambda: _is_shut_down(inbox))
    if left is not None:
        send(left)


def _follow(
    follower: Follower, hosts: Worker, is_shut_down: Callable[[], bool]
) -> messages.PeerLeft | None:
    """Run the first host's steps until it ends, or until this core is shut down (None)."""
    from jitney.engine.core.distributed.messages import Leave

    while not is_shut_down():
        until = time.monotonic() + _TICK_S
        while time.monotonic() < until:
            message = hosts.next(_LISTEN_S)
            if isinstance(message, Leave):
                return messages.PeerLeft(message.reason)
            if message is not None:
                follower.do(message)
    return None


def _tick(address: str) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 0
        socket.connect(address)
        while True:
            socket.send(messages.encode(messages.Heartbeat(waiting=0)))
            time.sleep(_TICK_S)


def _is_shut_down(inbox: zmq.Socket) -> bool:
    return any([isinstance(message, messages.Shutdown) for message in _received(inbox, 0.0)])


def _freeze() -> None:
    """Exclude weights, executables and modules from garbage collection, as they live for ever."""
    gc.collect()
    gc.freeze()


def _serve(
    core: EngineCore, inbox: zmq.Socket, send: _Send, joined: LockstepCore | None = None
) -> None:
    """Answer messages and step while there is work; return on Shutdown, after the current step."""
    _freeze()
    if joined is not None:
        joined.barrier.on_wait = lambda hosts: send(messages.WaitingFor(hosts))
    idle_ticks, next_tick = 0, 0.0
    while True:
        wait_s = min(_TICK_S, core.pause_s) if core.has_work else _TICK_S
        for message in _received(inbox, wait_s, joined):
            if isinstance(message, messages.Shutdown):
                return
            if joined is not None and isinstance(message, messages.Drain):
                joined.barrier.drain(drained=message.drained)
            _handle(core, message, send)
        if joined is not None:
            while (drain_state := joined.barrier.next_drain_state()) is not None:
                send(messages.DrainState(drain_state.drained))
        ended = core.report_ended()
        if ended is not None:
            send(ended)
        if core.has_work:
            if core.late_plan_slack_s:
                continue  # give other threads time
            send(core.step())
            idle_ticks = 0
            continue
        if joined is not None:
            joined.run_empty_step()
        if time.monotonic() >= next_tick:
            send(messages.Heartbeat(waiting=0))
            next_tick = time.monotonic() + _TICK_S
            idle_ticks += 1
            if idle_ticks % _CHECK_EVERY == 0:
                core.check()


def _received(
    inbox: zmq.Socket, wait_s: float, joined: LockstepCore | None = None
) -> Iterator[messages.ToCore]:
    """Messages within `wait_s` seconds; none if others of a joined engine wait for it first."""
    if wait_s and joined is not None:
        zmq.select([inbox, joined], [], [], wait_s)
    # Rounded down: a step must not be planned later than the core asked for.
    elif wait_s and not inbox.poll(max(1, int(wait_s * 1000))):
        return
    while True:
        try:
            yield _decode(inbox.recv(zmq.NOBLOCK))
        except zmq.Again:
            return


def _handle(core: EngineCore, message: messages.ToCore, send: _Send) -> None:
    """Give one message to the core; results come with the next step."""

    def alive() -> None:
        send(messages.Heartbeat(waiting=0))

    match message:
        case messages.Add(request=request):
            core.add(request)
        case messages.Abort(request_id=request_id, index=index, reason=reason):
            core.abort(request_id, index, reason)
        case messages.AskSeatMap(ticket=ticket, seats=seats):
            if core.has_work:
                core.ask(message)  # answered after the next plan
            else:
                send(core.seat_map(ticket, seats=seats))
        case messages.TokenizerJson(json=tokenizer):
            core.learn(tokenizer)
        case messages.Sleep(ticket=ticket):
            send(_done(ticket, lambda: core.sleep(alive)))
        case messages.Wake(ticket=ticket):
            core.wake(alive)
            send(messages.Done(ticket))
        case messages.ResetPrefixCache(ticket=ticket):
            core.reset_prefix_cache()
            send(messages.Done(ticket))
        case messages.SetAdapters():
            answer = core.set_adapters(message)
            if answer is not None:
                send(answer)
        case messages.Drain() | messages.Shutdown():
            pass


def _done(ticket: int, work: Callable[[], int]) -> messages.Done:
    try:
        return messages.Done(ticket, freed=work())
    except RequestError as error:
        return messages.Done(ticket, error.info)


if __name__ == "__main__":
    sys.exit(main())
