"""What every dashboard has, whatever it watches: the page, its files, the sign-in."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from jitney.dashboard.assets import PageFiles
from jitney.dashboard.sessions import COOKIE, LIFETIME_S, Attempts, Sessions
from jitney.engine.api.errors import HttpError, error_response
from jitney.engine.errors import JitneyError, RequestError

#: Most bytes of a body that is sent to a dashboard.
_BODY_LIMIT = 4096


class _SignIn(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a sign-in."""

    key: str


class PageRoutes:
    """Handlers of the routes that hold no data.

    keys: digests of the accepted API keys; none: everybody may look.
    """

    def __init__(self, keys: tuple[str, ...]):
        self.sessions = Sessions(keys)
        self.attempts = Attempts()
        self.files = PageFiles()

    def page_routes(self) -> list[BaseRoute]:
        return [
            Route("/", self.page),
            Mount("/assets", self.files),
            Route("/sign-in", self.sign_in, methods=["POST"]),
        ]

    async def page(self, request: Request) -> Response:
        """The page, or the sign-in form (401) to whom may not look."""
        if self.sessions.admits(request.cookies.get(COOKIE)):
            return await self.files.get_response("index.html", request.scope)
        return self.files.sign_in_page()

    async def sign_in(self, request: Request) -> Response:
        """Trade an API key, {"key": ...}, for a session cookie that scripts cannot read and other
        sites cannot send.
        """
        address = request.client.host if request.client else ""
        self._refuse_guessing(address)
        body = await read_body(request)
        sign_in = read_json(body, _SignIn, 'a sign-in is JSON: {"key": "..."}', "key")
        session = self.sessions.open(sign_in.key)
        if session is None:
            self.attempts.failed(address)
            raise HttpError(401, "this is not a valid API key", code="invalid_api_key")
        response = Response(status_code=204)
        response.set_cookie(
            COOKIE,
            session,
            max_age=LIFETIME_S,
            path=request.scope.get("root_path") or "/",
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response

    def _refuse_guessing(self, address: str) -> None:
        """Raises HttpError 429 while this address must wait."""
        wait = self.attempts.wait(address)
        if wait > 0:
            raise HttpError(
                429,
                f"too many wrong keys; try again in {wait:.0f} s",
                code="too_many_attempts",
                headers={"retry-after": str(round(wait) or 1)},
            )


async def read_body(request: Request) -> bytes:
    """A JSON body. Another type is refused: pages of other sites may send forms and plain text
    unasked, not JSON.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0]
    if content_type.strip().lower() != "application/json":
        raise HttpError(415, "the Content-Type must be application/json")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _BODY_LIMIT:
            raise HttpError(413, f"the body may have at most {_BODY_LIMIT} bytes", close=True)
    return bytes(body)


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
    return error_response(error, context.request_id if context is not None else "none")


#: Which handler answers which error.
HANDLERS: dict[Any, Any] = {HTTPException: _failed, JitneyError: _failed}
