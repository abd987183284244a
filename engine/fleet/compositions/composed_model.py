"""Models made of models, as the endpoint of a fleet asks them; and the fleet's engines, as they ask
those.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import orjson

from jitney.engine.common.requests import JsonDict
from jitney.engine.fleet.asked import Asked, RawHeaders
from jitney.engine.fleet.compositions.answering import Answering, ModelAnswer, ModelStream, Part
from jitney.engine.fleet.compositions.composed import ComposedModels
from jitney.engine.fleet.compositions.http_engines import EngineReply
from jitney.engine.fleet.compositions.question import Question, Route
from jitney.engine.fleet.forwarding import ProxiedAnswer
from jitney.engine.fleet.metrics import FleetMetrics
from jitney.engine.fleet.models import FleetModel
from jitney.engine.fleet.replicas import Replica
from jitney.engine.server import ErrorReply, HttpError, StreamingWriter

#: Seconds without a chunk after which a stream says that it lives, and how (`formats.Format`).
_KEEP_ALIVE_S, _KEEP_ALIVE = 15.0, b"\n\n"
_DONE = b"data: [DONE]\n\n"
#: Chunks that are read before the client has taken those before them.
_AHEAD = 16
#: Headers or a chunk; None: the end.
type _Item = JsonDict | Exception | None


class FleetEngines:
    """`Answering` for the models of a fleet that engines stand behind. models: all of the fleet's,
    which may be made later.
    """

    def __init__(self, models: Mapping[str, FleetModel]):
        self._models = models

    async def answer(self, question: Question) -> ModelAnswer:
        """Raises HttpError, RequestError."""
        async with self._models[question.model].answer(_asked_for(question)) as answer:
            content = b"".join([part async for part in answer.body])
        return EngineReply(question, answer.status, _texts(answer.headers)).whole(content)

    @asynccontextmanager
    async def stream(self, question: Question) -> AsyncIterator[ModelStream]:
        """Raises HttpError, RequestError."""
        async with self._models[question.model].answer(_asked_for(question)) as answer:
            reply = EngineReply(question, answer.status, _texts(answer.headers))
            if reply.status != 200:
                raise reply.refusal(b"".join([part async for part in answer.body]))
            yield reply.stream(answer.body)

    async def seats(self, model: str) -> int | None:
        """Of the engines that are ready and say how many they have."""
        ready = [each for each in self._models[model].replicas if each.state == "ready"]
        return sum(replica.seats for replica in ready) or None


def _asked_for(question: Question) -> Asked:
    """A question as the fleet passes it on. Raises RequestError if its time ran out."""
    fields = question.sent_body(question.model)
    headers = [(name.encode(), value.encode("latin-1")) for name, value in question.headers.items()]
    request_id = question.headers.get("x-request-id", "")
    return Asked("POST", question.route, headers, orjson.dumps(fields), fields, request_id)


def _texts(headers: RawHeaders) -> dict[str, str]:
    return {name.decode(): value.decode("latin-1") for name, value in headers}


@dataclass(frozen=True, slots=True)
class NamedComposition:
    """A `FleetModel` that is made of others. models: all of the fleet's."""

    name: str
    composed: ComposedModels
    models: Mapping[str, FleetModel]
    metrics: FleetMetrics
    keep_alive_s: float = _KEEP_ALIVE_S

    @property
    def ready(self) -> bool:
        """Those of its parts that it cannot do without are."""
        return self.composed.ready(self.name, lambda part: self.models[part].ready)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """They are its parts'."""
        return ()

    def card(self) -> JsonDict:
        """What it is made of; nobody knows its context, which hangs on who answers."""
        made_of = self.composed.made_of(self.name)
        return {"kind": made_of.pop("kind"), "made_of": made_of}

    async def keeper_of(self, asked: Asked, path: str) -> None:
        """It keeps nothing."""

    @asynccontextmanager
    async def answer(self, asked: Asked) -> AsyncIterator[ProxiedAnswer]:
        """Raises HttpError, RequestError."""
        question = self._question(asked)
        if question.streams:
            async with _reading(self.composed, question) as queue:
                headers = await _first(queue)
                self._count(headers)
                body = self._events(queue, asked.request_id)
                yield ProxiedAnswer(200, _raw({**headers, **StreamingWriter.EVENT_STREAM}), body)
            return
        whole = await self.composed.answer(question)
        self._count(whole.headers)
        content = orjson.dumps(whole.body)
        headers = whole.headers | {
            "content-type": "application/json",
            "content-length": str(len(content)),
        }
        yield ProxiedAnswer(200, _raw(headers), _pieces((content,)))

    def _count(self, headers: Mapping[str, str]) -> None:
        """One more answer of the part that gave it."""
        self.metrics.stages.labels(self.name, headers.get(Part.header, "")).inc()

    def _question(self, asked: Asked) -> Question:
        """Raises HttpError, RequestError."""
        known = (Route.CHAT, Route.COMPLETIONS)
        if asked.route not in known:
            raise HttpError(
                400,
                f"{self.name} is made of models, and answers {' and '.join(known)} only",
                code="unsupported_parameter",
                param="model",
            )
        own = self.composed.own_fields(self.name)
        return Question.of(self.name, asked.route, asked.fields, _texts(asked.headers), own)

    async def _events(self, queue: asyncio.Queue[_Item], request_id: str) -> AsyncIterator[bytes]:
        """Of the whole stream; a sign of life where nothing comes for long."""
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
async def _reading(models: Answering, question: Question) -> AsyncIterator[asyncio.Queue[_Item]]:
    """A stream's headers, its chunks, and None or an error. One task does all of the asking, which
    what it opens may count on; leaving ends it.
    """
    queue = asyncio.Queue[_Item](_AHEAD)
    asking = asyncio.create_task(_read(models, question, queue))
    try:
        yield queue
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def _read(models: Answering, question: Question, queue: asyncio.Queue[_Item]) -> None:
    try:
        async with models.stream(question) as stream:
            await queue.put(dict(stream.headers))
            async for chunk in stream.chunks:
                await queue.put(chunk)
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)


async def _first(queue: asyncio.Queue[_Item]) -> dict[str, str]:
    """The headers. Raises what went wrong before there were any."""
    headers = await queue.get()
    if isinstance(headers, Exception):
        raise headers
    return headers or {}


def _raw(headers: Mapping[str, str]) -> RawHeaders:
    return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]


async def _pieces(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
