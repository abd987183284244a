"""The core's process of an engine on several hosts: joining the others, and ending with them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from importlib.metadata import version

import zmq

from jitney.engine.common import messages
from jitney.engine.common.engine_info import short_digest
from jitney.engine.common.errors import ConfigError, ModelError
from jitney.engine.config import Config, configuration_digest
from jitney.engine.core.distributed.link import Leader, Lost, Worker
from jitney.engine.core.distributed.messages import Hello
from jitney.engine.core.weights.checkpoints.sources import ModelSource

#: Errors that do not result from the loss of another host.
_FOUND_ALONE = (ConfigError, ModelError)
#: Milliseconds for the last message.
_LINGER_MS = 2000

type _Report = Callable[[messages.Progress], None]


@contextlib.contextmanager
def met(
    config: Config,
    source: ModelSource,
    report: _Report,
    address: str,
    adapters: dict[str, int] | None = None,
) -> Iterator[Leader | Worker]:
    """Context of the connection to the other hosts, which are notified of its end. address: the
    parent's socket. adapters: numbers by name; those of host 0 are used. Raises ConfigError if a
    host does not connect or refuses this one. Errors inside that follow from the loss of a host
    are replaced by that loss.
    """
    hosts = _meet(config, source, report, _ender(address), adapters)
    name = f"host {hosts.host_id}"
    try:
        yield hosts
    except BaseException as error:
        # A device that waits for a lost host fails with another error, before or after the loss.
        if not isinstance(error, _FOUND_ALONE):
            hosts.wait_for_loss()
        hosts.leave(f"{name} cannot go on: {error}", failed=True)
        raise
    hosts.leave(f"{name} was told to end", failed=False)


def _meet(
    config: Config,
    source: ModelSource,
    report: _Report,
    lost: Lost,
    adapters: dict[str, int] | None,
) -> Leader | Worker:
    def arrived(done: int, total: int, detail: str) -> None:
        report(messages.Progress("hosts", done, total, detail))

    engine = config.engine
    versions = f"jitney {version('jitney')}, jax {version('jax')}"  # must agree: programs differ
    hello = Hello(engine.host_id, versions, _digest(config, source))
    where = engine.coordinator, engine.n_hosts
    if engine.host_id:
        return Worker.join(*where, hello, arrived, lost)
    return Leader.gather(*where, hello, arrived, lost, adapters)


def _digest(config: Config, source: ModelSource) -> str:
    """Digest of model and settings, without [server] and the order, which depends on keys."""
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"order": ""})})
    identity = source.identity(config.model.adapter_folders)
    return short_digest(configuration_digest(config, model=identity))


def _ender(address: str) -> Lost:
    """A callback that ends this process from any thread, as calls that wait for a lost host
    hang.
    """

    def lost(reason: str, failed: bool) -> None:
        code = "engine_dead" if failed else messages.Fatal.host_lost
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.linger = _LINGER_MS
            socket.connect(address)
            socket.send(messages.encode(messages.Fatal.of(reason, code)))
        os._exit(1)

    return lost
