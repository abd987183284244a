"""The page as an ASGI application: HTML, assets, live feed, seats and step records."""

from __future__ import annotations

import time
from typing import Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from jitney.dashboard import frames
from jitney.dashboard.assets import Assets
from jitney.dashboard.feed import Feed
from jitney.dashboard.guard import Guard, LiveFeed
from jitney.dashboard.sessions import COOKIE, LIFETIME_S, Sessions
from jitney.engine.api.errors import HttpError, error_response
from jitney.engine.client import EngineClient
from jitney.engine.errors import JitneyError, RequestError

#: Most bytes of a sign-in.
SIGN_IN_LIMIT = 4096


class Settings(Protocol):
    """What the page must know of the server's settings. api_keys: digests (`jitney.engine.api.settings.digest_key`)."""

    @property
    def api_keys(self) -> tuple[str, ...]: ...


class SignIn(msgspec.Struct, forbid_unknown_fields=True):
    key: str


class Dashboard:
    """The routes' handlers and what they share."""

    def __init__(self, client: EngineClient, settings: Settings, hz: float):
        self.client = client
        self.sessions = Sessions(settings.api_keys)
        self.feed = Feed(client, hz=hz, keys=self.sessions.needed)
        self.assets = Assets()

    def routes(self) -> list[BaseRoute]:
        return [Route("/", self.page), Route("/assets/{name}", self.asset), Route("/slots", self.slots),
                Route("/frames", self.frames), Route("/feed", LiveFeed(self.feed), methods=["GET"]),
                Route("/sign-in", self.sign_in, methods=["POST"])]

    async def page(self, request: Request) -> Response:
        """The page, or the sign-in form (401) to whom may not look."""
        if self.sessions.admits(request.cookies.get(COOKIE)):
            return await self.assets.respond("index.html", request)
        return await self.assets.respond("sign-in.html", request, status=401)

    async def asset(self, request: Request) -> Response:
        return await self.assets.respond(request.path_params["name"], request)

    async def slots(self, request: Request) -> Response:
        """Seats and pages as they are now, in the key frame's form. RequestError while there is no engine."""
        slots = await self.client.slots()
        return _json(msgspec.json.encode({"t": time.monotonic(), "seats": frames.seats(slots.slots),
                                          "pages": frames.pages(slots.page_states) if slots.page_states else None}))

    async def frames(self, request: Request) -> Response:
        """Step records after step `from` (default: all that are kept), at most `frames.MAX_RECORDS`."""
        after = request.query_params.get("from", "-1")
        if not after.removeprefix("-").isascii() or not after.removeprefix("-").isdigit() or len(after) > 18:
            raise RequestError("from must be a step number", param="from")
        return _json(frames.record_columns(self.client.records(int(after)), time.monotonic()))

    async def sign_in(self, request: Request) -> Response:
        """Trade an API key, {"key": ...}, for a session cookie that scripts cannot read and other sites cannot send."""
        session = self.sessions.open((await _sign_in_body(request)).key)
        if session is None:
            raise HttpError(401, "this is not a valid API key", code="invalid_api_key")
        response = Response(status_code=204)
        response.set_cookie(COOKIE, session, max_age=LIFETIME_S, path=request.scope.get("root_path") or "/",
                            httponly=True, samesite="strict", secure=request.url.scheme == "https")
        return response


def create_dashboard(client: EngineClient, settings: Settings, *, hz: float = 5.0) -> Starlette:
    """The page of one engine, to be mounted under a path of its own.

    It checks for itself who may look (see `sign_in`), so what is in front must not ask for a bearer key. hz: frames a
    second.
    """
    dashboard = Dashboard(client, settings, hz)
    app = Starlette(routes=dashboard.routes(), middleware=[Middleware(Guard, sessions=dashboard.sessions)],
                    exception_handlers={HTTPException: _failed, JitneyError: _failed})
    app.router.redirect_slashes = False
    app.state.feed = dashboard.feed
    return app


def dashboard_routes(client: EngineClient, settings: Settings, path: str = "/dashboard") -> list[BaseRoute]:
    """The page mounted at `path`, and a redirect for those who leave out the slash at its end.

    The redirect is relative, because an absolute one would repeat the client's Host header.
    """

    async def add_slash(request: Request) -> Response:
        return RedirectResponse(path.rpartition("/")[2] + "/")

    return [Route(path, add_slash), Mount(path, app=create_dashboard(client, settings))]


async def _sign_in_body(request: Request) -> SignIn:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > SIGN_IN_LIMIT:
            raise HttpError(413, f"a sign-in may have at most {SIGN_IN_LIMIT} bytes", close=True)
    try:
        return msgspec.json.decode(bytes(body), type=SignIn)
    except msgspec.MsgspecError:
        raise RequestError('a sign-in is JSON: {"key": "..."}', param="key") from None


async def _failed(request: Request, error: Exception) -> Response:
    """Errors in the endpoint's own form."""
    context = request.scope.get("jitney")
    return error_response(error, context.request_id if context is not None else "none")


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
