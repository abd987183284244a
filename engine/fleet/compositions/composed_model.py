"""Composed models behind the interface that the endpoint of a fleet calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import orjson

from jitney.engine.common.requests import JsonDict
from jitney.engine.common.tasks import beside
from jitney.engine.fleet.compositions.answering import Answering, Part
from jitney.engine.fleet.compositions.body_checks import accepted
from jitney.engine.fleet.compositions.composed import ComposedModels
from jitney.engine.fleet.forwarding import ProxiedAnswer
from jitney.engine.fleet.metrics import FleetMetrics
from jitney.engine.fleet.models import FleetModel
from jitney.engine.fleet.replicas import Replica
from jitney.engine.fleet.request import ProxiedRequest, RawHeaders, Route
from jitney.engine.server import ErrorReply, HttpError, StreamingWriter

#: Seconds without a chunk after which a stream sends a keep-alive, and its bytes.
_KEEP_ALIVE_S, _KEEP_ALIVE = 15.0, b"\n\n"
_DONE = b"data: [DONE]\n\n"
#: Chunks that are buffered for the client.
_AHEAD = 16
#: Headers, a chunk, or an error; None: the end.
type _Item = JsonDict | Exception | None


@dataclass(frozen=True, slots=True)
class NamedComposition:
    """A `FleetModel` for a composed model. models: all models of the fleet."""

    name: str
    composed: ComposedModels
    models: Mapping[str, FleetModel]
    metrics: FleetMetrics
    keep_alive_s: float = _KEEP_ALIVE_S

    @property
    def ready(self) -> bool:
        """Whether all parts that it requires are ready."""
        return self.composed.ready(self.name, lambda part: self.models[part].ready)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """No replicas: they belong to its parts."""
        return ()

    def card(self) -> JsonDict:
        """The kind and the parts. The context length depends on the part that answers."""
        made_of = self.composed.made_of(self.name)
        return {"kind": made_of.pop("kind"), "made_of": made_of}

    async def keeper_of(self, request: ProxiedRequest, path: str) -> None:
        """Always None: it stores no answers."""

    @asynccontextmanager
    async def answer(self, request: ProxiedRequest) -> AsyncIterator[ProxiedAnswer]:
        """Answer a request. Raises HttpError, RequestError."""
        request = self._accepted(request)
        if request.streams:
            async with _reading(self.composed, request) as queue:
                headers = await _first(queue)
                self._count(headers)
                body = self._events(queue, request.request_id)
                yield ProxiedAnswer(200, _raw({**headers, **StreamingWriter.EVENT_STREAM}), body)
            return
        whole = await self.composed.answer(request)
        self._count(whole.headers)
        headers = whole.headers | {"content-type": "application/json"}
        yield ProxiedAnswer.whole(200, _raw(headers), orjson.dumps(whole.body))

    def _count(self, headers: Mapping[str, str]) -> None:
        self.metrics.stages.labels(self.name, headers.get(Part.header, "")).inc()

    def _accepted(self, request: ProxiedRequest) -> ProxiedRequest:
        """The request with a validated body. Raises HttpError, RequestError."""
        routes = (Route.CHAT, Route.COMPLETIONS)
        if request.route not in routes:
            raise HttpError(
                400,
                f"{self.name} is made of models, and answers {' and '.join(routes)} only",
                code="unsupported_parameter",
                param="model",
            )
        return accepted(request, self.composed.own_fields(self.name))

    async def _events(self, queue: asyncio.Queue[_Item], request_id: str) -> AsyncIterator[bytes]:
        """All events of the stream, with keep-alives while no chunk comes."""
        while True:
            try:
                item = await asyncio.wait_for(queue.get(), self.keep_alive_s)
            except TimeoutError:
                yield _KEEP_ALIVE
                continue
            if item is None:
                break
            if isinstance(item, Exception):
                yield ErrorReply.of(item, request_id).event()
                break
            yield b"data: " + orjson.dumps(item) + b"\n\n"
        yield _DONE


@asynccontextmanager
async def _reading(
    models: Answering, request: ProxiedRequest
) -> AsyncIterator[asyncio.Queue[_Item]]:
    """A queue with a stream's headers, its chunks, and None or an error. One task reads the stream,
    since contexts such as timeouts must be left in the task that entered them. Leaving this context
    cancels the task.
    """
    queue = asyncio.Queue[_Item](_AHEAD)
    async with beside(_read(models, request, queue)):
        yield queue


async def _read(models: Answering, request: ProxiedRequest, queue: asyncio.Queue[_Item]) -> None:
    try:
        async with models.stream(request) as stream:
            await queue.put(dict(stream.headers))
            async for chunk in stream.chunks:
                await queue.put(chunk)
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)


async def _first(queue: asyncio.Queue[_Item]) -> dict[str, str]:
    """The headers. Raises the stream's error if it failed before them."""
    headers = await queue.get()
    if isinstance(headers, Exception):
        raise headers
    return headers or {}


def _raw(headers: Mapping[str, str]) -> RawHeaders:
    return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
