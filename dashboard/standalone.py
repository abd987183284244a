"""A dashboard of engines elsewhere: the page is served here, what it shows is asked of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route, Router

from jitney.dashboard.app import ENGINE_ROUTES
from jitney.dashboard.auth import FeedEndpoint, PageLine, page_middleware
from jitney.dashboard.relay import Relay
from jitney.dashboard.remote import RemoteEngine, Unreachable
from jitney.dashboard.routes import HANDLERS, PageRoutes, read_body
from jitney.engine.api.access import Keys
from jitney.engine.api.cross_site import cors
from jitney.engine.api.errors import HttpError
from jitney.engine.api.middleware import HeaderLimits
from jitney.engine.api.settings import ServerSettings
from jitney.engine.types import JsonDict

#: Methods of what is asked of an engine, by the first part of the path.
_PASSED = {route.path.split("/")[1]: route.methods for route in ENGINE_ROUTES}
#: Parts of a path that would lead elsewhere.
_NOT_PARTS = {"", ".", ".."}
#: What an engine answers with: data, but for these, which are files to keep, by the first part of
#: the path. Nothing else of an engine is shown under this page's own origin, where it could act for
#: whoever looks.
_DATA = "application/json"
_FILES = {
    "trace": (_DATA, "jitney-trace.json"),
    "report": ("text/html", "jitney-report.html"),
}
#: Seconds that each engine has to say how it is.
_STATE_S = 2.0


class _Standalone(PageRoutes):
    """Handlers for several engines. settings.api_keys: what visitors of this page must know."""

    def __init__(self, engines: Sequence[RemoteEngine], settings: ServerSettings):
        super().__init__(Keys(settings))
        self.engines = list(engines)
        self.relays = [Relay(engine) for engine in self.engines]

    def lines(self) -> list[PageLine]:
        """What an engine's key may see there, its engine decides."""
        feeds = [
            Route(f"/engines/{number}/feed", FeedEndpoint(relay), methods=["GET"])
            for number, relay in enumerate(self.relays)
        ]
        passed = Route(
            "/engines/{number:int}/{path:path}", self.pass_on, methods=["GET", "POST", "DELETE"]
        )
        routes = [Route("/engines", self.list_engines), *feeds, passed]
        return [*self.page_lines(), *(PageLine(route) for route in routes)]

    async def list_engines(self, request: Request) -> Response:
        """Every engine, whether it answers or not."""
        engines = await asyncio.gather(*map(_ask, itertools.count(), self.engines))
        return self.engine_list(engines, standalone=True)

    async def pass_on(self, request: Request) -> Response:
        """An engine's own answer."""
        number, path = request.path_params["number"], request.path_params["path"]
        parts = path.split("/")
        allowed = request.method in _PASSED.get(parts[0], ()) and not _NOT_PARTS & set(parts)
        if number >= len(self.engines) or not allowed:
            raise HttpError(404, "there is nothing here", code="not_found")
        body = await read_body(request) if request.method == "POST" else b""
        engine = self.engines[number]
        return await _relayed(engine, request.method, quote(path), request.url.query, body)


async def _ask(number: int, engine: RemoteEngine) -> JsonDict:
    """What an engine says of itself: name (of its model), url, base (its own path here), state."""
    name, state = "", "unknown"
    try:
        async with asyncio.timeout(_STATE_S), engine.answer("GET", "engines") as answer:
            (info,) = msgspec.json.decode(await answer.aread())["engines"]
            name, state = str(info["name"]), str(info["state"])
    except (Unreachable, TimeoutError):
        state = "unreachable"
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
        pass  # something else answers there
    return {"name": name, "url": engine.url, "state": state, "base": f"engines/{number}/"}


async def _relayed(
    engine: RemoteEngine, method: str, path: str, query: str, body: bytes
) -> Response:
    """The answer of an engine, passed on as it comes. Raises HttpError 502 when there is none."""
    stack = AsyncExitStack()
    sent = {"content-type": _DATA} if body else None
    context = engine.answer(method, path, headers=sent, query=query, body=body)
    try:
        answer = await stack.enter_async_context(context)
    except Unreachable as error:
        raise HttpError(502, str(error), code="engine_unreachable") from None
    if answer.status_code == 401:
        await stack.aclose()
        raise HttpError(
            502,
            f"{engine.url} wants an API key that this dashboard does not have",
            code="engine_unreachable",
        )

    async def body_parts() -> AsyncIterator[bytes]:
        async with stack:
            async for part in answer.aiter_bytes():
                yield part

    try:
        headers = _own_headers(path, answer)
    except ValueError:
        await stack.aclose()
        raise HttpError(
            502,
            f"{engine.url} answers as no Jitney engine does; is it one, of this version?",
            code="engine_unexpected",
        ) from None
    return StreamingResponse(body_parts(), answer.status_code, headers)


def _own_headers(path: str, answer: httpx.Response) -> dict[str, str]:
    """The headers that we give to an engine's answer: ours, after a look at its own. Raises
    ValueError for an answer that is not what was asked for.
    """
    is_error = answer.status_code >= 400
    expected, name = (_DATA, "") if is_error else _FILES.get(path, (_DATA, ""))
    given = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != expected or not (is_error or 200 <= answer.status_code < 300):
        raise ValueError(given)
    headers = {"content-type": f"{expected}; charset=utf-8"}
    if name:
        headers["content-disposition"] = f'attachment; filename="{name}"'
    retry_after = answer.headers.get("retry-after", "")
    if retry_after.isascii() and retry_after.isdigit():
        headers["retry-after"] = retry_after
    return headers


def create_standalone(engines: Sequence[RemoteEngine], settings: ServerSettings) -> Starlette:
    """The page of these engines. settings: allowed_hosts, cors_origins and api_keys count here."""
    dashboard = _Standalone(engines, settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.gather(*(engine.close() for engine in dashboard.engines))

    lines = dashboard.lines()
    router = Router([line.route for line in lines], redirect_slashes=False)
    inner: Any = HeaderLimits(router, settings)
    return Starlette(
        routes=[Mount("/", app=inner)],
        exception_handlers=HANDLERS,
        lifespan=lifespan,
        middleware=[
            *cors(settings),
            *page_middleware(lines, dashboard.sessions, settings.cors_origins),
        ],
    )
