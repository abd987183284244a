"""Scripted models, for tests of models composed of other models: no engine, no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jitney.engine.fleet.compositions.answering import ModelAnswer, ModelStream
from jitney.engine.fleet.compositions.body_checks import accepted
from jitney.engine.fleet.compositions.pipeline import Pipeline, PipelineSettings
from jitney.engine.fleet.request import ProxiedRequest


@dataclass
class Said:
    """The answer of a model: words, each a token with this log-probability."""

    text: str = "yes"
    logprobs: Sequence[float] = (-0.1,)
    prompt_tokens: int = 10


@dataclass
class ScriptedModel:
    """A scripted model. says: returns the answer to a request, or raises."""

    says: Callable[[ProxiedRequest], Said | Exception]
    seats: int | None = None
    delay_s: float = 0.0
    asked: list[ProxiedRequest] = field(default_factory=list)
    #: Number of requests that are open, now and at most.
    open: int = 0
    most_open: int = 0


class ScriptedModels:
    """`Answering` with scripted models."""

    def __init__(self, **models: ScriptedModel):
        self.models = models

    async def answer(self, request: ProxiedRequest) -> ModelAnswer:
        assert not request.streams
        return await self._answer(request)

    async def _answer(self, request: ProxiedRequest) -> ModelAnswer:
        model = self.models[request.model]
        request.outgoing()  # raises if no time is left
        model.asked.append(request)
        model.open += 1
        model.most_open = max(model.most_open, model.open)
        try:
            await asyncio.sleep(model.delay_s)
            said = model.says(request)
        finally:
            model.open -= 1
        if isinstance(said, Exception):
            raise said
        return answer_of(request, said)

    @asynccontextmanager
    async def stream(self, request: ProxiedRequest) -> AsyncIterator[ModelStream]:
        assert request.streams
        answer = await self._answer(request)
        yield ModelStream(answer.chunks(request), answer.headers)

    async def seats(self, model: str) -> int | None:
        return self.models[model].seats


def always(text: str, *logprobs: float) -> ScriptedModel:
    """A model that gives the same answer to every request."""
    return ScriptedModel(lambda request: Said(text, logprobs or (-0.1,)))


def fails(error: Exception) -> ScriptedModel:
    return ScriptedModel(lambda request: error)


def answer_of(request: ProxiedRequest, said: Said) -> ModelAnswer:
    """The answer in the format of the request's route."""
    n = request.fields.get("n") or 1
    make = _chat_choice if request.is_chat else _text_choice
    completion = n * len(said.logprobs)
    usage = {
        "prompt_tokens": said.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": said.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    body: dict[str, Any] = {
        "id": "x",
        "object": "chat.completion" if request.is_chat else "text_completion",
        "created": 1,
        "model": request.model,
        "choices": [make(index, request, said) for index in range(n)],
        "usage": usage,
    }
    return ModelAnswer(body)


def _chat_choice(index: int, request: ProxiedRequest, said: Said) -> dict[str, Any]:
    logprobs = None
    if request.fields.get("logprobs"):
        content = [
            {"token": "t", "logprob": value, "bytes": [116], "top_logprobs": []}
            for value in said.logprobs
        ]
        logprobs = {"content": content, "refusal": None}
    message = {"role": "assistant", "content": said.text, "refusal": None}
    return {"index": index, "message": message, "finish_reason": "stop", "logprobs": logprobs}


def _text_choice(index: int, request: ProxiedRequest, said: Said) -> dict[str, Any]:
    logprobs = None
    if request.fields.get("logprobs") is not None:
        logprobs = {"tokens": ["t"] * len(said.logprobs), "token_logprobs": list(said.logprobs)}
    return {"index": index, "text": said.text, "finish_reason": "stop", "logprobs": logprobs}


def chat(model: str, text: str = "hello", **fields: Any) -> ProxiedRequest:
    """A chat request with one message, to a model that may also read documents."""
    body = {"messages": [{"role": "user", "content": text}]} | fields
    return accepted(ProxiedRequest.post(model, "/v1/chat/completions", body), {"documents"})


def in_background(request: ProxiedRequest) -> ProxiedRequest:
    """The request marked as background, like a line of a batch."""
    return replace(request, headers=[(b"x-jitney-background", b"1")])


def completion(model: str, prompt: Any = "hello", **fields: Any) -> ProxiedRequest:
    return accepted(ProxiedRequest.post(model, "/v1/completions", {"prompt": prompt} | fields))


def pipeline_settings(*stages: dict[str, Any], **fields: Any) -> PipelineSettings:
    return PipelineSettings.model_validate({"kind": "pipeline", "stages": list(stages)} | fields)


def ask_pipeline(
    models: ScriptedModels,
    requests: Sequence[ProxiedRequest],
    *stages: dict[str, Any],
    folder: Path = Path(),
) -> list[Any]:
    """The answers of a pipeline of these stages, one after another; for a stream its headers and
    chunks.
    """

    async def scene() -> list[Any]:
        pipeline = Pipeline(pipeline_settings(*stages), models, folder=folder)
        try:
            return [
                await (chunks(pipeline, each) if each.streams else pipeline.answer(each))
                for each in requests
            ]
        finally:
            await pipeline.close()

    return asyncio.run(asyncio.wait_for(scene(), 60))


def messages_to(models: ScriptedModels, name: str) -> list[str]:
    """The last message of each request to a model."""
    return [each.fields["messages"][-1]["content"] for each in models.models[name].asked]


async def chunks(
    models: Any, request: ProxiedRequest
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The headers and all chunks of a stream."""
    async with models.stream(request) as stream:
        return stream.headers, [chunk async for chunk in stream.chunks]


def said_in(chunks: Sequence[dict[str, Any]]) -> str:
    """The text of a stream's chunks."""
    entries = [entry for chunk in chunks for entry in chunk.get("choices", ())]
    return "".join(
        (entry["delta"].get("content") or "") if "delta" in entry else entry["text"]
        for entry in entries
    )
