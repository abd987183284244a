"""Routes of an engine's page, except the page itself and the feed."""

from __future__ import annotations

from typing import NamedTuple

from jitney.engine.server import Role


class _EngineRoute(NamedTuple):
    """One line of the table."""

    path: str
    #: GET includes HEAD.
    methods: tuple[str, ...]
    #: Least role of its users.
    role: Role


_GET = ("GET",)
#: A new answer needs a line here and a handler in `dashboard.app`; a remote dashboard forwards all
#: of them.
ENGINE_ROUTES = (
    _EngineRoute("/slots", _GET, Role.USER),
    _EngineRoute("/frames", _GET, Role.USER),
    _EngineRoute("/timeline", _GET, Role.USER),
    _EngineRoute("/history", _GET, Role.USER),
    _EngineRoute("/stays", _GET, Role.USER),
    _EngineRoute("/trace", _GET, Role.ADMIN),
    _EngineRoute("/requests", _GET, Role.USER),
    _EngineRoute("/request/{id}", _GET, Role.USER),
    _EngineRoute("/incidents", _GET, Role.USER),
    _EngineRoute("/tenants", _GET, Role.USER),
    _EngineRoute("/memory", _GET, Role.USER),
    _EngineRoute("/work", _GET, Role.USER),
    _EngineRoute("/work/{id}", ("DELETE",), Role.USER),
    _EngineRoute("/programs", _GET, Role.ADMIN),
    _EngineRoute("/buckets", _GET, Role.ADMIN),
    _EngineRoute("/settings", _GET, Role.ADMIN),
    _EngineRoute("/report", _GET, Role.ADMIN),
    _EngineRoute("/lab", ("GET", "POST", "DELETE"), Role.ADMIN),
)
