"""Proxies answers of remote engines to the page, after checking their types."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from urllib.parse import quote

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from jitney.dashboard.engine_routes import ENGINE_ROUTES
from jitney.dashboard.remote import RemoteEngine, Unreachable
from jitney.dashboard.routes import read_body
from jitney.engine.server import HttpError

#: Paths that are proxied, and their methods.
_METHODS = ["GET", "POST", "DELETE"]
#: First part of a proxied path -> its methods.
_PASSED: dict[str, set[str]] = {}
for _route in ENGINE_ROUTES:
    _PASSED.setdefault(_route.path.split("/")[1], set()).update(_route.methods)
#: Parts of a path that would lead to another one.
_NOT_PARTS = {"", ".", ".."}
#: First part of a path -> media type and name of a file; all other answers are JSON. Nothing else
#: of an engine is served under this page's origin, where it could act for the viewer.
_DATA = "application/json"
_FILES = {
    "trace": (_DATA, "jitney-trace.json"),
    "report": ("text/html", "jitney-report.html"),
}


def proxy_route(path: str, engine_of: Callable[[Request], RemoteEngine]) -> Route:
    """The route below `path` that proxies an engine. HttpError 404 for paths that are not proxied,
    502 without an answer. engine_of: the engine of a request; may raise HttpError.
    """

    async def answer(request: Request) -> Response:
        engine, passed = engine_of(request), request.path_params["path"]
        parts = passed.split("/")
        if request.method not in _PASSED.get(parts[0], ()) or _NOT_PARTS & set(parts):
            raise not_found()
        body = await read_body(request) if request.method == "POST" else b""
        return await _relayed(engine, request.method, quote(passed), request.url.query, body)

    return Route(f"{path}{{path:path}}", answer, methods=_METHODS)


def not_found() -> HttpError:
    return HttpError(404, "there is nothing here", code="not_found")


async def _relayed(
    engine: RemoteEngine, method: str, path: str, query: str, body: bytes
) -> StreamingResponse:
    """Stream the answer of an engine. Raises HttpError 502 if there is none."""
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
    """The headers of a proxied answer. Raises ValueError if the engine's answer has an unexpected
    type or status.
    """
    is_error = answer.status_code >= 400
    expected, name = (_DATA, "") if is_error else _FILES.get(path, (_DATA, ""))
    media_type = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != expected or not (is_error or 200 <= answer.status_code < 300):
        raise ValueError(media_type)
    headers = {"content-type": f"{expected}; charset=utf-8"}
    if name:
        headers["content-disposition"] = f'attachment; filename="{name}"'
    retry_after = answer.headers.get("retry-after", "")
    if retry_after.isascii() and retry_after.isdigit():
        headers["retry-after"] = retry_after
    return headers
