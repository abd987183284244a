"""Engines that are found while the fleet runs: every address of a name is one, such as those of the
pods behind a headless service of Kubernetes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from jitney.engine.fleet.models import ReplicatedModel
from jitney.engine.fleet.replicas import Watch
from jitney.engine.hosts.connection import HostAddress

_log = logging.getLogger("jitney.fleet")

_HTTP_PORT = 80
#: Seconds between two looks at a name's addresses: Kubernetes lets resolvers keep them as long.
_LOOK_S = 5.0


async def _addresses(name: str, port: int) -> list[str]:
    """All that a name has now, each as HOST:PORT. Raises OSError where it has none."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    hosts = {str(address[0]) for *_, address in found}
    return [str(HostAddress(host, port)) for host in sorted(hosts)]


@dataclass(slots=True)
class FoundEngines:
    """Of one model, behind names."""

    model: ReplicatedModel
    watch: Watch
    #: Each dns+http://NAME:PORT.
    urls: tuple[str, ...]
    #: That engines are looked at with.
    key: str
    #: Names of the model's other engines.
    given: frozenset[str]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look for them until the context is left."""
        task = asyncio.create_task(self._look_regularly())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _look_regularly(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        """Once. Where a name is not answered for, all stay: whether each can be had, the watch on
        it knows better.
        """
        known: dict[str, str] = {}
        for url in self.urls:
            parts = urlsplit(url)
            try:
                found = await _addresses(parts.hostname or "", parts.port or _HTTP_PORT)
            except OSError as error:
                _log.warning("%s: its engines are not found: %s", url, error)
                return
            known |= {address: f"http://{address}" for address in found}
        await self.model.meet(self.watch, known, self.key, self.given)
