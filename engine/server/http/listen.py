"""The listening socket and the keys, which are checked before anything is loaded."""

from __future__ import annotations

import errno
import socket
import ssl
import stat
from pathlib import Path
from typing import Any, NamedTuple

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.key_file import read_keys
from jitney.engine.common.ports import HostAddress
from jitney.engine.config import ServerSection

_REASONS = {
    errno.EADDRINUSE: "is in use by another program; choose another with --port",
    errno.EACCES: "needs privileges; choose one above 1023 with --port",
    errno.EADDRNOTAVAIL: "cannot be had: no network interface here has that address",
}


def listen(host: str, port: int) -> socket.socket:
    """A socket, bound and ready to be served on. Raises ConfigError, in one line."""
    family, address = _address_of(host, port)
    try:
        # Fails if another process listens: some systems refuse only the second `listen`.
        return socket.create_server(
            address, family=family, backlog=0, dualstack_ipv6=family == socket.AF_INET6
        )
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, f"cannot be listened on: {error.strerror}")
        raise ConfigError(f"port {port} on {host} {reason}") from None


def _address_of(host: str, port: int) -> tuple[int, tuple[Any, ...]]:
    """(family, address) as a socket takes them."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror:
        raise ConfigError(f"host {host} is not an address of this machine") from None
    family, _, _, _, address = addresses[0]
    return family, address


def check_tls(server: ServerSection) -> None:
    """Raise ConfigError, in one line, for a certificate or key that cannot be served with."""
    if not server.ssl_certfile:
        return
    load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), server)


def load_certificate(context: ssl.SSLContext, server: ServerSection) -> None:
    """Use these settings' certificate for new handshakes. Raises ConfigError, in one line."""
    key_file = Path(server.ssl_keyfile or server.ssl_certfile)
    try:
        if key_file.stat().st_mode & stat.S_IRWXO:
            raise ConfigError(f"{key_file} is open to other users of this machine: chmod o= it")
        # Without this, OpenSSL would ask for an encrypted key's password in the terminal.
        context.load_cert_chain(server.ssl_certfile, key_file, password="")
    except ssl.SSLError as error:
        raise ConfigError(
            f"ssl_certfile {server.ssl_certfile} and its key cannot be used: "
            f"{error.reason or 'they are no PEM files, or the key is encrypted'}"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"ssl_certfile {server.ssl_certfile} or its key cannot be read: {error.strerror}"
        ) from None


def base_url(server: ServerSection, port: int) -> str:
    """http(s)://host:port as a client on this machine writes it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)
    scheme = "https" if server.ssl_certfile else "http"
    return f"{scheme}://{HostAddress(host, port)}"


class AcceptedKeys(NamedTuple):
    """API keys by the role that they give."""

    users: tuple[str, ...] = ()
    admins: tuple[str, ...] = ()

    @classmethod
    def of(cls, server: ServerSection) -> AcceptedKeys:
        """The keys of the files and the settings. Raises ConfigError, never showing a key."""
        users = [*server.api_keys, *read_keys("api_key_file", server.api_key_file)]
        admins = [*server.admin_keys, *read_keys("admin_key_file", server.admin_key_file)]
        return cls(tuple(users), tuple(admins))
