"""What every dashboard has, whatever it watches: the page, its files, the sign-in."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from jitney.dashboard.assets import PageFiles
from jitney.dashboard.auth import PageLine
from jitney.dashboard.sessions import COOKIE, LIFETIME_S, Sessions
from jitney.engine.api.access import ApiKeys, address_of
from jitney.engine.api.errors import ErrorReply, HttpError
from jitney.engine.api.routing import Role
from jitney.engine.errors import JitneyError, RequestError
from jitney.engine.types import JsonDict

#: Most bytes of a body that is sent to a dashboard.
_BODY_LIMIT = 4096


class _SignIn(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a sign-in."""

    key: str


class PageRoutes:
    """Handlers of the routes that hold no data."""

    #: The file at "/".
    index = "index.html"

    def __init__(self, keys: ApiKeys):
        self.keys = keys
        self.sessions = Sessions(keys.needed)
        self.files = PageFiles()

    def page_lines(self) -> list[PageLine]:
        """The page itself turns into the sign-in form, and assets hold no data."""
        return [
            PageLine(Route("/", self.page), Role.ANYBODY),
            PageLine(Mount("/assets", self.files), Role.ANYBODY),
            PageLine(Route("/sign-in", self.sign_in, methods=["POST"]), Role.ANYBODY),
            PageLine(Route("/sign-out", self.sign_out, methods=["POST"]), Role.ANYBODY),
        ]

    def engine_list(
        self, engines: list[JsonDict], *, standalone: bool, fleet: str = ""
    ) -> Response:
        """What the page asks for first. fleet: where all engines are shown, if anywhere."""
        listing = {
            "standalone": standalone,
            "signed_in": self.sessions.needed,
            "engines": engines,
            "fleet": fleet,
        }
        return to_json(listing)

    async def page(self, request: Request) -> Response:
        """The page, or the sign-in form (401) to whom may not look."""
        return await self.page_file(request, self.index)

    async def page_file(self, request: Request, name: str) -> Response:
        """One of the pages, or the sign-in form (401)."""
        if self.sessions.of_request(request.scope).role >= Role.USER:
            return await self.files.get_response(name, request.scope)
        return self.files.sign_in_page()

    async def sign_in(self, request: Request) -> Response:
        """Trade an API key, {"key": ...}, for a session cookie that scripts cannot read and other
        sites cannot send.
        """
        body = await read_body(request)
        sign_in = read_json(body, _SignIn, 'a sign-in is JSON: {"key": "..."}', "key")
        identity = self.keys.identify(sign_in.key, address_of(request.scope))
        session = self.sessions.open(identity)
        response = Response(status_code=204)
        response.set_cookie(COOKIE, session, max_age=LIFETIME_S, **_cookie_of(request))
        return response

    async def sign_out(self, request: Request) -> Response:
        """End the session of this browser."""
        self.sessions.close(request.cookies.get(COOKIE))
        response = Response(status_code=204)
        response.delete_cookie(COOKIE, **_cookie_of(request))
        return response


class _CookieAttributes(TypedDict):
    """Which requests a browser sends the cookie with."""

    path: str
    httponly: bool
    samesite: Literal["strict"]
    secure: bool


def _cookie_of(request: Request) -> _CookieAttributes:
    """Those of this page's own, and over TLS alone if this one came so."""
    return {
        "path": request.scope.get("root_path") or "/",
        "httponly": True,
        "samesite": "strict",
        "secure": request.url.scheme == "https",
    }


async def read_body(request: Request) -> bytes:
    """A JSON body. Another type is refused: pages of other sites may send forms and plain text
    unasked, not JSON.
    """
    if _media_type(request) != "application/json":
        raise HttpError(415, "the Content-Type must be application/json")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _BODY_LIMIT:
            raise HttpError(413, f"the body may have at most {_BODY_LIMIT} bytes", close=True)
    return bytes(body)


def _media_type(request: Request) -> str:
    """Without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def read_json[T](body: bytes, kind: type[T], otherwise: str, param: str) -> T:
    """The body as a struct. Raises RequestError saying `otherwise`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError:
        raise RequestError(otherwise, param=param) from None


def to_json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _failed(request: Request, error: Exception) -> Response:
    """Errors in the endpoint's own form."""
    context = request.scope.get("jitney")
    return ErrorReply.of(error, context.request_id if context is not None else "none").response()


#: Which handler answers which error.
HANDLERS: dict[Any, Any] = {HTTPException: _failed, JitneyError: _failed}
