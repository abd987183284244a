"""Proxies answers of remote engines to the page, after a check of what they are."""

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

#: What may be asked of an engine, and how.
_METHODS = ["GET", "POST", "DELETE"]
#: Methods of what is asked of an engine, by the first part of the path.
_PASSED: dict[str, set[str]] = {}
for _route in ENGINE_ROUTES:
    _PASSED.setdefault(_route.path.split("/")[1], set()).update(_route.methods)
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


def passed_route(path: str, engine_of: Callable[[Request], RemoteEngine]) -> Route:
    """The route below `path` whose answers are an engine's own; HttpError 404 for what no engine
    answers, 502 without an answer. engine_of: which one a request is for; may raise HttpError.
    """

    async def answer(request: Request) -> Response:
        engine, passed = engine_of(request), request.path_params["path"]
        parts = passed.split("/")
        if request.method not in _PASSED.get(parts[0], ()) or _NOT_PARTS & set(parts):
            raise nothing_here()
        body = await read_body(request) if request.method == "POST" else b""
        return await _relayed(engine, request.method, quote(passed), request.url.query, body)

    return Route(f"{path}{{path:path}}", answer, methods=_METHODS)


def nothing_here() -> HttpError:
    """For a path that leads nowhere."""
    return HttpError(404, "there is nothing here", code="not_found")


async def _relayed(
    engine: RemoteEngine, method: str, path: str, query: str, body: bytes
) -> StreamingResponse:
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
