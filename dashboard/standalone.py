"""A dashboard of one remote engine: serves the page, and proxies the data."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jitney.dashboard.feed_endpoint import FeedEndpoint
from jitney.dashboard.proxy import proxy_route
from jitney.dashboard.relay import Relay
from jitney.dashboard.remote import RemoteEngine, Unreachable
from jitney.dashboard.routes import PageRoutes
from jitney.engine.common.requests import JsonDict
from jitney.engine.server import PageLine, ServerSettings, json_answer

#: The engine's own path here.
_BASE = "engines/0/"
#: Seconds to wait for the engine's state.
_STATE_S = 2.0


class Standalone(PageRoutes):
    """The page of one engine. settings.api_keys: what visitors of this page must know."""

    def __init__(self, engine: RemoteEngine, settings: ServerSettings):
        super().__init__(settings)
        self.engine = engine
        self.relay = Relay(engine)

    def lines(self) -> list[PageLine]:
        """The routes; the engine itself decides what a key may see."""
        routes = [
            Route("/engines", self.list_engines),
            Route(f"/{_BASE}feed", FeedEndpoint(self.relay), methods=["GET"]),
            proxy_route(f"/{_BASE}", lambda request: self.engine),
        ]
        return [*self.page_lines(), *(PageLine(route) for route in routes)]

    async def close(self) -> None:
        await self.engine.close()

    async def list_engines(self, request: Request) -> Response:
        """The engine, whether it answers or not."""
        return json_answer(self.engine_list([await _ask(self.engine)], standalone=True))


async def _ask(engine: RemoteEngine) -> JsonDict:
    """An engine's entry of the list: name (of its model), url, base (its own path here), state."""
    name, state = "", "unknown"
    try:
        async with asyncio.timeout(_STATE_S), engine.answer("GET", "engines") as answer:
            (info,) = msgspec.json.decode(await answer.aread())["engines"]
            name, state = str(info["name"]), str(info["state"])
    except (Unreachable, TimeoutError):
        state = "unreachable"
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
        pass  # another kind of server answers there
    return {"name": name, "url": engine.url, "state": state, "base": _BASE}
