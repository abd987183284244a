"""`jitney dashboard`: the page by itself, for engines elsewhere."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jitney.engine.cli.flags import Parser
from jitney.engine.cli.keys import add_key_flag, engine_key
from jitney.engine.cli.listen import base_url, check_tls, listen, read_keys
from jitney.engine.config.layers import NOTHING, load_config
from jitney.engine.config.layers import settings as all_settings
from jitney.engine.config.schema import Config
from jitney.engine.errors import ConfigError

if TYPE_CHECKING:
    import uvicorn

_DEFAULT_ENGINE = "http://127.0.0.1:8000"
_DEFAULT_PORT = "8080"


def run(arguments: Sequence[str]) -> int:
    """Serve the page until interrupted; exit status 0."""
    args = _parse(arguments)
    key = engine_key(args)
    flags = {
        "host": args.host,
        "port": args.port,
        "insecure": args.insecure,
        "allowed_hosts": args.allowed_hosts,
        "ssl_certfile": args.ssl_certfile,
        "ssl_keyfile": args.ssl_keyfile,
        "root_path": args.root_path,
        "trusted_proxies": args.trusted_proxies,
        # The engines' key is also what visitors sign in with, and the engines know what it may see.
        "admin_keys": (key,) if key else (),
    }
    config = load_config(None, NOTHING, flags)
    _serve(config, args.engine or [_DEFAULT_ENGINE], key)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("dashboard", "Serve the page for one or several engines elsewhere.")
    parser.usage = "jitney dashboard --engine URL [--engine URL ...] [FLAG ...]"
    add = parser.add_argument
    add(
        "--engine",
        action="append",
        metavar="URL",
        default=[],
        help=f"an engine; may be repeated [{_DEFAULT_ENGINE}]",
    )
    add("--host", default="127.0.0.1", metavar="TEXT", help="address to listen on [127.0.0.1]")
    add(
        "--port",
        default=_DEFAULT_PORT,
        metavar="N",
        help=f"port to listen on; 0: any free one [{_DEFAULT_PORT}]",
    )
    add(
        "--allowed-hosts",
        default="",
        metavar="A,B,...",
        help=(
            "names that visitors may call this page by (the Host header, without port), beside "
            "localhost, 127.0.0.1, [::1] and --host; empty: those alone, or any name where --host "
            "is open to other machines"
        ),
    )
    for name, metavar in (
        ("ssl_certfile", "FILE"),
        ("ssl_keyfile", "FILE"),
        ("root_path", "TEXT"),
        ("trusted_proxies", "A,B,..."),
    ):
        setting = all_settings()[name]
        add(setting.flag, default="", metavar=metavar, help=str(setting.field.description))
    add(
        "--insecure",
        action="store_true",
        help="allow listening beyond this machine without an API key",
    )
    add_key_flag(parser)
    return parser.parse(arguments)


def _serve(config: Config, urls: Sequence[str], key: str) -> None:
    """Raises ConfigError for an engine that cannot be one."""
    from jitney.dashboard.remote import RemoteEngine
    from jitney.dashboard.standalone import create_standalone
    from jitney.engine.api.connections import Connections
    from jitney.engine.cli.descriptors import raise_descriptor_limit
    from jitney.engine.cli.display import make_display
    from jitney.engine.cli.serve import limits, web_server

    if len(set(urls)) < len(urls):
        raise ConfigError("--engine names one engine twice")
    raise_descriptor_limit()
    check_tls(config.server)
    settings = limits(config, read_keys(config.server))
    engines = [RemoteEngine(url, key) for url in urls]
    make_display().close()
    app = create_standalone(engines, settings)
    server = web_server(config, settings, app, Connections(settings))
    with contextlib.closing(listen(config.server.host, config.server.port)) as bound:
        names = ", ".join(engine.url for engine in engines)
        page = base_url(config.server, bound.getsockname()[1])
        print(f"Jitney's page of {names}: {page}/", flush=True)
        asyncio.run(_until_signal(server, bound))


async def _until_signal(server: uvicorn.Server, bound: socket.socket) -> None:

    def leave() -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, leave)
    await server.serve(sockets=[bound])
