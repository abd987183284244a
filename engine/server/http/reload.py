"""POST /admin/reload: read the configuration's files again, in an engine or a fleet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from msgspec import field
from starlette.requests import Request
from starlette.responses import Response

from jitney.engine.common.errors import JitneyError
from jitney.engine.server.http.answers import ResponseModel
from jitney.engine.server.http.errors import HttpError
from jitney.engine.server.http.jsonio import json_answer
from jitney.engine.server.http.routing import HttpRoute, Role
from jitney.engine.server.http.server_context import ServerContext

#: Result for a file: there is none, its content is the same, or it was replaced.
type FileNews = Literal["none", "unchanged", "replaced"]


class KeyNews(ResponseModel, kw_only=True):
    """Numbers of changed keys, and of requests and tasks that ended because of removed keys."""

    added: int
    removed: int
    #: Keys that have another role now.
    changed: int
    #: Open requests that ended with an error, and work in the background that was cancelled.
    requests_ended: int
    jobs_cancelled: int
    batches_cancelled: int


class AdapterNews(ResponseModel):
    """Names of added and removed adapters, and of those with changed files."""

    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    #: Their files changed, which an engine that shares experts reads at its next start.
    needs_restart: list[str] = field(default_factory=list)


class ReloadAnswer(ResponseModel, kw_only=True):
    """POST /admin/reload."""

    status: Literal["reloaded"] = "reloaded"
    keys: KeyNews
    certificate: FileNews
    #: Result for the key that a fleet sends to the engines of `urls`.
    engine_key: FileNews
    adapters: AdapterNews
    #: Other changed settings that take effect now.
    settings: list[str]
    #: Changed settings that take effect at the next start.
    needs_restart: list[str]


#: Reads the files and applies changes. If it raises JitneyError, nothing has changed.
type Reload = Callable[[], Awaitable[ReloadAnswer]]


async def _reload(server: ServerContext, request: Request) -> Response:
    if server.reload is None:
        raise HttpError(
            404,
            "this server cannot read its files again; start it anew (on Ray: deploy the fleet "
            "again)",
            code="not_found",
        )
    try:
        answer = await server.reload()
    except JitneyError as error:
        message = f"nothing was changed: {error}"
        raise HttpError(409, message, code="reload_failed") from error
    return json_answer(answer)


RELOAD_ROUTES = (
    HttpRoute(
        "POST /admin/reload",
        _reload,
        "read keys, certificate, adapters and limits again, as they are configured now",
        role=Role.ADMIN,
        answer=ReloadAnswer,
    ),
)
