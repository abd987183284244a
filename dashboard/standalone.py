"""A dashboard of engines elsewhere: the page is served here, what it shows is asked of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route, Router

from jitney.dashboard.auth import Guard, LiveFeed
from jitney.dashboard.relay import Relay
from jitney.dashboard.remote import RemoteEngine, Unreachable
from jitney.dashboard.routes import HANDLERS, Front, read_body, to_json
from jitney.engine.api.errors import HttpError
from jitney.engine.api.middleware import HeaderLimits
from jitney.engine.api.settings import ServerSettings

#: First parts of the paths that are asked of an engine, and the methods that each takes.
PASSED = {
    "slots": ("GET",),
    "frames": ("GET",),
    "timeline": ("GET",),
    "trace": ("GET",),
    "requests": ("GET",),
    "request": ("GET",),
    "report": ("GET",),
    "lab": ("GET", "POST", "DELETE"),
}
#: Headers of an engine's answer that are passed on.
HEADERS = ("content-type", "content-disposition", "retry-after")
#: Seconds that each engine has to say how it is.
STATE_S = 2.0


class Standalone(Front):
    """Handlers for several engines. settings.api_keys: what visitors of this page must know."""

    def __init__(self, engines: Sequence[RemoteEngine], settings: ServerSettings):
        super().__init__(settings.api_keys)
        self.engines = list(engines)
        self.relays = [Relay(engine) for engine in self.engines]

    def routes(self) -> list[BaseRoute]:
        feeds = [
            Route(f"/engines/{number}/feed", LiveFeed(relay), methods=["GET"])
            for number, relay in enumerate(self.relays)
        ]
        return [
            *self.front_routes(),
            Route("/engines", self.list_engines),
            *feeds,
            Route(
                "/engines/{number:int}/{path:path}", self.passed, methods=["GET", "POST", "DELETE"]
            ),
        ]

    async def list_engines(self, request: Request) -> Response:
        """Every engine, whether it answers or not."""
        told = await asyncio.gather(*map(self._ask, self.engines))
        return to_json(
            {
                "standalone": True,
                "engines": [
                    {"name": name, "url": engine.url, "base": f"engines/{number}/", "state": state}
                    for number, (engine, (name, state)) in enumerate(
                        zip(self.engines, told, strict=True)
                    )
                ],
            }
        )

    async def _ask(self, engine: RemoteEngine) -> tuple[str, str]:
        """(model, state) of an engine."""
        try:
            async with asyncio.timeout(STATE_S), engine.answer("GET", "engines") as answer:
                (one,) = msgspec.json.decode(await answer.aread())["engines"]
                return str(one["name"]), str(one["state"])
        except (Unreachable, TimeoutError):
            return "", "unreachable"
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
            return "", "unknown"

    async def passed(self, request: Request) -> Response:
        """An engine's own answer."""
        number, path = request.path_params["number"], request.path_params["path"]
        parts = path.split("/")
        allowed = request.method in PASSED.get(parts[0], ()) and not {"", ".", ".."} & set(parts)
        if number >= len(self.engines) or not allowed:
            raise HttpError(404, "there is nothing here", code="not_found")
        body = await read_body(request) if request.method == "POST" else b""
        return await relayed(
            self.engines[number], request.method, quote(path), request.url.query, body
        )


async def relayed(
    engine: RemoteEngine, method: str, path: str, query: str, body: bytes
) -> Response:
    """The answer of an engine, passed on as it comes. Raises HttpError 502 when there is none."""
    stack = AsyncExitStack()
    headers = {"content-type": "application/json"} if body else None
    try:
        answer = await stack.enter_async_context(
            engine.answer(method, path, headers=headers, query=query, body=body)
        )
    except Unreachable as error:
        raise HttpError(502, str(error), code="engine_unreachable") from None
    if answer.status_code == 401:
        await stack.aclose()
        raise HttpError(
            502,
            f"{engine.url} wants an API key that this dashboard does not have",
            code="engine_unreachable",
        )

    async def pieces() -> AsyncIterator[bytes]:
        async with stack:
            async for piece in answer.aiter_bytes():
                yield piece

    kept = {name: answer.headers[name] for name in HEADERS if name in answer.headers}
    return StreamingResponse(pieces(), answer.status_code, kept)


def create_standalone(engines: Sequence[RemoteEngine], settings: ServerSettings) -> Starlette:
    """The page of these engines. settings: hosts and api_keys count here."""
    dashboard = Standalone(engines, settings)

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.gather(*(engine.close() for engine in dashboard.engines))

    inner: Any = HeaderLimits(Router(dashboard.routes(), redirect_slashes=False), settings)
    return Starlette(
        routes=[Mount("/", app=inner)],
        exception_handlers=HANDLERS,
        lifespan=life,
        middleware=[Middleware(Guard, sessions=dashboard.sessions)],
    )
