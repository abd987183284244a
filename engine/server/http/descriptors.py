"""The operating system's limit of open files, of which every connection takes one."""

from __future__ import annotations

import logging

from jitney.engine.common.machine import descriptor_limit
from jitney.engine.server.http.connections import SPARE

_log = logging.getLogger("jitney")

#: Descriptors reserved for logs, libraries, listening sockets, files and webhooks.
_OWN = 128
#: Connections accepted in one turn of the loop, and turns until a refused one is closed.
ACCEPTED_AT_ONCE, _TURNS = 16, 5


def connections_within(connections: int, limit: int | None = None) -> int:
    """Connections that the limit of open files (None: this process's) allows; warns if fewer."""
    if limit is None:
        limit = descriptor_limit()
    possible = max(1, limit - _OWN - SPARE - _TURNS * ACCEPTED_AT_ONCE)
    if possible >= connections:
        return connections
    _log.warning(
        "only %d files may be open (ulimit -Hn): at most %d connections instead of %d",
        limit,
        possible,
        connections,
    )
    return possible
