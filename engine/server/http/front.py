"""The routes "/", "/docs" and "/openapi.json", of engines and fleets."""

from __future__ import annotations

import asyncio
from typing import Literal

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from jitney.engine.server.http.answers import Document, ResponseModel
from jitney.engine.server.http.jsonio import json_answer
from jitney.engine.server.http.routing import HttpRoute, Role
from jitney.engine.server.http.server_context import ServerContext

_HTML = "text/html"


class FrontAnswer(ResponseModel):
    """Paths relative to this one."""

    #: The page that shows what the server does; null where it is not served.
    page: str | None
    server: Literal["jitney"] = "jitney"
    api: Literal["v1"] = "v1"
    docs: Literal["docs"] = "docs"
    openapi: Literal["openapi.json"] = "openapi.json"


async def _front_door(server: ServerContext, request: Request) -> Response:
    """Send a browser to the page or the routes, relatively: the Host header is not repeated."""
    page = server.settings.page
    if _HTML in request.headers.get("accept", ""):
        return RedirectResponse(page or "docs", headers={"vary": "accept"})
    return json_answer(FrontAnswer(page), {"vary": "accept"})


async def _show_openapi(server: ServerContext, request: Request) -> Response:
    """The description of all routes, made once at start."""
    return Response(server.openapi, media_type="application/json")


async def _show_docs(server: ServerContext, request: Request) -> Response:
    """The routes as a page, without a key, which a browser could not send; it has no secrets."""
    # Loaded for the first reader.
    from jitney.engine.server.http.docs_page import CONTENT_POLICY, docs_page

    page = await asyncio.to_thread(docs_page, server.openapi)
    headers = {"content-security-policy": CONTENT_POLICY, "x-content-type-options": "nosniff"}
    return Response(page, headers=headers, media_type=_HTML)


FRONT_ROUTES = (
    HttpRoute(
        "GET /",
        _front_door,
        "where to go on: a browser to the page",
        role=Role.ANYBODY,
        answer=FrontAnswer,
    ),
    HttpRoute(
        "GET /openapi.json",
        _show_openapi,
        "these routes, as an OpenAPI document",
        answer=Document,
    ),
    HttpRoute(
        "GET /docs",
        _show_docs,
        "these routes, as a page",
        role=Role.ANYBODY,
        media_type=_HTML,
    ),
)
