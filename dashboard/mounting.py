"""Pages as applications: by themselves, or under a path of an HTTP endpoint, with what the endpoint
leaves to them and how they are found.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route, Router

from jitney.dashboard.auth import PageLine, page_middleware
from jitney.dashboard.routes import HANDLERS
from jitney.dashboard.sessions import Sessions
from jitney.engine.api.cross_site import cors
from jitney.engine.api.middleware import HeaderLimits
from jitney.engine.api.settings import ServerSettings


def page_to_mount(
    lines: Sequence[PageLine], sessions: Sessions, settings: ServerSettings
) -> Starlette:
    """A page for a path of its own. It checks for itself who may look (see `sign_in`), so what is
    in front must not ask for a bearer key, but check hosts and headers.
    """
    app = Starlette(
        routes=[line.route for line in lines],
        middleware=page_middleware(lines, sessions, settings.server.cors_origins),
        exception_handlers=HANDLERS,
    )
    app.router.redirect_slashes = False
    return app


def page_by_itself(
    lines: Sequence[PageLine],
    sessions: Sessions,
    settings: ServerSettings,
    close: Callable[[], Awaitable[None]],
) -> Starlette:
    """A page that nothing stands in front of. settings: allowed_hosts, cors_origins and api_keys
    count here. close: called at the end.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await close()

    router = Router([line.route for line in lines], redirect_slashes=False)
    inner: Any = HeaderLimits(router, settings)
    return Starlette(
        routes=[Mount("/", app=inner)],
        exception_handlers=HANDLERS,
        lifespan=lifespan,
        middleware=[
            *cors(settings),
            *page_middleware(lines, sessions, settings.server.cors_origins),
        ],
    )


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
