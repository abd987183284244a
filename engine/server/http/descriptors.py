"""The operating system's limit of open files, of which every connection takes one."""

from __future__ import annotations

import logging
import resource

from jitney.engine.server.http.connections import SPARE

_log = logging.getLogger("jitney")

#: Upper bound of the limit: some systems allow a billion, and some programs iterate over all.
_ENOUGH = 1 << 20
#: Descriptors reserved for logs, libraries, listening sockets, files and webhooks.
_OWN = 128
#: Connections accepted in one turn of the loop, and turns until a refused one is closed.
ACCEPTED_AT_ONCE, _TURNS = 16, 5


def _descriptor_limit() -> int:
    """Files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _ENOUGH if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> int:
    """Raise the limit to the allowed maximum and return it. Safe, as nothing here uses select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < raised:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return _descriptor_limit()


def connections_within(connections: int, limit: int | None = None) -> int:
    """Connections that the limit of open files (None: this process's) allows; warns if fewer."""
    if limit is None:
        limit = _descriptor_limit()
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
