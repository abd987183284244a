"""`jitney fleet serve`: runs the endpoint of a fleet in this process, and engines in their own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.extras import how_to_install
from jitney.engine.config import Command, Config, Flag, FlagGroup
from jitney.engine.server import (
    AcceptedKeys,
    Reloader,
    base_url,
    check_tls,
    drain_status,
    listen,
)

if TYPE_CHECKING:
    import uvicorn
    from ray.serve import Application

    from jitney.engine.fleet.build import FleetParts
    from jitney.engine.fleet.config import FleetConfig
    from jitney.engine.fleet.fleet import Fleet
    from jitney.engine.fleet.launchers.local import LocalEngines
    from jitney.engine.server import AdapterNews, ApiKeys, Connections

_log = logging.getLogger("jitney")

#: Seconds for sending the last answers after the drain.
_FAREWELL_S = 3.0
#: Path of the page of all engines.
_PAGE = "/dashboard"
#: Reads the fleet's file again. Raises ConfigError.
type _Read = Callable[[], FleetConfig]
_COMMAND = Command(
    "fleet serve",
    "Serve the models of a fleet.toml: engines that are started here and engines elsewhere, behind "
    "one endpoint.",
    [
        FlagGroup(
            (
                Flag("file", {"metavar": "FILE", "help": "a fleet.toml: docs/fleet.md"}),
                Flag.of("--host", "address to listen on, in place of the file's", metavar="TEXT"),
                Flag.whole("--port", "port to listen on, in place of the file's"),
                Flag(
                    "--on",
                    {
                        "choices": ("processes", "ray"),
                        "default": "processes",
                        "help": "engines are processes of this machine, or replicas under Ray "
                        "Serve (extra ray) on the cluster that RAY_ADDRESS names",
                    },
                ),
            )
        )
    ],
    usage="jitney fleet serve FILE [FLAG ...]",
)


def fleet_serve(arguments: Sequence[str]) -> int:
    """Serve until a signal. Exit status: 0 if all requests finished in the drain, 128 + signal
    number after a second signal, else 1.
    """
    from jitney.engine.fleet.config import FleetConfig

    args = _COMMAND.parse(arguments)
    flag_values = {name: getattr(args, name) for name in ("host", "port")}
    flags = {name: value for name, value in flag_values.items() if value is not None}
    read = partial(FleetConfig.read, args.file, os.environ, flags)
    config = read()
    check_tls(config.server)
    keys = AcceptedKeys.of(config.server)
    if args.on == "processes":
        return _start(config, keys, read)
    return _start_on_ray(
        config, keys, partial(FleetConfig.read, config.file, _own(os.environ), flags)
    )


def _own(environ: Mapping[str, str]) -> dict[str, str]:
    """Jitney's variables of an environment, since Ray's actors have a different environment."""
    return {name: value for name, value in environ.items() if name.startswith("JITNEY_")}


def _start_on_ray(config: FleetConfig, keys: AcceptedKeys, read: _Read) -> int:
    """Serve under Ray Serve. Raises ConfigError if Ray is not installed."""
    try:
        from jitney.engine.fleet.launchers.ray_app import is_one_machine, run_on_ray
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ConfigError(f"--on ray needs Ray Serve: {how_to_install('ray')}") from None
    from jitney.engine.fleet.launchers.engine_process import LOCALHOST

    application = _application(config, keys, read, LOCALHOST if is_one_machine() else "")
    run_on_ray(application, config.server.host, config.server.port)
    return 0


def _application(config: FleetConfig, keys: AcceptedKeys, read: _Read, host: str) -> Application:
    """The Ray Serve application. read: works on every node with the fleet's files. host: address on
    which engines listen; empty: their node's address.
    """
    from jitney.engine.fleet.launchers.ray_app import build_application
    from jitney.engine.fleet.reread import engine_key
    from jitney.engine.server import limits

    # There may be several ingresses, on any node: they do not store files, batches or jobs.
    own = replace(limits(Config(server=config.server), keys), data_dir=None)
    settings = own.with_page(_PAGE)
    return build_application(
        config, settings, keys.admins, url_key=engine_key(config), host=host, read=read
    )


def ray_application(args: dict[str, str]) -> Application:
    """The application for `import_path` in a configuration of Ray Serve, such as a RayService: the
    fleet of args["file"], a fleet.toml on every node. Keys come from the environment. Raises
    ConfigError.
    """
    from jitney.engine.fleet.config import FleetConfig

    if set(args) != {"file"}:
        raise ConfigError("args of jitney's application are { file: FLEET_TOML }, no others")
    config = FleetConfig.read(args["file"], os.environ)
    check_tls(config.server)
    read = partial(FleetConfig.read, config.file, _own(os.environ))
    return _application(config, AcceptedKeys.of(config.server), read, "")


def _start(config: FleetConfig, keys: AcceptedKeys, read: _Read) -> int:
    from jitney.engine.core import make_display
    from jitney.engine.server import raise_descriptor_limit

    raise_descriptor_limit()
    make_display(config.server.log_level).close()
    with contextlib.closing(listen(config.server.host, config.server.port)) as bound:
        return asyncio.run(_serve(config, keys, bound, read))


async def _serve(config: FleetConfig, keys: AcceptedKeys, bound: socket.socket, read: _Read) -> int:
    from jitney.engine.fleet.build import open_fleet
    from jitney.engine.fleet.launchers.local import LocalEngines
    from jitney.engine.fleet.reread import engine_key

    async with open_fleet(config, engine_key(config)) as (fleet, parts):
        engines = LocalEngines(config, parts, keys.users, keys.admins)
        return await _Serving(config, keys, bound, fleet, parts, engines, read).run()


def _ignore() -> None:
    """Do nothing: the log has the message."""


class _Serving:
    def __init__(
        self,
        config: FleetConfig,
        keys: AcceptedKeys,
        bound: socket.socket,
        fleet: Fleet,
        parts: FleetParts,
        engines: LocalEngines,
        read: _Read,
    ):
        from jitney.engine.fleet.reread import FleetReader
        from jitney.engine.server import ApiKeys, Connections, limits

        self.config = config
        self.bound = bound
        self.fleet = fleet
        self.parts = parts
        self.engines = engines
        settings = limits(Config(server=config.server), keys)
        self._settings = replace(settings, data_dir=config.data_dir)
        accepted, connections = ApiKeys(settings), Connections(settings)
        self.web = self._web_server(accepted, connections)
        self.reload = fleet.reload = Reloader(
            config.server,
            FleetReader(config, read, parts, self._take_adapters),
            accepted,
            connections,
            fleet,
            tls=lambda: self.web.config.ssl,
            on_taken=lambda _, keys: engines.accept(keys.admins),
        )
        #: Numbers of received signals.
        self.signals: asyncio.Queue[int] = asyncio.Queue()

    def _web_server(self, accepted: ApiKeys, connections: Connections) -> uvicorn.Server:
        from jitney.engine.fleet.ingress import create_ingress
        from jitney.engine.fleet.page import fleet_page_routes
        from jitney.engine.server import web_server

        settings, price = self._settings, self.config.fleet.price_per_hour
        page = fleet_page_routes(self.fleet, settings, _PAGE, price, accepted)
        own = settings.with_page(_PAGE)
        app = create_ingress(self.fleet, own, extra_routes=page, keys=accepted)
        return web_server(Config(server=self.config.server), settings, app, connections)

    async def _take_adapters(self, fresh: FleetConfig) -> AdapterNews:
        """Make engines that are started here serve the configured adapters, and route requests for
        an adapter to the engines that hold it.
        """
        from jitney.engine.server import AdapterNews

        adapters = {name: of for name, of in fresh.adapters.items() if of in self.config.models}
        before = self.fleet.adapters
        news = await self.engines.set_adapters(fresh)
        self.fleet.adapters = adapters
        for model in {*adapters.values(), *before.values()}:
            for replica in self.fleet.models[model].replicas:
                replica.models = ()
                await self.parts.watch.look(replica)
        return AdapterNews(
            added=sorted(adapters.keys() - before.keys()),
            removed=sorted(before.keys() - adapters.keys()),
            replaced=news.replaced,
            needs_restart=news.needs_restart,
        )

    async def run(self) -> int:
        """Answer probes, start the engines, serve, drain. Raises JitneyError."""
        from jitney.engine.server import watch_disks

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.signals.put_nowait, number)
        self.reload.listen(self.signals.put_nowait)
        web = asyncio.create_task(self.web.serve(sockets=[self.bound]))
        work = asyncio.create_task(self._work())
        stop = asyncio.create_task(self.signals.get())
        watching = asyncio.create_task(watch_disks([self.config.data_dir], _ignore))
        try:
            await asyncio.wait((web, work, stop), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()  # the reason, as an exception
            return await self._drain() if stop.done() else 1
        finally:
            for task in (work, stop, watching):
                task.cancel()
            await self._close(web)

    async def _work(self) -> None:
        """Start the engines, print the addresses, and keep the engines running."""
        await self.engines.start()
        url = base_url(self.config.server, self.bound.getsockname()[1])
        print(f"Jitney's fleet serves {', '.join(self.fleet.models)}", flush=True)
        print(f"  endpoint  {url}/v1", flush=True)
        print(f"  engines   {url}/fleet/replicas", flush=True)
        print(f"  page      {url}{_PAGE}/", flush=True)
        await self.engines.watch()

    async def _drain(self) -> int:
        """Let running requests finish, at most drain_s seconds; a second signal ends everything at
        once. Returns the exit status.
        """
        limit = self.config.server.drain_s
        self.fleet.begin_drain()
        _log.info("stopping: running requests have %g s; a second signal stops at once", limit)
        status = await drain_status(self.fleet.drained(), self.signals, limit)
        if status > 128:
            self.web.force_exit = True
            self.engines.kill()
        return status

    async def _close(self, web: asyncio.Task[None]) -> None:
        self.web.should_exit = True
        await asyncio.wait((web,), timeout=_FAREWELL_S)
        await self.engines.close()
