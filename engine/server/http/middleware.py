"""Pure ASGI middleware, outermost first: `ErrorMiddleware` (ids, log, errors), `HeaderLimits`,
`_SiteGuard` (in `edge`), `AccessControl` (in `access`), `_ClientShares` (in `edge`),
`BackgroundRequests` (in `background`), `BodyLimit`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jitney.engine.server.http.access import values_of
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.errors import ErrorForm, ErrorReply, HttpError, echo
from jitney.engine.server.http.routing import HttpRoute, RouteTable, route_path
from jitney.engine.server.http.server_context import ServerContext
from jitney.engine.server.http.settings import ServerSettings

if TYPE_CHECKING:
    pass

_access = logging.getLogger("jitney.access")
_log = logging.getLogger("jitney.api")

_HOST = re.compile(rb"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?\Z")
_PORT = re.compile(rb":[0-9]+\Z")
_JSON = re.compile(r'application/json\s*(?:;\s*charset="?utf-8"?\s*)?\Z', re.IGNORECASE)
_FORM = re.compile(r"multipart/form-data\s*;", re.IGNORECASE)
#: Bytes of an upload in addition to the file, and its lowest rate in bytes per second.
_FORM_BYTES, _LEAST_RATE = 1 << 16, 16_384
_MAX_HEADERS = 256
_MAX_HEADER_BYTES = 1 << 16
_TOO_LARGE = 413
#: Status logged for a client that left before its answer.
_LEFT = 499
#: Methods that the log names; others are arbitrary text of the client.
_METHODS = frozenset(
    {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"}
)
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


@dataclass(frozen=True, slots=True)
class ErrorMiddleware:
    """Gives each request its id and context, answers every error that comes up, logs one line."""

    app: ASGIApp
    service: ServerContext
    table: RouteTable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope)
        route = self.table.find(path, scope["method"])
        versions = values_of(scope, b"anthropic-version")
        form = ErrorForm.of(path, names_version=bool(versions))
        # The client's id if it is safe to repeat; only for headers and logs.
        request_id = _safe_header(scope, b"x-request-id") or uuid.uuid4().hex
        context = scope["jitney"] = Context(request_id, route, form)
        context.session_id = _safe_header(scope, b"x-session-id")

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                message["headers"] = [*message["headers"], *_context_headers(context)]
            await send(message)

        tracing = self.service.tracing
        if tracing is not None and route is not None and route.generates:
            tracing.begin(scope)
        reply = None
        try:
            await self.app(scope, receive, send_marked)
        except Exception as error:
            if context.status:
                _log.error(
                    "request %s failed after its answer began", context.request_id, exc_info=error
                )
                raise
            reply = ErrorReply.of(error, context.request_id)
            await reply.response(context.error_form)(scope, receive, send_marked)
        finally:
            self.service.answered(context, reply)
            self._record(scope, context)

    def _record(self, scope: Scope, context: Context) -> None:
        """Count the request and write its line in the access log."""
        template, level = _template(scope, context)
        status = _LEFT if context.left or not context.status else context.status
        self.service.metrics.requests.labels(template, f"{status // 100}xx").inc()
        if self.service.tracing is not None and context.span is not None:
            self.service.tracing.end(context, status)
        _access.log(
            level,
            "%s %s %d %.1fms id=%s prompt=%d completion=%d%s",
            scope["method"] if scope["method"] in _METHODS else "other",
            template,
            status,
            context.elapsed_ms,
            context.request_id,
            context.prompt_tokens,
            context.completion_tokens,
            f" session={context.session_id}" if context.session_id else "",
        )


def _template(scope: Scope, context: Context) -> tuple[str, int]:
    """The route's name in metrics and log, and the level of its log line."""
    if context.route is not None:
        return context.route.path, context.route.log_level
    # Routes that are not in the table, such as the page's, are known once they have run.
    return getattr(scope.get("route"), "path", "none"), logging.INFO


def _safe_header(scope: Scope, name: bytes) -> str:
    """The value of a header that was sent once and is safe to repeat in headers and logs; else
    ''.
    """
    values = values_of(scope, name)
    text = values[0].decode("latin-1") if len(values) == 1 else ""
    return text if Context.SAFE_ID.match(text) else ""


def _context_headers(context: Context) -> list[tuple[bytes, bytes]]:
    headers = [
        (b"x-request-id", context.request_id.encode()),
        (b"openai-processing-ms", str(round(context.elapsed_ms)).encode()),
    ]
    if context.error_form is ErrorForm.ANTHROPIC:
        headers.append((b"request-id", context.request_id.encode()))
    if context.session_id:
        headers.append((b"x-session-id", context.session_id.encode()))
    return headers + context.notes.headers()


@dataclass(frozen=True, slots=True)
class HeaderLimits:
    """Bounds the size of headers, and requires exactly one valid Host of this server: a page of
    another site could point its own domain at this server. The parser bounds incomplete heads only.
    """

    #: Key in a scope's state: the request's connection exceeds the limit of connections.
    CROWDED: ClassVar[str] = "jitney_crowded"

    app: ASGIApp
    settings: ServerSettings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _check_room(scope)
            _check_size(scope)
            self._check_host(values_of(scope, b"host"))
        await self.app(scope, receive, send)

    def _check_host(self, hosts: list[bytes]) -> None:
        if len(hosts) != 1 or not _HOST.match(hosts[0]):
            raise HttpError(
                400, "the Host header must be given once, as name or name:port", close=True
            )
        name = _PORT.sub(b"", hosts[0]).decode().lower()
        allowed = self.settings.allowed_hosts
        if allowed is not None and name not in allowed:
            raise HttpError(
                421,
                f"this server does not answer to the host {echo(name)}; if it should, start it "
                "with that name in allowed_hosts (--allowed-hosts)",
                code="host_not_allowed",
                close=True,
            )


