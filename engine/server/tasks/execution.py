"""Runs requests of batches and jobs through the HTTP handlers, with the rights of their key."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope

from jitney.engine.common.errors import RequestError, retry_after_s
from jitney.engine.common.requests import JsonDict
from jitney.engine.server.http.access import Identity
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.errors import ErrorForm, ErrorReply, HttpError, echo
from jitney.engine.server.http.routing import HttpRoute, Role, RouteTable
from jitney.engine.server.http.server_context import ServerContext
from jitney.engine.server.tasks.lines import LineRequest
from jitney.engine.server.tasks.records import LineOutcome

#: Codes of temporary refusals (queue full, engine not ready), after which the request is retried.
_RETRIED = (429, 503)
_SHORTEST_WAIT_S, _USUAL_WAIT_S, _LONGEST_WAIT_S = 0.2, 1.0, 30.0
_MOST_DOUBLINGS = 10

#: Reads a request. An exception becomes the answer.
type Read = Callable[[], Awaitable[LineRequest]]
#: Makes the context of one attempt.
type Slot = Callable[[], AbstractAsyncContextManager[None]]


@dataclass(slots=True)
class Reply:
    """The response to one request."""

    request_id: str
    #: Most bytes of its body.
    most_bytes: int
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytearray = field(default_factory=bytearray)

    @classmethod
    def of_error(cls, error: Exception, request_id: str, path: str) -> Reply:
        """The HTTP response of an error."""
        response: Response = ErrorReply.of(error, request_id).response(ErrorForm.of(path))
        body = bytearray(response.body)
        return cls(request_id, len(body), response.status_code, _texts(response.raw_headers), body)

    async def receive(self, message: Message) -> None:
        """Take a handler's message. Raises HttpError for a body that is too long."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = _texts(message["headers"])
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")
            if len(self.body) > self.most_bytes:
                raise HttpError(
                    400,
                    f"the answer has more than {self.most_bytes} bytes (answer_limit); ask for "
                    "fewer prompts, choices or log-probabilities at a time",
                    code="answer_too_large",
                )

    @property
    def wait_s(self) -> float:
        """Seconds until the next attempt."""
        wait_s = retry_after_s(self.headers, _USUAL_WAIT_S)
        return min(_LONGEST_WAIT_S, max(_SHORTEST_WAIT_S, wait_s))

    @property
    def outcome(self) -> LineOutcome:
        return LineOutcome.COMPLETED if self.status == 200 else LineOutcome.FAILED

    def text(self) -> bytes:
        """JSON of the response, as stored with a job."""
        return orjson.dumps(self._shown())

    def line(self, custom_id: str) -> bytes:
        """Its line of the output file or of the error file."""
        shown = {"id": f"batch_req_{self.request_id}", "custom_id": custom_id}
        return orjson.dumps(shown | {"response": self._shown(), "error": None})

    def _shown(self) -> JsonDict:
        return {
            "status_code": self.status,
            "request_id": self.request_id,
            "body": orjson.Fragment(bytes(self.body)),
        }


class LineExecutor:
    """Answers requests. background: requests of clients take precedence."""

    def __init__(self, context: ServerContext, table: RouteTable, *, background: bool):
        self._context = context
        self._table = table
        self._background = background

    async def answer(
        self, read: Read, owner: str, endpoint: str = "", slot: Slot = nullcontext
    ) -> Reply:
        """The answer to a request, retried after temporary refusals. read: called for each attempt,
        so that a waiting request uses no memory. owner: digest of its key. endpoint: the path for
        the form of errors before it is read. slot: entered for each attempt.
        """
        request_id = uuid.uuid4().hex
        tries = 0
        while True:
            async with slot():
                reply = await self._attempt(read, owner, request_id, endpoint)
            if reply.status not in _RETRIED:
                return reply
            await asyncio.sleep(self.pause_s(reply.wait_s, tries))
            tries += 1

    def pause_s(self, wait_s: float, tries: int) -> float:
        """Seconds until the next attempt; pauses of background requests double, as there are
        many.
        """
        if not self._background:
            return wait_s
        return min(_LONGEST_WAIT_S, wait_s * 2 ** min(tries, _MOST_DOUBLINGS))

    async def _attempt(self, read: Read, owner: str, request_id: str, path: str) -> Reply:
        """One attempt; errors become replies."""
        reply = Reply(request_id, self._context.settings.server.answer_limit)
        try:
            request = await read()
            path = request.url
            route = generating_route(self._table, path)
            _check_size(request, route, self._context)
            with self._context.opening(owner):
                await self._handle(request, route, owner, reply)
        except Exception as error:
            return Reply.of_error(error, request_id, path)
        return reply

    async def _handle(
        self, request: LineRequest, route: HttpRoute, owner: str, reply: Reply
    ) -> None:
        context = Context(reply.request_id, route, tenant=owner, background=self._background)
        scope = _scope_of(request, context)
        body = request.unstreamed_body if route.streams_unasked else request.body
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            message = next(messages, None)
            if message is not None:
                return message
            await asyncio.Event().wait()  # an internal client never disconnects
            raise AssertionError

        answer = await route.handler(self._context, Request(scope, receive))
        await answer(scope, receive, reply.receive)


def generating_route(table: RouteTable, path: str, param: str = "url") -> HttpRoute:
    """The generating route of a path. Raises RequestError, blaming `param`, for other paths."""
    route = table.find(path, "POST")
    if route is None or not route.generates or route.method != "POST":
        raise RequestError(f"{echo(path)} is not a route that batches may name", param=param)
    return route


def _check_size(request: LineRequest, route: HttpRoute, context: ServerContext) -> None:
    """Raise HttpError for a body beyond the limit of HTTP requests."""
    limit = route.body_limit or context.body_limit
    if limit is not None and len(request.body) > limit:
        raise HttpError(413, f"the body may have at most {limit} bytes")


def _texts(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}


def _scope_of(request: LineRequest, context: Context) -> Scope:
    return {
        "type": "http",
        "asgi": {"spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": request.url,
        "raw_path": request.url.encode(),
        "root_path": "",
        "query_string": b"",
        "path_params": {},
        "headers": [(b"content-type", b"application/json")],
        "jitney": context,
        "jitney.identity": Identity(Role.USER, context.tenant),
    }
