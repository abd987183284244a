"""Engines elsewhere, asked over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx
import orjson

from jitney.engine.api.errors import HttpError
from jitney.engine.bench.client import RemoteEndpoint, events
from jitney.engine.fleet.answering import EMBEDDINGS, ModelAnswer, ModelStream, Question
from jitney.engine.types import JsonDict

#: Headers of an engine's answer that the client sees.
_PASSED = ("x-ignored-params", "x-jitney-replica", "retry-after", "retry-after-ms")
_CONNECT_S = 10.0


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
        if response.status_code != 200:
            raise refusal(question.model, response.status_code, response.content, response.headers)
        body = read_answer(question, response.content)
        return ModelAnswer(body, passed_headers(response.headers))

    @asynccontextmanager
    async def stream(self, question: Question) -> AsyncIterator[ModelStream]:
        """Raises HttpError, RequestError."""
        request = self._request(question)
        try:
            response = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise _unreachable(question.model, error) from None
        try:
            if response.status_code != 200:
                content = await response.aread()
                raise refusal(question.model, response.status_code, content, response.headers)
            chunks = chunks_from(question.model, response.aiter_bytes())
            yield ModelStream(chunks, passed_headers(response.headers))
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


async def chunks_from(model: str, stream: AsyncIterator[bytes]) -> AsyncIterator[JsonDict]:
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


def refusal(model: str, status: int, content: bytes, headers: Mapping[str, str]) -> HttpError:
    """An engine's answer that is none, as an error."""
    try:
        error = json.loads(content)["error"]
        message, code, param = error["message"], error.get("code"), error.get("param")
    except (ValueError, LookupError, TypeError):
        message, code, param = f"the engine of {model} answered {status}", None, None
    kept = passed_headers(headers)
    code = code if isinstance(code, str) else None
    return HttpError(status, str(message), code=code, param=param, headers=kept)


def passed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Those of an engine's answer that the client sees."""
    return {name: headers[name] for name in _PASSED if name in headers}


def read_answer(question: Question, content: bytes) -> JsonDict:
    """A whole answer, with the model's name in the fleet. Raises HttpError for what is none."""
    model = question.model
    body = _read(model, content)
    name = "data" if question.route == EMBEDDINGS else "choices"
    if not isinstance(body.get(name), list) or not body[name]:
        raise HttpError(502, f"the engine of {model} sent no {name}", code="engine_dead")
    return body | {"model": model}


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
