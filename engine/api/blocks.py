"""Answers that are sent block by block, as fast as they are made and the client reads."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from starlette.types import Message, Receive, Scope, Send

from jitney.engine.api.disconnect import until_disconnect

#: Of an answer that is a stream of server-sent events: no cache keeps it, and no proxy waits for
#: more of it.
EVENT_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}


@dataclass(frozen=True, slots=True)
class BlockAnswer:
    """A plain 200, as an ASGI application. It has a length if it is one block. An error of the
    first block comes before the answer begins.
    """

    blocks: AsyncGenerator[bytes]
    headers: Mapping[str, str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Until the answer is out, or the client has left."""
        await until_disconnect(receive, self.send(send))

    async def send(self, send: Send) -> None:
        async with aclosing(self.blocks) as blocks:
            first = await anext(blocks)
            second = await anext(blocks, b"")
            length = {} if second else {"content-length": str(len(first))}
            await send(start_of({**self.headers, **length}))
            await send_body(send, first, more=bool(second))
            if not second:
                return
            await send_body(send, second)
            async for block in blocks:
                await send_body(send, block)
            await send_body(send, b"", more=False)


def start_of(headers: Mapping[str, str]) -> Message:
    """The beginning of a 200."""
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": raw}


async def send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
