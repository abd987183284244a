"""A dashboard of one engine elsewhere: the page is served here, what it shows is asked of it."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jitney.dashboard.auth import FeedEndpoint, PageLine
from jitney.dashboard.mounting import page_by_itself
from jitney.dashboard.passing import PASSED_METHODS, pass_on
from jitney.dashboard.relay import Relay
from jitney.dashboard.remote import RemoteEngine, Unreachable
from jitney.dashboard.routes import PageRoutes
from jitney.engine.api.access import ApiKeys
from jitney.engine.api.settings import ServerSettings
from jitney.engine.types import JsonDict

#: The engine's own path here.
_BASE = "engines/0/"
#: Seconds that the engine has to say how it is.
_STATE_S = 2.0


class _Standalone(PageRoutes):
    """Handlers for one engine. settings.api_keys: what visitors of this page must know."""

    def __init__(self, engine: RemoteEngine, settings: ServerSettings):
        super().__init__(ApiKeys(settings))
        self.engine = engine
        self.relay = Relay(engine)

    def lines(self) -> list[PageLine]:
        """What an engine's key may see there, its engine decides."""
        routes = [
            Route("/engines", self.list_engines),
            Route(f"/{_BASE}feed", FeedEndpoint(self.relay), methods=["GET"]),
            Route(f"/{_BASE}{{path:path}}", self.pass_on, methods=PASSED_METHODS),
        ]
        return [*self.page_lines(), *(PageLine(route) for route in routes)]

    async def list_engines(self, request: Request) -> Response:
        """The engine, whether it answers or not."""
        return self.engine_list([await _ask(self.engine)], standalone=True)

    async def pass_on(self, request: Request) -> Response:
        """The engine's own answer."""
        return await pass_on(self.engine, request, request.path_params["path"])


async def _ask(engine: RemoteEngine) -> JsonDict:
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
    return {"name": name, "url": engine.url, "state": state, "base": _BASE}


def create_standalone(engine: RemoteEngine, settings: ServerSettings) -> Starlette:
    """The page of this engine: see `page_by_itself`."""
    page = _Standalone(engine, settings)
    return page_by_itself(page.lines(), page.sessions, settings, engine.close)
