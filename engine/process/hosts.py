"""The core's process on several hosts: meeting the others, following the first, and ending with any
of them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING

import zmq

from jitney.engine import messages
from jitney.engine.checkpoints.sources import ModelSource
from jitney.engine.config.digest import configuration_digest, short
from jitney.engine.config.schema import Config
from jitney.engine.errors import ConfigError, ErrorInfo, ModelError
from jitney.engine.hosts.link import FirstHost, Lost, OtherHost
from jitney.engine.hosts.messages import Goodbye, Hello

if TYPE_CHECKING:
    from jitney.engine.executor.hosts import Follower

#: Code of the error of a core whose engine has lost a host; no request is to blame for that.
HOST_LOST = "host_lost"
#: What a host finds wrong by itself, or all of them alike, whether or not another is gone.
_FOUND_ALONE = (ConfigError, ModelError)
#: Seconds between two ticks of a follower.
_TICK_S = 1.0
#: Seconds that a follower listens to the first host before it looks whether it is to end.
_LISTEN_S = 0.2
#: Milliseconds for the last message.
_LINGER_MS = 2000

type _Report = Callable[[messages.Progress], None]


@contextlib.contextmanager
def met(
    config: Config, source: ModelSource, report: _Report, address: str
) -> Iterator[FirstHost | OtherHost]:
    """The other hosts of the engine, once all are there; they hear of it when this one ends.
    address: where the parent hears us. Raises ConfigError if they do not come, or do not want us.

    Whatever fails inside may have failed because one of them is gone, which is then the reason.
    """
    hosts = _meet(config, source, report, _ender(address))
    name = f"host {hosts.host_id}"
    try:
        yield hosts
    except BaseException as error:
        # A device that waits for a lost host fails in its own words, at any point of a start or of
        # a step: before the connection's end is noticed, or just after.
        if not isinstance(error, _FOUND_ALONE):
            hosts.wait_for_loss()
        hosts.leave(f"{name} cannot go on: {error}", failed=True)
        raise
    hosts.leave(f"{name} was told to end", failed=False)


def _meet(
    config: Config, source: ModelSource, report: _Report, lost: Lost
) -> FirstHost | OtherHost:
    def arrived(done: int, total: int, detail: str) -> None:
        report(messages.Progress("hosts", done, total, detail))

    engine = config.engine
    hello = Hello(engine.host_id, _versions(), _digest(config, source))
    meet = OtherHost.join if engine.host_id else FirstHost.gather
    return meet(engine.coordinator, engine.n_hosts, hello, arrived, lost)


def _versions() -> str:
    """Of Jitney and of jax: other ones may compile other programs."""
    return f"jitney {version('jitney')}, jax {version('jax')}"


def _digest(config: Config, source: ModelSource) -> str:
    """Of all settings but those of [server], which this process is not told, and of the model."""
    identity = source.identity(config.model.adapter_folders)
    return short(configuration_digest(config, model=identity, version=version("jitney")))


def _ender(address: str) -> Lost:
    """Ends this process, from any thread, whatever it waits for: nothing that it does with a host
    that is gone comes to an end.
    """

    def lost(reason: str, failed: bool) -> None:
        code = "engine_dead" if failed else HOST_LOST
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.linger = _LINGER_MS
            socket.connect(address)
            socket.send(messages.encode(fatal(reason, code)))
        os._exit(1)

    return lost


def fatal(reason: str, code: str = "engine_dead") -> messages.Fatal:
    """The last message of a core that cannot go on, in one line."""
    return messages.Fatal(ErrorInfo(code, " ".join(reason.split())[:500]))


def follow(
    follower: Follower, hosts: OtherHost, is_shut_down: Callable[[], bool]
) -> messages.Left | None:
    """Do what the first host does until it ends, or until we are shut down (None)."""
    while not is_shut_down():
        until = time.monotonic() + _TICK_S
        while time.monotonic() < until:
            message = hosts.next(_LISTEN_S)
            if isinstance(message, Goodbye):
                return messages.Left(message.reason)
            if message is not None:
                follower.do(message)
    return None


def start_ticking(address: str) -> None:
    """Tell the parent once a second that this process lives, from a thread of its own: how long a
    step may take is the first host's to judge.
    """
    threading.Thread(target=_tick, args=(address,), daemon=True).start()


def _tick(address: str) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 0
        socket.connect(address)
        while True:
            socket.send(messages.encode(messages.Tick(waiting=0)))
            time.sleep(_TICK_S)
