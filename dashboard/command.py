"""`jitney dashboard`: the page without an engine, for remote engines."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import JsonDict
from jitney.engine.config import KEY_FLAG, Command, Config, Flag, FlagGroup, ResolvedConfig
from jitney.engine.config import settings as all_settings
from jitney.engine.server import HttpServer

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

    from jitney.dashboard.remote import RemoteEngine
    from jitney.engine.server import ServerSettings

_DEFAULT_ENGINE = "http://127.0.0.1:8000"
_DEFAULT_PORT = "8080"
_FLAGS = (
    Flag.of(
        "replicas",
        f"an engine, or several [{_DEFAULT_ENGINE}]; its name is its host and port if it gets none",
        [],
        nargs="*",
        metavar="[NAME=]URL",
    ),
    Flag.of("--engine", "the same", [], action="append", metavar="[NAME=]URL"),
    Flag.number(
        "--price-per-hour",
        "of one engine, in any currency, for the price of tokens with several",
        least=0,
    ),
    Flag.of("--host", "address to listen on", "127.0.0.1", metavar="TEXT"),
    Flag.of("--port", "port to listen on; 0: any free one", _DEFAULT_PORT, metavar="N"),
    Flag.of(
        "--allowed-hosts",
        "names that visitors may call this page by (the Host header, without port), beside "
        "localhost, 127.0.0.1, [::1] and --host; empty: those alone, or any name where --host "
        "is open to other machines",
        "",
        metavar="A,B,...",
    ),
)
#: Settings with the help of `jitney serve`'s -> names of their values in the help.
_AS_OF_A_SERVER = {
    "ssl_certfile": "FILE",
    "ssl_keyfile": "FILE",
    "root_path": "TEXT",
    "trusted_proxies": "A,B,...",
}
#: What the flags set.
_SETTINGS = ("host", "port", "insecure", "allowed_hosts", *_AS_OF_A_SERVER)


def _flag_of(name: str, metavar: str) -> Flag:
    setting = all_settings()[name]
    return Flag.of(setting.flag, str(setting.field.description), "", metavar=metavar)


_COMMAND = Command(
    "dashboard",
    "Serve the page of an engine elsewhere, or one page for several.",
    [
        FlagGroup(
            (
                *_FLAGS,
                *(_flag_of(*item) for item in _AS_OF_A_SERVER.items()),
                Flag.switch("--insecure", "allow listening beyond this machine without an API key"),
                KEY_FLAG,
            )
        )
    ],
    usage="jitney dashboard [NAME=]URL [[NAME=]URL ...] [FLAG ...]",
)


def dashboard_command(arguments: Sequence[str]) -> int:
    """Serve the page until interrupted; exit status 0."""
    args = _COMMAND.parse(arguments)
    key = args.engine_key()
    flags: JsonDict = {name: getattr(args, name) for name in _SETTINGS}
    # Visitors sign in with the engines' key; the engines decide what it may see.
    flags["admin_keys"] = (key,) if key else ()
    config = ResolvedConfig.load(flags=flags).config
    addresses = [*args.replicas, *args.engine] or [_DEFAULT_ENGINE]
    _serve(config, _engines(addresses, key), args.price_per_hour)
    return 0


def _engines(addresses: Sequence[str], key: str) -> dict[str, RemoteEngine]:
    """The engines by name. Raises ConfigError for invalid and repeated addresses."""
    from jitney.dashboard.fleet_member import ReplicaAddress
    from jitney.dashboard.remote import RemoteEngine

    engines: dict[str, RemoteEngine] = {}
    for text in addresses:
        name, address = ReplicaAddress.read(text, key)
        engine = RemoteEngine(*address)
        if engine.url in {other.url for other in engines.values()}:
            raise ConfigError(f"{engine.url} is given twice")
        if name in engines:
            raise ConfigError(f"two engines are called {name}: give them names, as NAME=URL")
        engines[name] = engine
    return engines


def _serve(config: Config, engines: dict[str, RemoteEngine], price: float | None) -> None:
    """price: of one engine for an hour."""
    from jitney.engine.common.display import make_display

    http = HttpServer.of(config.server)
    make_display().close()
    server = http.serve_app(_page_of(engines, http.settings, price))
    with http.listening():
        names = ", ".join(engine.url for engine in engines.values())
        print(f"Jitney's page of {names}: {http.url}/", flush=True)
        asyncio.run(_until_signal(server, http.bound))


def _page_of(
    engines: dict[str, RemoteEngine], settings: ServerSettings, price: float | None
) -> Starlette:
    from jitney.dashboard.fleet import FleetView
    from jitney.dashboard.fleet_page import FleetPage
    from jitney.dashboard.standalone import Standalone

    if len(engines) == 1:
        [engine] = engines.values()
        return Standalone(engine, settings).by_itself()
    return FleetPage(FleetView(engines, price_per_hour=price), settings).by_itself()


async def _until_signal(server: uvicorn.Server, bound: socket.socket) -> None:
    leave = partial(setattr, server, "should_exit", True)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, leave)
    await server.serve(sockets=[bound])
