"""The generation routes as plain ASGI: read, run, answer; and stop the engine's work when the
client leaves.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jitney.engine.api.errors import HttpError, error_event
from jitney.engine.api.formats import DONE, ChatFormat, CompletionFormat, Format
from jitney.engine.api.generation import ChoiceDelta, Generation
from jitney.engine.api.jsonio import read_object
from jitney.engine.api.request import GenerationRequest, chat_job, completion_job
from jitney.engine.api.schema import ChatBody, CompletionBody, parse
from jitney.engine.api.service import Context, Service, context_of
from jitney.engine.errors import RequestError

KEEP_ALIVE = b": keep-alive\n\n"
#: Names listed in x-ignored-params, and characters of each.
IGNORED = (20, 64)


@dataclass(frozen=True, slots=True)
class Generate:
    """One generation route, an ASGI application."""

    service: Service
    body: type[CompletionBody] | type[ChatBody]
    job: Callable[[Service, Any, Context], Awaitable[GenerationRequest]]
    format: type[Format]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        try:
            body = await Request(scope, receive).body()
            with self.service.generating(), self.service.quotas.open(context.tenant):
                left = await until_disconnect(receive, self._answer(body, context, scope, send))
        except ClientDisconnect:
            left = True
        except (RequestError, HttpError) as error:
            code = error.info.code if isinstance(error, RequestError) else error.code
            self.service.metrics.rejected.labels(code or "invalid_request").inc()
            raise
        if left:
            context.left = True
            self.service.metrics.disconnects.inc()

    async def _answer(self, body: bytes, context: Context, scope: Scope, send: Send) -> None:
        _, tokenizer = self.service.ready()
        settings = self.service.settings
        fields, ignored = parse(
            self.body, read_object(body, settings.max_depth), settings.max_messages
        )
        job = await self.job(self.service, fields, context)
        self.service.quotas.enter(context.tenant, context.prompt_tokens)
        async with Generation(self.service, job, context) as run:
            answer = self._stream if job.stream else self._plain
            await answer(
                run, self.format(run, tokenizer), _ignored_header(ignored), context, scope, send
            )

    async def _plain(
        self,
        run: Generation,
        format: Format,
        headers: dict[str, str],
        context: Context,
        scope: Scope,
        send: Send,
    ) -> None:
        whole = {choice.index: ChoiceDelta() for choice in run.choices}
        while not run.done:
            for choice, piece in await run.pieces(None):
                total = whole[choice.index]
                total.text += piece.text
                total.tokens += piece.tokens
                total.finish = piece.finish
        response = Response(format.whole(whole), 200, headers, "application/json")
        await response(scope, _nothing, send)

    async def _stream(
        self,
        run: Generation,
        format: Format,
        headers: dict[str, str],
        context: Context,
        scope: Scope,
        send: Send,
    ) -> None:
        """The engine's first word decides the status; what goes wrong later is an event in the
        stream.
        """
        pieces = await run.pieces(self.service.settings.header_wait_s)
        headers |= {"cache-control": "no-store", "x-accel-buffering": "no"}
        head = Response(None, 200, headers, "text/event-stream")
        raw = [(name, value) for name, value in head.raw_headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        try:
            await _send_body(send, b"".join(format.chunks(*each) for each in pieces) or KEEP_ALIVE)
            while not run.done:
                pieces = await run.pieces(self.service.settings.keep_alive_s)
                await _send_body(
                    send, b"".join(format.chunks(*each) for each in pieces) or KEEP_ALIVE
                )
            tail = format.tail()
        except Exception as error:
            tail = error_event(error, context.request_id) + DONE
        await _send_body(send, tail, more=False)


def completions(service: Service) -> Generate:
    return Generate(service, CompletionBody, completion_job, CompletionFormat)


def chat_completions(service: Service) -> Generate:
    return Generate(service, ChatBody, chat_job, ChatFormat)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`, cancelling it if the client leaves first; True if it did. Errors of `work` are
    raised.

    Starlette notices a client's leaving only in some responses and ASGI versions, and never while a
    request waits.
    """
    task, watch = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return False
        return True
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _nothing() -> Any:
    """A plain response never receives: `until_disconnect` does."""
    raise RuntimeError("the body has been read")


def _ignored_header(names: list[str]) -> dict[str, str]:
    if not names:
        return {}
    count, length = IGNORED
    return {
        "x-ignored-params": ", ".join(
            re.sub(r"[^A-Za-z0-9_.-]", "?", name[:length]) for name in names[:count]
        )
    }
