"""The interface of every model of a fleet: whole and streamed answers, and how they are made up."""

from __future__ import annotations

import asyncio
import json
import re
import string
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict
from jitney.engine.fleet.request import ProxiedRequest
from jitney.engine.server import ErrorReply, HttpError

#: Field of an answer: what a model made of models did for it.
_MADE_FIELD = "jitney"
#: Headers of a refusal that are passed on.
_RETRY_HEADERS = ("retry-after", "retry-after-ms")
#: What a header may not hold.
_UNSAFE = re.compile(r"[^!-~]")
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
#: Counts inside a usage: field, and the count in it.
_DETAILS = (
    ("prompt_tokens_details", "cached_tokens"),
    ("completion_tokens_details", "reasoning_tokens"),
)
#: What does not matter at both ends of an answer.
_EDGES = string.punctuation + string.whitespace


@dataclass(slots=True)
class ModelAnswer:
    """A whole answer, in the form of its route."""

    body: JsonDict
    #: For the client, lower case.
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def choices(self) -> list[JsonDict]:
        return self.body["choices"]

    @property
    def texts(self) -> list[str]:
        """The text of each choice."""
        return [_text_of(choice) for choice in self.choices]

    @property
    def normalised(self) -> list[str]:
        """The text of each choice without case, spaces, and punctuation at both ends; the calls of
        tools by name and arguments.
        """
        return [_normalised(choice) for choice in self.choices]

    @property
    def logprobs(self) -> list[list[float]]:
        """Log-probabilities of the tokens of each choice."""
        return [_logprobs_of(choice) for choice in self.choices]

    @property
    def usage(self) -> JsonDict:
        return self.body.get("usage") or {}

    def hide_logprobs(self, request: ProxiedRequest) -> None:
        """Take out the log-probabilities that the client did not ask for."""
        wanted = request.fields.get("logprobs")
        if wanted is None or wanted is False:
            for choice in self.choices:
                choice["logprobs"] = None

    async def chunks(self, request: ProxiedRequest) -> AsyncIterator[JsonDict]:
        """The same as the chunks of a stream: each choice in one piece."""
        head = {name: self.body[name] for name in ("id", "created", "model") if name in self.body}
        head["object"] = "chat.completion.chunk" if request.is_chat else "text_completion"
        first = {_MADE_FIELD: self.body[_MADE_FIELD]} if _MADE_FIELD in self.body else {}
        options = request.fields.get("stream_options") or {}
        shown: JsonDict = {"usage": None} if options.get("include_usage") else {}
        if options.get("continuous_usage_stats"):
            shown = {"usage": self.usage}
        for entry in _entries(self, request):
            yield head | first | {"choices": [entry]} | shown
            first = {}
        if options.get("include_usage"):
            yield head | {"choices": [], "usage": self.usage}


@dataclass(slots=True)
class ModelStream:
    """An answer in chunks of its route's form; the last may hold an error."""

    chunks: AsyncIterator[JsonDict]
    #: For the client, lower case.
    headers: dict[str, str] = field(default_factory=dict)


class Answering(Protocol):
    """Answers for models by their names: engines, and models made of models.

    Refusals are raised: HttpError, RequestError.
    """

    async def answer(self, request: ProxiedRequest) -> ModelAnswer:
        """The whole answer to a request that does not stream."""
        ...

    def stream(self, request: ProxiedRequest) -> AbstractAsyncContextManager[ModelStream]:
        """The answer to a request that streams. Entered once its first part is there."""
        ...

    async def seats(self, model: str) -> int | None:
        """Requests that the model computes at once; None: unknown."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """One of the models that a model is made of, and what it does there."""

    #: Of an answer: the part that gave it, such as "large"; of nested models "draft/large".
    header: ClassVar[str] = "x-jitney-stage"

    #: What headers, errors and usage call it.
    stage: str
    #: The model's name in the fleet.
    model: str

    def refusal(self, error: HttpError | RequestError, fields: Collection[str] = ()) -> HttpError:
        """Its refusal, as the whole one's, with its name. fields: those that it has from the
        client as they were; another is none of the client's, and is not blamed.
        """
        known = ErrorReply.of(error, "")
        field = re.split(r"[.\[]", known.param or "")[0]
        param = known.param if field in fields else None
        headers = {name: known.headers[name] for name in _RETRY_HEADERS if name in known.headers}
        return HttpError(
            known.status,
            f"stage {self.stage}: {known.message}",
            code=known.code,
            param=param,
            headers=headers,
        )

    async def chunks(
        self, stream: ModelStream, told: JsonDict, usage: Callable[[JsonDict], JsonDict]
    ) -> AsyncIterator[JsonDict]:
        """The chunks of its stream as those of the model made of it. told: for `marked`, in the
        first. usage: the whole model's, from this part's.
        """
        is_first = True
        async for chunk in stream.chunks:
            if "error" in chunk:
                error = chunk["error"]
                message = f"stage {self.stage}: {error.get('message', '')}"
                chunk = chunk | {"error": error | {"message": message, "param": None}}
            elif is_first:
                chunk = marked(chunk, told)
                is_first = False
            if chunk.get("usage"):
                chunk = chunk | {"usage": usage(chunk["usage"])}
            yield chunk

    def headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers of its answer, with its name before those inside it."""
        inner = headers.get(self.header)
        own = _UNSAFE.sub("?", self.stage)
        return {**headers, self.header: f"{own}/{inner}" if inner else own}

    def usage(self, usage: JsonDict) -> list[JsonDict]:
        """Its tokens, as `total_usage` adds them up: an entry for each engine that worked."""
        inner = usage.get("stages")
        if inner is None:
            return [{"stage": self.stage, "model": self.model, **usage}]
        return [entry | {"stage": f"{self.stage}/{entry['stage']}"} for entry in inner]


