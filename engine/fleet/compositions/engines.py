"""The engines of a fleet behind the interface that composed models call."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import orjson

from jitney.engine.common.requests import JsonDict
from jitney.engine.common.sse import events
from jitney.engine.fleet.compositions.answering import ModelAnswer, ModelStream
from jitney.engine.fleet.forwarding import ProxiedAnswer
from jitney.engine.fleet.metrics import FleetMetrics
from jitney.engine.fleet.models import FleetModel, ReplicatedModel
from jitney.engine.fleet.replica_set import ReplicaSet
from jitney.engine.fleet.replicas import Replica
from jitney.engine.fleet.request import ProxiedRequest, Route, texts_of
from jitney.engine.fleet.sections import ReplicasSection
from jitney.engine.fleet.upstream import upstream_client
from jitney.engine.server import HttpError, Notes

#: Headers of an engine's answer that are passed on to the client.
_PASSED = (*Notes.HEADERS, "x-jitney-replica", "retry-after", "retry-after-ms")
#: Route -> the field with the answer's list; `choices` for all other routes.
_LISTS: dict[str, str] = {Route.EMBEDDINGS: "data", Route.RERANK: "results"}


class FleetEngines:
    """`Answering` for models on engines. models: all models of the fleet; may be filled later."""

    def __init__(self, models: Mapping[str, FleetModel]):
        self._models = models

    async def answer(self, request: ProxiedRequest) -> ModelAnswer:
        """Send the request to an engine. Raises HttpError, RequestError."""
        async with self._models[request.model].answer(request.outgoing()) as answer:
            content = b"".join([part async for part in answer.body])
        if answer.status != 200:
            raise _refusal(request.model, answer, content)
        body = _read(request.model, content)
        name = _LISTS.get(request.route, "choices")
        if not isinstance(body.get(name), list) or not body[name]:
            message = f"the engine of {request.model} sent no {name}"
            raise HttpError(502, message, code="engine_dead")
        return ModelAnswer(body | {"model": request.model}, _passed(answer))

    @asynccontextmanager
    async def stream(self, request: ProxiedRequest) -> AsyncIterator[ModelStream]:
        """Stream an engine's answer. Raises HttpError, RequestError."""
        async with self._models[request.model].answer(request.outgoing()) as answer:
            if answer.status != 200:
                content = b"".join([part async for part in answer.body])
                raise _refusal(request.model, answer, content)
            yield ModelStream(_chunks_from(request.model, answer.body), _passed(answer))

    async def seats(self, model: str) -> int | None:
        """Total seats of the ready engines that report them; None without such an engine."""
        ready = [each for each in self._models[model].replicas if each.state == "ready"]
        return sum(replica.seats for replica in ready) or None


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """The address of one model. url: base URL without /v1."""

    url: str
    model: str
    key: str = field(default="", repr=False)


class _UnwatchedModel(ReplicatedModel):
    """A model whose engines are not polled: unreachable ones are tried again for each request."""

    def order(self, request: ProxiedRequest) -> Iterator[Replica]:
        for replica in self.replicas:
            replica.became("ready")
        return super().order(request)


@asynccontextmanager
async def engines_at(addresses: Mapping[str, EngineAddress]) -> AsyncIterator[FleetEngines]:
    """Engines for models that are each served at one address. addresses: by model name."""
    async with upstream_client() as client:
        metrics = FleetMetrics(dict)
        yield FleetEngines(
            {
                name: _UnwatchedModel(
                    name,
                    ReplicasSection(urls=(each.url,), upstream_model=each.model),
                    client,
                    metrics,
                    repeat_streams=False,
                    engines=ReplicaSet([Replica(name, each.url, each.key, "ready")], "least-wait"),
                )
                for name, each in addresses.items()
            }
        )


def _refusal(model: str, answer: ProxiedAnswer, content: bytes) -> HttpError:
    """The error for an answer whose status is not 200. content: its body."""
    try:
        error = json.loads(content)["error"]
        message, code, param = error["message"], error.get("code"), error.get("param")
    except (ValueError, LookupError, TypeError):
        message = f"the engine of {model} answered {answer.status}"
        code, param = None, None
    code = code if isinstance(code, str) else None
    return HttpError(answer.status, str(message), code=code, param=param, headers=_passed(answer))


def _passed(answer: ProxiedAnswer) -> dict[str, str]:
    headers = texts_of(answer.headers)
    return {name: headers[name] for name in _PASSED if name in headers}


async def _chunks_from(model: str, stream: AsyncIterator[bytes]) -> AsyncIterator[JsonDict]:
    """The chunks of an engine's stream; an interrupted stream ends with an error chunk."""
    try:
        async for data in events(stream):
            if data == b"[DONE]":
                return
            chunk = _read(model, data)
            yield chunk if "error" in chunk else chunk | {"model": model}
        reason = "its stream ended early"
    except HttpError as error:
        reason = str(error) or type(error).__name__
    message = f"the engine of {model} broke off: {reason}"
    error_body = {"message": message, "type": "server_error", "param": None, "code": "engine_dead"}
    yield {"error": error_body}


def _read(model: str, content: bytes) -> JsonDict:
    """Parse a JSON object. Raises HttpError for any other content."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        body = None
    if not isinstance(body, dict):
        raise HttpError(502, f"the engine of {model} sent no JSON object", code="engine_dead")
    return body
