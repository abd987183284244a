"""The uvicorn server of engine, fleet and page, with their common limits."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jitney.engine.common.key_file import read_key_file
from jitney.engine.common.requests import JsonDict
from jitney.engine.config import ServerSection
from jitney.engine.server.http.connections import ACCEPTED_AT_ONCE, connections_within
from jitney.engine.server.http.listen import AcceptedKeys

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

    from jitney.engine.server.http.connections import Connections
    from jitney.engine.server.http.settings import ServerSettings

#: Seconds that responses in progress have to end after the engine has stopped.
FAREWELL_S = 2
#: Connections that the system keeps until they are accepted.
_ACCEPT_QUEUE = 2048
#: Most bytes of a request line with its headers.
_HEADER_LIMIT = 1 << 16


def limits(server: ServerSection, keys: AcceptedKeys) -> ServerSettings:
    """The [server] section as the endpoint takes it."""
    from jitney.engine.common.key_file import digest_key
    from jitney.engine.server.http.settings import ServerSettings

    return ServerSettings(
        server=server,
        api_keys=tuple(map(digest_key, keys.users)),
        admin_keys=tuple(map(digest_key, keys.admins)),
        allowed_hosts=server.answered_hosts,
        max_connections=connections_within(server.max_connections),
        data_dir=server.data_folder,
        webhook_secret=read_key_file(server.webhook_secret_file, "webhook_secret_file"),
    )


def web_server(
    server: ServerSection, settings: ServerSettings, app: Starlette, connections: Connections
) -> uvicorn.Server:
    """uvicorn with bounded headers and our signals: a drain is more than closing connections."""
    import uvicorn

    from jitney.engine.server.http.protocol import http_protocol, over_tls

    class WebServer(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Start with a short accept queue, which is enlarged afterwards: asyncio accepts as
            many connections in a row as the queue holds, too many for the limit of open files. TLS
            is our protocol's, not asyncio's.
            """
            context, self.config.ssl = self.config.ssl, None
            if context is not None:
                self.config.http_protocol_class = over_tls(protocol, context)  # type: ignore[assignment]
            await super().startup(sockets)
            self.config.ssl = context
            for bound in sockets or ():
                bound.listen(_ACCEPT_QUEUE)

    protocol = http_protocol(settings, connections)
    return WebServer(uvicorn.Config(app, http=protocol, **_web_options(server)))


def _web_options(server: ServerSection) -> JsonDict:
    """The [server] section as uvicorn takes it."""
    return {
        "backlog": ACCEPTED_AT_ONCE,
        "ws": "none",
        "lifespan": "on",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "ssl_certfile": server.ssl_certfile or None,
        "ssl_keyfile": server.ssl_keyfile or None,
        "root_path": server.root_path,
        "proxy_headers": bool(server.trusted_proxies),
        "forwarded_allow_ips": list(server.trusted_proxies),
        "timeout_keep_alive": max(1, round(server.keep_alive_s)),
        "timeout_graceful_shutdown": FAREWELL_S,
        "h11_max_incomplete_event_size": _HEADER_LIMIT,
    }
