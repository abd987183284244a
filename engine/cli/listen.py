"""The listening socket and the keys: what must be right before anything is loaded."""

from __future__ import annotations

import contextlib
import errno
import socket
import stat
from pathlib import Path

from jitney.engine.config.schema import ServerSection
from jitney.engine.errors import ConfigError

REASONS = {
    errno.EADDRINUSE: "is in use by another program; choose another with --port",
    errno.EACCES: "needs privileges; choose one above 1023 with --port",
    errno.EADDRNOTAVAIL: "cannot be had: no network interface here has that address",
}


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound and ready to be served on. Raises ConfigError, in one line, if it
    cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror:
        raise ConfigError(f"host {host} is not an address of this machine") from None
    with contextlib.ExitStack() as undo:
        bound = undo.enter_context(socket.socket(family, kind, protocol))
        # Only lets us follow our own last run's closed connections; a living listener still makes
        # bind fail.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
            bound.listen(0)  # some systems let two sockets bind, and refuse only here
        except OSError as error:
            reason = REASONS.get(error.errno or 0, f"cannot be listened on: {error.strerror}")
            raise ConfigError(f"port {port} on {host} {reason}") from None
        undo.pop_all()
    return bound


def base_url(server: ServerSection, port: int) -> str:
    """http://host:port as a client on this machine writes it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def read_keys(server: ServerSection) -> tuple[str, ...]:
    """The accepted API keys from the file and the settings. Raises ConfigError, never showing a
    key.
    """
    return (*server.api_keys, *(_keys_of(Path(server.api_key_file)) if server.api_key_file else ()))


def _keys_of(file: Path) -> tuple[str, ...]:
    try:
        if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"{file} is open to other users of this machine: chmod 600 {file}")
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(f"api_key_file {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"api_key_file {file} is not text") from None
    if keys := tuple(line for line in lines if line and not line.startswith("#")):
        return keys
    raise ConfigError(f"api_key_file {file} holds no key")