def _check_room(scope: Scope) -> None:
    """Raises HttpError where too many connections are open, but for probes."""
    context: Context | None = scope.get("jitney")  # a page of engines elsewhere has none
    route = None if context is None else context.route
    is_probe = route is not None and route.is_probe
    if scope.get("state", {}).get(HeaderLimits.CROWDED) and not is_probe:
        raise HttpError(
            503,
            "too many connections are open (max_connections)",
            code="too_many_connections",
            headers={"retry-after": "1"},
            close=True,
        )


def _check_size(scope: Scope) -> None:
    headers = scope["headers"]
    size = sum(len(name) + len(value) for name, value in headers)
    if len(headers) > _MAX_HEADERS or size > _MAX_HEADER_BYTES:
        raise HttpError(431, "the request's headers are too large", close=True)


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """Reads a body whole, once, checking type, size and time; the application gets one message."""

    app: ASGIApp
    settings: ServerSettings
    service: ServerContext

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _check_framing(scope)
            route = Context.of(scope).route
            if route is not None and route.uploads:
                _check_type(scope, _FORM, "multipart/form-data")
                _check_encoding(scope)
                receive = self._metered(scope, receive)
            elif scope["method"] in _WITH_BODY:
                if _wants_json(scope, route):
                    if route is None or not route.takes_any_type:
                        _check_type(scope, _JSON, "application/json, in UTF-8")
                    _check_encoding(scope)
                receive = await self._read(scope, receive)
        await self.app(scope, receive, send)

    def _metered(self, scope: Scope, receive: Receive) -> Receive:
        """A `receive` that enforces the size limit and disconnects clients below `_LEAST_RATE`."""
        limit = self.settings.server.file_limit + _FORM_BYTES
        _check_length(scope, limit)
        started = asyncio.get_running_loop().time()
        received = 0
        more = True

        async def metered() -> Message:
            nonlocal received, more
            if not more:
                return await receive()
            patience = self.settings.server.read_timeout_s + received / _LEAST_RATE
            try:
                async with asyncio.timeout_at(started + patience):
                    message = await receive()
            except TimeoutError:
                raise _too_slow(patience) from None
            received += len(message.get("body", b""))
            more = message.get("more_body", False)
            if received > limit:
                raise _too_large(limit)
            return message

        return metered

    async def _read(self, scope: Scope, receive: Receive) -> Receive:
        route = Context.of(scope).route
        limit = (route.body_limit if route else 0) or self.service.body_limit
        first: Message | None
        if limit is None:
            first = await self._first_before_ready(scope, receive)
        else:
            _check_length(scope, limit)
            first = await self._first(receive, limit)

        async def replay() -> Message:
            nonlocal first
            if first is None:
                return await receive()
            message, first = first, None
            return message

        return replay

    async def _first_before_ready(self, scope: Scope, receive: Receive) -> Message:
        """Read the body before the limit is known; a large one gets the error of an unready
        server.
        """
        try:
            _check_length(scope, self.settings.LEAST_BODY)
            return await self._first(receive, self.settings.LEAST_BODY)
        except HttpError as error:
            reason = self.service.unready() if error.status == _TOO_LARGE else None
            raise reason or error from None

    async def _first(self, receive: Receive, limit: int) -> Message:
        """The whole body as one message, or the disconnect message."""
        body = bytearray()
        more = True
        try:
            async with asyncio.timeout(self.settings.server.read_timeout_s):
                while more and len(body) <= limit:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return message
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
        except TimeoutError:
            raise _too_slow(self.settings.server.read_timeout_s) from None
        if len(body) > limit:
            raise _too_large(limit)
        return {"type": "http.request", "body": bytes(body), "more_body": False}


def _check_length(scope: Scope, limit: int) -> None:
    length = values_of(scope, b"content-length")
    if length and int(length[0]) > limit:
        raise _too_large(limit)


def _too_slow(seconds: float) -> HttpError:
    return HttpError(408, f"the body did not arrive within {seconds:g} s", close=True)


def _too_large(limit: int) -> HttpError:
    """The error for a large body; the protocol discards the rest of it."""
    return HttpError(_TOO_LARGE, f"the body may have at most {limit} bytes", close=True)


def _check_framing(scope: Scope) -> None:
    if values_of(scope, b"content-length") and values_of(scope, b"transfer-encoding"):
        raise HttpError(400, "Content-Length and Transfer-Encoding exclude each other", close=True)


def _wants_json(scope: Scope, route: HttpRoute | None) -> bool:
    """Whether a JSON body is required: also by the page's routes, which are not in the table."""
    if route is None:
        return not route_path(scope).startswith("/v1/")
    return route.body is not None or bool(values_of(scope, b"content-type"))


def _check_type(scope: Scope, accepted: re.Pattern[str], name: str) -> None:
    types = values_of(scope, b"content-type")
    if len(types) != 1 or not accepted.match(types[0].decode("latin-1")):
        raise HttpError(415, f"the Content-Type must be {name}", close=True)


def _check_encoding(scope: Scope) -> None:
    for encoding in values_of(scope, b"content-encoding"):
        if encoding.strip().lower() != b"identity":
            raise HttpError(415, "compressed bodies are not read here", close=True)
