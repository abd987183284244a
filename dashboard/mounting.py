"""A page under a path of an HTTP endpoint: what the endpoint leaves to it, and how it is found."""

from __future__ import annotations

from dataclasses import replace

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from jitney.engine.api.settings import ServerSettings


def with_page(settings: ServerSettings, path: str) -> ServerSettings:
    """What an endpoint that has a page at `path` leaves to the page's own sign-in: a browser cannot
    send a bearer key with a page.
    """
    prefixes, paths = (path + "/",), frozenset({"/", path})
    return replace(settings, public_prefixes=prefixes, public_paths=paths)


def mounted(page: Starlette, path: str) -> list[BaseRoute]:
    """A page at `path`, and redirects for those who leave out the slash at its end, and for
    browsers that come to "/".

    The redirects are relative, because an absolute one would repeat the client's Host header.
    """

    async def add_slash(request: Request) -> Response:
        return RedirectResponse(path.rpartition("/")[2] + "/")

    async def front_door(request: Request) -> Response:
        if "text/html" not in request.headers.get("accept", ""):
            raise HTTPException(404)  # a program wants to know that there is nothing
        return RedirectResponse(path.removeprefix("/") + "/")

    return [
        Route("/", front_door),
        Route(path, add_slash),
        Mount(path, app=page),
    ]
