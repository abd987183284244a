"""Handling of generation requests: read the body, run the request, send the answer whole or as a
stream. The route's endpoint (`engine.server.http.endpoint`) cancels it when the client leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from jitney.engine.common.requests import JsonDict
from jitney.engine.common.slices import Pieces
from jitney.engine.core import TokenBytes
from jitney.engine.server.chat.choices import Deltas, merged
from jitney.engine.server.chat.formats import Format
from jitney.engine.server.chat.generation import Generation
from jitney.engine.server.chat.generation_request import GenerationRequest
from jitney.engine.server.chat.schema import ModelBody
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.service import Service
from jitney.engine.server.http.streaming import StreamingResponse, StreamingWriter


async def read_body[B: ModelBody](service: Service, request: Request, kind: type[B]) -> B:
    """The checked body of a request. Raises RequestError and HttpError."""
    return checked_body(request, kind, await read_fields(service, request))


async def read_fields(service: Service, request: Request) -> JsonDict:
    """The body of a request, not checked yet. Raises RequestError and HttpError."""
    service.ready()
    return await service.json_body(request)


def checked_body[B: ModelBody](request: Request, kind: type[B], fields: JsonDict) -> B:
    """Validate the fields; notes ignored and unenforced ones. Raises RequestError."""
    body, ignored = kind.parse(fields)
    notes = Context.of(request).notes
    notes.ignored.extend(ignored)
    notes.unenforced.extend(body.unenforced())
    return body


@dataclass(frozen=True, slots=True)
class GenerationAnswer:
    """Runs a request and sends its answer, whole or as a stream."""

    service: Service
    request: GenerationRequest
    format: Callable[[Generation, TokenBytes], Format]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = Context.of(scope)
        _, tokenizer = self.service.ready()
        async with Generation(self.service, self.request, context) as generation:
            format = self.format(generation, tokenizer)
            if self.request.body.stream:
                writer = StreamingWriter.of(scope, send)
                await self._stream(generation, format, context.request_id, writer)
            else:
                add = partial(_add, format)
                while not generation.done:
                    add(await generation.deltas(None, add))
                blocks = self.service.slices.blocks(format.whole())
                await StreamingResponse(blocks, {"content-type": "application/json"}).send(send)

    async def _stream(
        self, generation: Generation, format: Format, request_id: str, parts: StreamingWriter
    ) -> None:
        """The first output decides the status; later failures are events of the stream."""
        settings = self.service.settings
        deltas = await generation.deltas(settings.header_wait_s)
        await parts.begin(format.stream_headers)
        try:
            opening = format.opening()
            if opening:
                await parts.write(opening)
            await self._send_frames(format, deltas, parts)
            write = None if parts.direct is None else partial(_write, format, parts)
            while not generation.done:
                deltas = await generation.deltas(settings.comment_s, write)
                await self._send_frames(format, deltas, parts)
            await self._send_pieces(format.tail(), parts)
        except Exception as error:
            await self._send_pieces(format.failure(error, request_id), parts)
        await parts.end()

    async def _send_frames(self, format: Format, deltas: Deltas, parts: StreamingWriter) -> None:
        """Send the frames of these deltas; a keep-alive where there are none."""
        if deltas:
            await self._send_pieces(_frames(format, deltas), parts)
        else:
            await parts.write(format.keep_alive)

    async def _send_pieces(self, pieces: Pieces, parts: StreamingWriter) -> None:
        async with aclosing(self.service.slices.blocks(pieces)) as blocks:
            async for block in blocks:
                await parts.write(block)


def _frames(format: Format, deltas: Deltas) -> Pieces:
    for choice, delta in deltas:
        yield from format.chunks(choice, delta)


def _write(format: Format, parts: StreamingWriter, deltas: Deltas) -> bool:
    """Write the frames of these deltas if the client can take them now; returns whether it did."""
    if not parts.takes_now:
        return False
    parts.write_now(_frames(format, merged(deltas) if len(deltas) > 1 else deltas))
    return True


def _add(format: Format, deltas: Deltas) -> bool:
    """Add deltas to a plain answer."""
    for choice, delta in deltas:
        format.add(choice, delta)
    return True
