"""The HTTP server of an engine, a fleet or a page, from its settings to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitney.engine.common.machine import raise_descriptor_limit
from jitney.engine.common.requests import JsonDict
from jitney.engine.config import ServerSection
from jitney.engine.server.http.disk_watch import watch_disks
from jitney.engine.server.http.listen import AcceptedKeys, base_url, check_tls, listen
from jitney.engine.server.http.reloader import FreshSettings, Reloader
from jitney.engine.server.http.web_server import FAREWELL_S, limits, web_server

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

    from jitney.engine.server.http.server_context import ServerContext
    from jitney.engine.server.http.settings import ServerSettings

_log = logging.getLogger("jitney")


class HttpServer:
    """The keys, connections, socket and signals of a process that serves HTTP."""

    #: The listening socket, set by `listening`.
    bound: socket.socket
    #: uvicorn's server on it, set by `serve_app`.
    web: uvicorn.Server | None = None
    #: Reads the settings again, set by `reloads`.
    reload: Reloader | None = None

    def __init__(
        self, server: ServerSection, settings: ServerSettings, keys: AcceptedKeys | None = None
    ):
        from jitney.engine.server.http.access import ApiKeys
        from jitney.engine.server.http.connections import Connections

        self.server = server
        self.settings = settings
        #: The keys with which the process was started, and those that are accepted now.
        self.keys = keys or AcceptedKeys()
        self.accepted = ApiKeys(settings)
        self.connections = Connections(settings)
        #: Numbers of the received signals.
        self.signals: asyncio.Queue[int] = asyncio.Queue()
        self._answering: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, server: ServerSection) -> HttpServer:
        """Check certificate and keys, before anything is loaded. Raises ConfigError."""
        check_tls(server)
        keys = AcceptedKeys.of(server)
        raise_descriptor_limit()
        return cls(server, limits(server, keys), keys)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Context in which the port is bound. Raises ConfigError, in one line."""
        with contextlib.closing(listen(self.server.host, self.server.port)) as self.bound:
            yield

    @property
    def url(self) -> str:
        """The URL for a client on this machine."""
        return base_url(self.server, self.bound.getsockname()[1])

    def serve_app(self, app: Starlette) -> uvicorn.Server:
        """Make uvicorn's server of an application; it answers from `run` on."""
        self.web = web_server(self.server, self.settings, app, self.connections)
        return self.web

    def reloads(
        self,
        host: ServerContext,
        read: Callable[[], FreshSettings],
        on_taken: Callable[[JsonDict, tuple[str, ...]], None] | None = None,
    ) -> Reloader:
        """Read the settings again on SIGHUP and on request. host: the server behind the endpoint;
        see `Reloader` for the others.
        """
        self.reload = host.reload = Reloader(
            self.server,
            read,
            self.accepted,
            self.connections,
            host,
            tls=lambda: self.web.config.ssl if self.web is not None else None,
            on_taken=on_taken,
        )
        return self.reload

    async def run(
        self,
        work: Coroutine[Any, Any, None],
        drain: Callable[[], Awaitable[int]],
        folders: Sequence[Path],
        on_full: Callable[[], None] = lambda: None,
        take_signal: Callable[[int], None] | None = None,
        background: Sequence[Coroutine[Any, Any, None]] = (),
    ) -> int:
        """Answer requests until a signal or the end of `work`, then drain after a signal; returns
        the exit status, and raises the error of `work`. folders: where the process writes; on_full:
        called when a disk of theirs is full. take_signal: puts the signals that count into
        `signals`; None: all count. `close` ends the answers.
        """
        take_signal = take_signal or self.signals.put_nowait
        assert self.web is not None and self.reload is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, take_signal, number)
        self.reload.listen(take_signal)
        self._answering = asyncio.create_task(self.web.serve(sockets=[self.bound]))
        working, stop = asyncio.create_task(work), asyncio.create_task(self.signals.get())
        others = [*map(asyncio.create_task, (watch_disks(folders, on_full), *background))]
        try:
            await asyncio.wait(
                (self._answering, working, stop), return_when=asyncio.FIRST_COMPLETED
            )
            status = await drain() if stop.done() else 1
            if working.done():
                working.result()  # the reason, as an exception
            return status
        finally:
            for task in (working, stop, *others):
                task.cancel()

    async def drained(self, answered: Coroutine[Any, Any, None]) -> int:
        """Wait for the open requests, at most drain_s seconds; new ones are refused meanwhile, and
        do not count. Returns the exit status: 0 if all were answered, 1 if not, or 128 and the
        number of a second signal, after which connections are dropped.
        """
        limit = self.server.drain_s
        _log.info("stopping: running requests have %g s; a second signal stops at once", limit)
        done = asyncio.create_task(answered)
        again = asyncio.create_task(self.signals.get())
        await asyncio.wait((done, again), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        for task in (done, again):
            task.cancel()
        await asyncio.wait((done, again))
        if again.cancelled():
            return 1 if done.cancelled() else 0
        if self.web is not None:
            self.web.force_exit = True
        return 128 + again.result()

    async def close(self) -> None:
        """End the answers; those under way have FAREWELL_S seconds."""
        if self.web is not None and self._answering is not None:
            self.web.should_exit = True
            await asyncio.wait((self._answering,), timeout=FAREWELL_S + 1)
