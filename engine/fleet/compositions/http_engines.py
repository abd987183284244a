"""Engines elsewhere, asked over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import orjson

from jitney.engine.common.requests import JsonDict
from jitney.engine.fleet.compositions.answering import ModelAnswer, ModelStream
from jitney.engine.fleet.compositions.question import Question, Route
from jitney.engine.server import HttpError, Notes, RemoteEndpoint, events

#: Headers of an engine's answer that the client sees.
_PASSED = (*Notes.HEADERS, "x-jitney-replica", "retry-after", "retry-after-ms")
_CONNECT_S = 10.0
#: The list that an answer holds, by its route; `choices` of the others.
_LISTS: dict[str, str] = {Route.EMBEDDINGS: "data", Route.RERANK: "results"}


@dataclass(frozen=True, slots=True)
class EngineReply:
    """What an engine says to a question: a status, and headers by their lower-case names."""

    question: Question
    status: int
    headers: Mapping[str, str]

    def whole(self, content: bytes) -> ModelAnswer:
        """The answer in all of its body, with the model's name in the fleet. Raises HttpError for
        what is none.
        """
        if self.status != 200:
            raise self.refusal(content)
        model = self.question.model
        body = _read(model, content)
        name = _LISTS.get(self.question.route, "choices")
        if not isinstance(body.get(name), list) or not body[name]:
            raise HttpError(502, f"the engine of {model} sent no {name}", code="engine_dead")
        return ModelAnswer(body | {"model": model}, self._passed())

    def stream(self, body: AsyncIterator[bytes]) -> ModelStream:
        """The answer in a body that streams."""
        return ModelStream(_chunks_from(self.question.model, body), self._passed())

    def refusal(self, content: bytes) -> HttpError:
        """What is no answer, as an error."""
        try:
            error = json.loads(content)["error"]
            message, code, param = error["message"], error.get("code"), error.get("param")
        except (ValueError, LookupError, TypeError):
            message = f"the engine of {self.question.model} answered {self.status}"
            code, param = None, None
        code = code if isinstance(code, str) else None
        return HttpError(self.status, str(message), code=code, param=param, headers=self._passed())

    def _passed(self) -> dict[str, str]:
        return {name: self.headers[name] for name in _PASSED if name in self.headers}


class HttpEngines:
    """`Answering` for models that are each served at one address."""

    def __init__(self, endpoints: Mapping[str, RemoteEndpoint], client: httpx.AsyncClient):
        self._endpoints = endpoints
        self._client = client

    async def answer(self, question: Question) -> ModelAnswer:
        """Raises HttpError, RequestError."""
        request = self._request(question)
        try:
            response = await self._client.send(request)
        except httpx.HTTPError as error:
            raise _unreachable(question.model, error) from None
        reply = EngineReply(question, response.status_code, response.headers)
        return reply.whole(response.content)

    @asynccontextmanager
    async def stream(self, question: Question) -> AsyncIterator[ModelStream]:
        """Raises HttpError, RequestError."""
        request = self._request(question)
        try:
            response = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise _unreachable(question.model, error) from None
        try:
            reply = EngineReply(question, response.status_code, response.headers)
            if reply.status != 200:
                raise reply.refusal(await response.aread())
            yield reply.stream(response.aiter_bytes())
        finally:
            await response.aclose()

    async def seats(self, model: str) -> int | None:
        """Nobody says it to strangers."""
        return None

    def _request(self, question: Question) -> httpx.Request:
        """Raises HttpError, RequestError."""
        endpoint = self._endpoints.get(question.model)
        if endpoint is None:
            raise HttpError.no_model(question.model)
        headers = {**question.headers, **endpoint.headers, "content-type": "application/json"}
        return self._client.build_request(
            "POST",
            endpoint.base + question.route,
            content=orjson.dumps(question.sent_body(endpoint.model)),
            headers=headers,
            timeout=httpx.Timeout(endpoint.timeout_s, connect=_CONNECT_S),
        )


async def _chunks_from(model: str, stream: AsyncIterator[bytes]) -> AsyncIterator[JsonDict]:
    """The chunks of a stream as an engine sends it. One that ends before its end has a last chunk
    that says so.
    """
    try:
        async for data in events(stream):
            if data == b"[DONE]":
                return
            chunk = _read(model, data)
            yield chunk if "error" in chunk else chunk | {"model": model}
        reason = "its stream ended early"
    except (httpx.HTTPError, HttpError) as error:
        reason = str(error) or type(error).__name__
    message = f"the engine of {model} broke off: {reason}"
    error_body = {"message": message, "type": "server_error", "param": None, "code": "engine_dead"}
    yield {"error": error_body}


def _read(model: str, content: bytes) -> JsonDict:
    """Raises HttpError for what is no JSON object."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        body = None
    if not isinstance(body, dict):
        raise HttpError(502, f"the engine of {model} sent no JSON object", code="engine_dead")
    return body


def _unreachable(model: str, error: httpx.HTTPError) -> HttpError:
    reason = str(error) or type(error).__name__
    return HttpError(503, f"the engine of {model} cannot be reached: {reason}", code="engine_dead")
