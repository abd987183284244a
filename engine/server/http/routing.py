"""HTTP routes as lines of data, read by all code that treats routes differently."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from msgspec import Struct
from pydantic import BaseModel
from starlette.requests import Request
from starlette.routing import compile_path
from starlette.types import ASGIApp, Scope

#: Reads a request and returns what answers it; its exceptions become error answers. The first
#: argument is what the routes of a table share, such as `Service`.
type Handler = Callable[[Any, Request], Awaitable[ASGIApp]]


class Role(IntEnum):
    """Rights of a request; each role has those of the roles before it, too."""

    #: Probes, the sign-in form.
    ANYBODY = 0
    #: Generate; see one's own requests, and how many seats are taken.
    USER = 1
    #: Sees everything: texts, all requests, metrics, traces, reports; may use the policy lab.
    ADMIN = 2


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """One line of the table of routes."""

    #: Method and template of the path, such as "GET /v1/models/{model:path}". GET is HEAD too.
    call: str
    handler: Handler
    #: Purpose of the route, for the documentation.
    summary: str
    #: Role that may use it.
    role: Role = Role.USER
    #: Uses the engine: counted for its key and for a drain, cancelled when the client leaves.
    generates: bool = False
    #: Most bytes of a body; 0: the server's limit.
    body_limit: int = 0
    #: The model of the request body; None: no body.
    body: type[BaseModel] | None = None
    #: The body is read as JSON whatever its Content-Type.
    takes_any_type: bool = False
    #: The body is multipart/form-data, read by the handler; its limit is `file_limit`.
    uploads: bool = False
    #: The model of the query parameters; None: no parameters.
    query: type[BaseModel] | None = None
    #: The struct of its answer, a list of one, or one of several; None for what is no JSON.
    answer: Any = None
    #: The same of each event of a stream.
    event: Any = None
    #: Media type of an answer without a model.
    media_type: str = "text/plain"
    #: Media type of its stream, and whether it streams unless `stream` is false.
    stream_type: str = "text/event-stream"
    streams_unasked: bool = False
    #: Status of a successful answer.
    status: int = 200
    #: Level of its line in the access log.
    log_level: int = logging.INFO
    #: Answered at any number of open connections, so that a full server does not seem broken.
    is_probe: bool = False

    @property
    def method(self) -> str:
        return self.call.partition(" ")[0]

    @property
    def path(self) -> str:
        """The template of the path, as metrics and log name it."""
        return self.call.partition(" ")[2]

    @classmethod
    def probe(cls, path: str, handler: Handler, summary: str, answer: type[Struct]) -> HttpRoute:
        """Probes carry no key, say nothing about requests, and come too often for the log."""
        return cls(
            f"GET {path}",
            handler,
            summary,
            role=Role.ANYBODY,
            answer=answer,
            log_level=logging.DEBUG,
            is_probe=True,
        )


def route_path(scope: Scope) -> str:
    """The path without root_path (a prefix that a proxy removes), for matching routes."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if path == root:
        return ""
    return path.removeprefix(root) if path.startswith(root + "/") else path


class RouteTable:
    """The lines of the table, found by path and method. Several lines may share a path."""

    def __init__(self, routes: Sequence[HttpRoute]):
        self._patterns = [(compile_path(route.path)[0], route) for route in routes]

    def find(self, path: str, method: str) -> HttpRoute | None:
        """The route for path and method; for another method the first with the path (405); None:
        404.
        """
        candidates = self._with_path(path)
        fitting = [route for route in candidates if method in _allowed(route)]
        return next(iter(fitting or candidates), None)

    def allowed(self, path: str) -> list[str]:
        """The methods that the path's routes take, sorted."""
        return sorted({method for route in self._with_path(path) for method in _allowed(route)})

    def _with_path(self, path: str) -> list[HttpRoute]:
        return [route for pattern, route in self._patterns if pattern.fullmatch(path)]


def _allowed(route: HttpRoute) -> tuple[str, ...]:
    return ("GET", "HEAD") if route.method == "GET" else (route.method,)
