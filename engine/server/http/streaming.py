"""Responses that are sent block by block, as fast as they are made and the client reads."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import ClassVar

from starlette.types import Receive, Scope, Send

from jitney.engine.server.http.disconnect import until_disconnect


@dataclass(frozen=True, slots=True)
class StreamingWriter:
    """Sends a streamed response with status 200."""

    #: Headers of an answer that is a stream of server-sent events: no cache keeps it, and no proxy
    #: waits for more of it.
    EVENT_STREAM: ClassVar[dict[str, str]] = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-store",
        "x-accel-buffering": "no",
    }
    #: The same of a stream of lines, each an object of JSON.
    JSON_LINES: ClassVar[Mapping[str, str]] = EVENT_STREAM | {
        "content-type": "application/x-ndjson"
    }

    send: Send

    async def begin(self, headers: Mapping[str, str]) -> None:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": 200, "headers": raw})

    async def write(self, body: bytes, *, more: bool = True) -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": more})

    async def end(self) -> None:
        """End the response."""
        await self.write(b"", more=False)


@dataclass(frozen=True, slots=True)
class StreamingResponse:
    """A plain 200, as an ASGI application. It has a length if it is one block. An error of the
    first block comes before the answer begins.
    """

    blocks: AsyncGenerator[bytes]
    headers: Mapping[str, str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the response is complete, or the client has left."""
        await until_disconnect(receive, self.send(send))

    async def send(self, send: Send) -> None:
        async with aclosing(self.blocks) as blocks:
            first = await anext(blocks)
            second = await anext(blocks, b"")
            length = {} if second else {"content-length": str(len(first))}
            parts = StreamingWriter(send)
            await parts.begin({**self.headers, **length})
            await parts.write(first, more=bool(second))
            if not second:
                return
            await parts.write(second)
            async for block in blocks:
                await parts.write(block)
            await parts.end()
