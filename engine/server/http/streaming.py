"""Streamed responses: blocks are sent as soon as they are ready and the client reads."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

from starlette.types import Receive, Scope, Send

from jitney.engine.server.http.disconnect import until_disconnect


class DirectWriter(Protocol):
    """A connection to which parts of a response can be written synchronously, without a task."""

    @property
    def takes_chunk(self) -> bool:
        """Whether a part can be written now: the response has begun, is chunked, and the client
        reads.
        """
        ...

    def write_chunk(self, data: bytes) -> None:
        """Write a part, which must not be empty; only where `takes_chunk`."""
        ...


@dataclass(frozen=True, slots=True)
class StreamingWriter:
    """Sends a streamed response with status 200."""

    #: In the state of a scope: the connection as `DirectWriter`.
    DIRECT: ClassVar[str] = "jitney_direct"
    #: Headers of server-sent events, which turn off caching and the buffering of proxies.
    EVENT_STREAM: ClassVar[dict[str, str]] = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-store",
        "x-accel-buffering": "no",
    }
    #: The same for newline-delimited JSON.
    JSON_LINES: ClassVar[Mapping[str, str]] = EVENT_STREAM | {
        "content-type": "application/x-ndjson"
    }

    send: Send
    #: None: every part is sent by a task.
    direct: DirectWriter | None = None

    @classmethod
    def of(cls, scope: Scope, send: Send) -> Self:
        """The writer of the response to a request."""
        return cls(send, scope.get("state", {}).get(cls.DIRECT))

    @property
    def takes_now(self) -> bool:
        """Whether a part can be written without waiting for the client."""
        return self.direct is not None and self.direct.takes_chunk

    def write_now(self, parts: Iterable[bytes]) -> None:
        """Write parts of the body at once; only where `takes_now`."""
        body = b"".join(parts)
        if body and self.direct is not None:
            self.direct.write_chunk(body)

    async def begin(self, headers: Mapping[str, str]) -> None:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": 200, "headers": raw})

    async def write(self, body: bytes, *, more: bool = True) -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": more})

    async def end(self) -> None:
        await self.write(b"", more=False)


@dataclass(frozen=True, slots=True)
class StreamingResponse:
    """A 200 response sent block by block, such as a file or long JSON; token streams use
    `StreamingWriter`. An error of the first block is raised before anything is sent.
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
