"""Models by script, for tests of models made of models: no engine, no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from jitney.engine.fleet.compositions.answering import ModelAnswer, ModelStream
from jitney.engine.fleet.compositions.question import Question


@dataclass
class Said:
    """What a model says: words, each a token with this log-probability."""

    text: str = "yes"
    logprobs: Sequence[float] = (-0.1,)
    prompt_tokens: int = 10


@dataclass
class ScriptedModel:
    """says: what it answers, or raises, to a question."""

    says: Callable[[Question], Said | Exception]
    seats: int | None = None
    delay_s: float = 0.0
    asked: list[Question] = field(default_factory=list)
    #: Questions that are being answered, now and at most.
    open: int = 0
    most_open: int = 0


class ScriptedModels:
    """`Answering` by scripts."""

    def __init__(self, **models: ScriptedModel):
        self.models = models

    async def answer(self, question: Question) -> ModelAnswer:
        assert not question.streams
        return await self._answer(question)

    async def _answer(self, question: Question) -> ModelAnswer:
        model = self.models[question.model]
        question.sent_body(question.model)  # raises where no time is left
        model.asked.append(question)
        model.open += 1
        model.most_open = max(model.most_open, model.open)
        try:
            await asyncio.sleep(model.delay_s)
            said = model.says(question)
        finally:
            model.open -= 1
        if isinstance(said, Exception):
            raise said
        return answer_of(question, said)

    @asynccontextmanager
    async def stream(self, question: Question) -> AsyncIterator[ModelStream]:
        assert question.streams
        answer = await self._answer(question)
        yield ModelStream(answer.chunks(question), answer.headers)

    async def seats(self, model: str) -> int | None:
        return self.models[model].seats


def always(text: str, *logprobs: float) -> ScriptedModel:
    """A model that says the same to everybody."""
    return ScriptedModel(lambda question: Said(text, logprobs or (-0.1,)))


def fails(error: Exception) -> ScriptedModel:
    return ScriptedModel(lambda question: error)


def answer_of(question: Question, said: Said) -> ModelAnswer:
    """In the form of the question's route."""
    n = question.body.get("n") or 1
    make = _chat_choice if question.is_chat else _text_choice
    completion = n * len(said.logprobs)
    usage = {
        "prompt_tokens": said.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": said.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    body: dict[str, Any] = {
        "id": "x",
        "object": "chat.completion" if question.is_chat else "text_completion",
        "created": 1,
        "model": question.model,
        "choices": [make(index, question, said) for index in range(n)],
        "usage": usage,
    }
    return ModelAnswer(body)


def _chat_choice(index: int, question: Question, said: Said) -> dict[str, Any]:
    logprobs = None
    if question.body.get("logprobs"):
        content = [
            {"token": "t", "logprob": value, "bytes": [116], "top_logprobs": []}
            for value in said.logprobs
        ]
        logprobs = {"content": content, "refusal": None}
    message = {"role": "assistant", "content": said.text, "refusal": None}
    return {"index": index, "message": message, "finish_reason": "stop", "logprobs": logprobs}


def _text_choice(index: int, question: Question, said: Said) -> dict[str, Any]:
    logprobs = None
    if question.body.get("logprobs") is not None:
        logprobs = {"tokens": ["t"] * len(said.logprobs), "token_logprobs": list(said.logprobs)}
    return {"index": index, "text": said.text, "finish_reason": "stop", "logprobs": logprobs}


def chat(model: str, text: str = "hello", **fields: Any) -> Question:
    """A chat of one message."""
    body = {"messages": [{"role": "user", "content": text}]} | fields
    return Question.of(model, "/v1/chat/completions", body, {})


def in_background(question: Question) -> Question:
    """The same, as a line of a batch asks it."""
    return replace(question, headers={"x-jitney-background": "1"})


def completion(model: str, prompt: Any = "hello", **fields: Any) -> Question:
    return Question.of(model, "/v1/completions", {"prompt": prompt} | fields, {})


async def chunks(models: Any, question: Question) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The headers and all chunks of a stream."""
    async with models.stream(question) as stream:
        return stream.headers, [chunk async for chunk in stream.chunks]


def said_in(chunks: Sequence[dict[str, Any]]) -> str:
    """The text of a stream's chunks."""
    entries = [entry for chunk in chunks for entry in chunk.get("choices", ())]
    return "".join(
        (entry["delta"].get("content") or "") if "delta" in entry else entry["text"]
        for entry in entries
    )
