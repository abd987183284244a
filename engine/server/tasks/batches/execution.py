"""One line of a batch, answered by the route that it names: the handler that HTTP calls too, with a
context of its owner's.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict
from jitney.engine.server.http.access import Identity
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.errors import ErrorForm, ErrorReply, HttpError, echo, retry_after_s
from jitney.engine.server.http.routing import HttpRoute, Role, RouteTable
from jitney.engine.server.tasks.batches.host import RequestHost
from jitney.engine.server.tasks.batches.lines import LineRequest
from jitney.engine.server.tasks.batches.records import LineOutcome

#: Refusals of the moment: too much waits, or the engine is not there. The line tries again.
_NOT_NOW = (429, 503)
_SHORTEST_WAIT_S, _USUAL_WAIT_S, _LONGEST_WAIT_S = 0.2, 1.0, 30.0
_MOST_DOUBLINGS = 10


#: Lasts as long as one try of a request may.
type Turn = Callable[[], AbstractAsyncContextManager[None]]


@dataclass(slots=True)
class Reply:
    """What a handler sends."""

    #: Bytes that its body may have.
    most_bytes: int
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytearray = field(default_factory=bytearray)

    async def take(self, message: Message) -> None:
        """Raises HttpError for a body that is too long."""
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

    @classmethod
    def of_error(cls, error: Exception, request_id: str, path: str) -> Reply:
        """An error as HTTP answers it."""
        response: Response = ErrorReply.of(error, request_id).response(ErrorForm.of(path))
        body = bytearray(response.body)
        return cls(len(body), response.status_code, _texts(response.raw_headers), body)

    @property
    def wait_s(self) -> float:
        """Seconds after which to try again."""
        wait_s = retry_after_s(self.headers, _USUAL_WAIT_S)
        return min(_LONGEST_WAIT_S, max(_SHORTEST_WAIT_S, wait_s))

    def shown(self, request_id: str) -> JsonDict:
        """As a part of a larger JSON text."""
        return {
            "status_code": self.status,
            "request_id": request_id,
            "body": orjson.Fragment(bytes(self.body)),
        }


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """What a line brought: a line of the output file if its answer is a 200, else one of the error
    file.
    """

    outcome: LineOutcome
    text: bytes

    @classmethod
    def of(cls, custom_id: str, request_id: str, reply: Reply) -> LineAnswer:
        """Blocks."""
        good = reply.status == 200
        text = orjson.dumps(
            {
                "id": f"batch_req_{request_id}",
                "custom_id": custom_id,
                "response": reply.shown(request_id),
                "error": None,
            }
        )
        return cls(LineOutcome.COMPLETED if good else LineOutcome.FAILED, text)


class LineExecutor:
    """Answers lines. background: nobody waits for them, so that they give way to other requests."""

    def __init__(self, host: RequestHost, table: RouteTable, *, background: bool):
        self._host = host
        self._table = table
        self._background = background

    async def answer(
        self, raw: bytes, custom_id: str, endpoint: str, owner: str, turn: Turn = nullcontext
    ) -> LineAnswer:
        """Answer a line, however long that takes. endpoint: see `LineRequest.read`; owner: digest
        of the key that the batch came with; turn: see `answered`.
        """
        request_id = uuid.uuid4().hex
        try:
            request = await asyncio.to_thread(LineRequest.read, raw, endpoint)
        except RequestError as error:
            reply = Reply.of_error(error, request_id, endpoint)
        else:
            reply = await self.answered(request, request_id, owner, turn)
        return await asyncio.to_thread(LineAnswer.of, custom_id, request_id, reply)

    def route(self, path: str, *, param: str = "url") -> HttpRoute:
        """The line of the table that a path names. Raises RequestError, blaming the field `param`,
        unless it is one that generates.
        """
        route = self._table.find(path, "POST")
        if route is None or not route.generates or "POST" not in route.methods:
            raise RequestError(f"{echo(path)} is not a route that batches may name", param=param)
        return route

    async def answered(
        self, request: LineRequest, request_id: str, owner: str, turn: Turn = nullcontext
    ) -> Reply:
        """What the route that a request names answers, however long that takes: a refusal of the
        moment is waited for. turn: is entered for each try, and left while it waits.
        """
        try:
            route = self.route(request.url)
        except RequestError as error:
            return Reply.of_error(error, request_id, request.url)
        tries = 0
        while True:
            async with turn():
                reply = await self._once(request, route, request_id, owner)
            if reply.status not in _NOT_NOW:
                return reply
            await asyncio.sleep(self.pause_s(reply.wait_s, tries))
            tries += 1

    def pause_s(self, wait_s: float, tries: int) -> float:
        """Seconds until the next try after a refusal that says so many, which `tries` others went
        before. In the background each pause is twice the one before: nobody has promised anything,
        and thousands of lines that ask every second would be work of its own.
        """
        if not self._background:
            return wait_s
        return min(_LONGEST_WAIT_S, wait_s * 2 ** min(tries, _MOST_DOUBLINGS))

    async def _once(
        self, request: LineRequest, route: HttpRoute, request_id: str, owner: str
    ) -> Reply:
        """One try. A refusal, or a failure, is a reply too."""
        context = Context(request_id, route, tenant=owner, background=self._background)
        scope = _scope_of(request, context)
        reply = Reply(self._host.settings.server.answer_limit)
        asked = request.whole_body if route.streams_unasked else request.body
        body = iter([{"type": "http.request", "body": asked, "more_body": False}])

        async def receive() -> Message:
            message = next(body, None)
            if message is not None:
                return message
            await asyncio.Event().wait()  # this client never leaves
            raise AssertionError

        try:
            _check_size(request, route, self._host)
            with self._host.opening(owner):
                answer = await route.handler(self._host, Request(scope, receive))
                await answer(scope, receive, reply.take)
        except Exception as error:
            return Reply.of_error(error, request_id, request.url)
        return reply


def _check_size(request: LineRequest, route: HttpRoute, host: RequestHost) -> None:
    """The limit that HTTP has."""
    limit = route.body_limit or host.body_limit
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
