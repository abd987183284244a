"""`jitney fleet serve`: runs the endpoint of a fleet in this process, and engines in their own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.extras import how_to_install
from jitney.engine.common.terminal import visible
from jitney.engine.config import Command, Flag, FlagGroup
from jitney.engine.server import HttpServer

if TYPE_CHECKING:
    from ray.serve import Application

    from jitney.engine.fleet.build import FleetParts
    from jitney.engine.fleet.config import FleetConfig
    from jitney.engine.fleet.fleet import Fleet
    from jitney.engine.fleet.launchers.local import LocalEngines
    from jitney.engine.server import AdapterNews

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
    http = HttpServer.of(config.server)
    if args.on == "processes":
        return _start(config, http, read)
    return _start_on_ray(
        config, http, partial(FleetConfig.read, config.file, _own(os.environ), flags)
    )


def _own(environ: Mapping[str, str]) -> dict[str, str]:
    """Jitney's variables of an environment, since Ray's actors have a different environment."""
    return {name: value for name, value in environ.items() if name.startswith("JITNEY_")}


def _start_on_ray(config: FleetConfig, http: HttpServer, read: _Read) -> int:
    """Serve under Ray Serve. Raises ConfigError if Ray is not installed."""
    try:
        from jitney.engine.fleet.launchers.ray_app import is_one_machine, run_on_ray
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ConfigError(f"--on ray needs Ray Serve: {how_to_install('ray')}") from None
    from jitney.engine.fleet.launchers.engine_process import LOCALHOST

    application = _application(config, http, read, LOCALHOST if is_one_machine() else "")
    run_on_ray(application, config.server.host, config.server.port)
    return 0


def _application(config: FleetConfig, http: HttpServer, read: _Read, host: str) -> Application:
    """The Ray Serve application. read: works on every node with the fleet's files. host: address on
    which engines listen; empty: their node's address.
    """
    from jitney.engine.fleet.launchers.ray_app import build_application
    from jitney.engine.fleet.reread import engine_key

    # There may be several ingresses, on any node: they do not store files, batches or jobs.
    settings = replace(http.settings, data_dir=None).with_page(_PAGE)
    return build_application(
        config, settings, http.keys.admins, url_key=engine_key(config), host=host, read=read
    )


def ray_application(args: dict[str, str]) -> Application:
    """The application for `import_path` in a configuration of Ray Serve, such as a RayService: the
    fleet of args["file"], a fleet.toml on every node. Keys come from its files or the environment.
    Raises ConfigError.
    """
    from jitney.engine.fleet.config import FleetConfig

    if set(args) != {"file"}:
        raise ConfigError("args of jitney's application are { file: FLEET_TOML }, no others")
    config = FleetConfig.read(args["file"], os.environ)
    read = partial(FleetConfig.read, config.file, _own(os.environ))
    return _application(config, HttpServer.of(config.server), read, "")


def _start(config: FleetConfig, http: HttpServer, read: _Read) -> int:
    from jitney.engine.common.display import make_display

    make_display(config.server.log_level).close()
    with http.listening():
        return asyncio.run(_serve(config, http, read))


async def _serve(config: FleetConfig, http: HttpServer, read: _Read) -> int:
    from jitney.engine.fleet.build import open_fleet
    from jitney.engine.fleet.launchers.local import LocalEngines
    from jitney.engine.fleet.reread import engine_key

    async with open_fleet(config, engine_key(config)) as (fleet, parts):
        engines = LocalEngines(config, parts, http.keys.users, http.keys.admins)
        return await _Serving(config, http, fleet, parts, engines, read).run()


@dataclass(eq=False)
class _Serving:
    config: FleetConfig
    http: HttpServer
    fleet: Fleet
    parts: FleetParts
    engines: LocalEngines
    read: _Read

    def __post_init__(self) -> None:
        from jitney.engine.fleet.ingress import create_ingress
        from jitney.engine.fleet.page import fleet_page_routes
        from jitney.engine.fleet.reread import FleetReader

        config, http, fleet = self.config, self.http, self.fleet
        http.settings = replace(http.settings, data_dir=config.data_dir)
        price = config.fleet.price_per_hour
        page = fleet_page_routes(fleet, http.settings, _PAGE, price, http.accepted)
        own = http.settings.with_page(_PAGE)
        http.serve_app(create_ingress(fleet, own, extra_routes=page, keys=http.accepted))
        http.reloads(
            fleet,
            FleetReader(config, self.read, self.parts, self._take_adapters),
            on_taken=lambda _, admins: self.engines.accept(admins),
        )

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
        try:
            return await self.http.run(self._work(), self._drain, [self.config.data_dir])
        finally:
            await self.http.close()
            await self.engines.close()

    async def _work(self) -> None:
        """Start the engines, print the addresses, and keep the engines running."""
        await self.engines.start()
        url = self.http.url
        print(visible(f"Jitney's fleet serves {', '.join(self.fleet.models)}"), flush=True)
        print(f"  endpoint  {url}/v1", flush=True)
        print(f"  engines   {url}/fleet/replicas", flush=True)
        print(f"  page      {url}{_PAGE}/", flush=True)
        await self.engines.watch()

    async def _drain(self) -> int:
        """Let running requests finish, at most drain_s seconds; a second signal ends everything at
        once. Returns the exit status.
        """
        self.fleet.begin_drain()
        status = await self.http.drained(self.fleet.drained())
        if status > 128:
            self.engines.kill()
        return status
