"""Routes of every dashboard: the page, its files, the sign-in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from jitney.dashboard.page_files import FirstData, PageFiles
from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict
from jitney.engine.server import (
    ApiKeys,
    HttpError,
    PageAccess,
    PageLine,
    Role,
    ServerSettings,
)

#: Content-Security-Policy: nothing from other origins and no inline script. Plotly needs inline
#: styles, and data: URLs for its icons.
_POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "style-src 'self' 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_REPORT = "/report"
#: A report is one file with its scripts in it, so it runs apart from the page: in a sandbox, with
#: no session.
_REPORT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: "
    "blob:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; sandbox allow-scripts "
    "allow-downloads"
)
_REPORT_HEADERS = _HEADERS | {"content-security-policy": _REPORT_POLICY}
#: Most bytes of a body that is sent to a dashboard.
_BODY_LIMIT = 4096


class _SignIn(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a sign-in."""

    key: str


class PageRoutes:
    """Base of all pages as ASGI applications: handlers of the routes without data."""

    #: The file at "/".
    index = "index.html"

    def __init__(self, settings: ServerSettings, keys: ApiKeys | None = None):
        """See `PageAccess`."""
        self._access = PageAccess(settings, keys, _headers_of)
        self.sessions = self._access.sessions
        self.files = PageFiles()

    def page_lines(self) -> list[PageLine]:
        """Routes that need no key: the page, which shows a sign-in form without one, and assets."""
        return [
            PageLine(Route("/", self.page), Role.ANYBODY),
            PageLine(Mount("/assets", self.files), Role.ANYBODY),
            PageLine(Route("/sign-in", self.sign_in, methods=["POST"]), Role.ANYBODY),
            PageLine(Route("/sign-out", self.sign_out, methods=["POST"]), Role.ANYBODY),
        ]

    def lines(self) -> list[PageLine]:
        return self.page_lines()

    async def close(self) -> None:
        """Release the page's resources."""

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """The lifespan of the page that is mounted."""
        yield

    def to_mount(self) -> Starlette:
        """The page, to be mounted at a path. It checks access itself (see `sign_in`), so the outer
        application must not require a bearer key, but must check hosts and headers. The caller
        must close the page.
        """
        return self._access.mounted(self.lines(), lambda app: self.at_work())

    def mounted(self, path: str) -> list[BaseRoute]:
        """The page at `path`, and a redirect from the path without a slash at its end. The redirect
        is relative, because an absolute one would repeat the client's Host header.
        """

        async def add_slash(request: Request) -> Response:
            return RedirectResponse(path.rpartition("/")[2] + "/")

        return [Route(path, add_slash), Mount(path, app=self.to_mount())]

    def by_itself(self) -> Starlette:
        """The page as an application of its own, which closes the page at its end."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            yield
            await self.close()

        return self._access.by_itself(self.lines(), lifespan)

    def engine_list(
        self, engines: list[JsonDict], *, standalone: bool, fleet: str = ""
    ) -> JsonDict:
        """The engines that a page can show. fleet: URL of the page of all, if there is one."""
        return {
            "standalone": standalone,
            "signed_in": self.sessions.needed,
            "engines": engines,
            "fleet": fleet,
        }

    async def page(self, request: Request) -> Response:
        """The page, or the sign-in form (401)."""
        return await self.page_file(request, self.index)

    async def page_file(
        self, request: Request, name: str, first: FirstData | None = None
    ) -> Response:
        """One of the pages, or the sign-in form (401). first: see `PageFiles.page`."""
        if self.sessions.of_request(request.scope).role >= Role.USER:
            return self.files.page(name, request.scope, first)
        return self.files.sign_in_page()

    async def sign_in(self, request: Request) -> Response:
        """Trade an API key, {"key": ...}, for a session cookie that scripts cannot read and other
        sites cannot send.
        """
        body = await read_body(request)
        sign_in = read_json(body, _SignIn, 'a sign-in is JSON: {"key": "..."}', "key")
        response = Response(status_code=204)
        self.sessions.begin(sign_in.key, request, response)
        return response

    async def sign_out(self, request: Request) -> Response:
        response = Response(status_code=204)
        self.sessions.end(request, response)
        return response


def _headers_of(path: str) -> Mapping[str, str]:
    """The security headers of the answer to a path."""
    return _REPORT_HEADERS if path.endswith(_REPORT) else _HEADERS


async def read_body(request: Request) -> bytes:
    """A JSON body. Other types are refused, since pages of other sites can send forms and plain
    text without a CORS preflight.
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