def marked(body: JsonDict, told: JsonDict) -> JsonDict:
    """The answer or chunk of a part, with what the model made of it says of itself; the part may
    be such a model too, and have said so.
    """
    if _MADE_FIELD in body:
        told = told | {"inner": body[_MADE_FIELD]}
    return body | {_MADE_FIELD: told}


def total_usage(entries: Sequence[JsonDict]) -> JsonDict:
    """The usage of a model made of models: the tokens of all its parts, and each part's."""
    total: JsonDict = {}
    for name in _COUNTS:
        total[name] = sum(entry.get(name) or 0 for entry in entries)
    for details, count in _DETAILS:
        given = [entry[details] for entry in entries if entry.get(details)]
        if given:
            total[details] = {count: sum(each.get(count) or 0 for each in given)}
    return total | {"stages": list(entries)}


async def all_of[T](asked: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. Raises the first error and cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in asked]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _text_of(choice: JsonDict) -> str:
    if "message" in choice:
        return choice["message"].get("content") or ""
    return choice.get("text") or ""


def _normalised(choice: JsonDict) -> str:
    words = _text_of(choice).casefold().split()
    text = " ".join(words).strip(_EDGES)
    calls = (choice.get("message") or {}).get("tool_calls") or ()
    return text + "".join(f"\n{_call(call['function'])}" for call in calls)


def _call(function: JsonDict) -> str:
    arguments = function["arguments"]
    with suppress(ValueError, TypeError):  # else as it was written
        arguments = json.dumps(json.loads(arguments), sort_keys=True)
    return f"{function['name']}({arguments})"


def _logprobs_of(choice: JsonDict) -> list[float]:
    logprobs = choice.get("logprobs") or {}
    if "content" in logprobs:
        return [entry["logprob"] for entry in logprobs["content"] or ()]
    return [value for value in logprobs.get("token_logprobs") or () if value is not None]


def _entries(answer: ModelAnswer, request: ProxiedRequest) -> Iterator[JsonDict]:
    for choice in answer.choices:
        if request.is_chat:
            yield from _chat_entries(choice)
        else:
            yield choice


def _chat_entries(choice: JsonDict) -> Iterator[JsonDict]:
    """The role, what was said, and the end, each in a chunk of its own."""
    message = choice["message"]
    bare = {"index": choice["index"], "finish_reason": None, "logprobs": None}
    yield bare | {"delta": {"role": "assistant", "content": ""}}
    tokens = {name: choice[name] for name in ("logprobs", "token_ids") if name in choice}
    for delta in _deltas(message):
        yield bare | {"delta": delta} | tokens
        tokens = {}
    yield bare | {"delta": {}, "finish_reason": choice["finish_reason"]} | tokens


def _deltas(message: JsonDict) -> Iterator[JsonDict]:
    thoughts = {
        name: message[name] for name in ("reasoning_content", "reasoning") if message.get(name)
    }
    if thoughts:
        yield thoughts
    if message.get("content"):
        yield {"content": message["content"]}
    for index, call in enumerate(message.get("tool_calls") or ()):
        yield {"tool_calls": [{"index": index, **call}]}
