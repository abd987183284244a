"""The interface of every model of a fleet: whole and streamed answers, and their contents."""

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
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict
from jitney.engine.fleet.request import ProxiedRequest
from jitney.engine.server import ErrorReply, HttpError

#: Field of an answer with a composed model's report about it.
_MADE_FIELD = "jitney"
#: Headers of a refusal that are passed on to the client.
_RETRY_HEADERS = ("retry-after", "retry-after-ms")
#: A character that is not allowed in a header.
_UNSAFE = re.compile(r"[^!-~]")
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
#: (field of a usage, count in it) of the detail counts.
_DETAILS = (
    ("prompt_tokens_details", "cached_tokens"),
    ("completion_tokens_details", "reasoning_tokens"),
)
#: Characters that are ignored at both ends of an answer when answers are compared.
_EDGES = string.punctuation + string.whitespace


@dataclass(slots=True)
class ModelAnswer:
    """A complete answer, in the form of its route."""

    body: JsonDict
    #: Headers for the client; names in lower case.
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def choices(self) -> list[JsonDict]:
        return self.body["choices"]

    @property
    def texts(self) -> list[str]:
        return [_text_of(choice) for choice in self.choices]

    @property
    def normalised(self) -> list[str]:
        """The text of each choice in lower case, with single spaces, without punctuation at both
        ends; tool calls by name and arguments.
        """
        return [_normalised(choice) for choice in self.choices]

    @property
    def logprobs(self) -> list[list[float]]:
        return [_logprobs_of(choice) for choice in self.choices]

    @property
    def usage(self) -> JsonDict:
        return self.body.get("usage") or {}

    def hide_logprobs(self, request: ProxiedRequest) -> None:
        """Remove log-probabilities that the client did not ask for."""
        requested = request.fields.get("logprobs")
        if requested is None or requested is False:
            for choice in self.choices:
                choice["logprobs"] = None

    async def chunks(self, request: ProxiedRequest) -> AsyncIterator[JsonDict]:
        """The answer as the chunks of a stream. Each choice's text is in one chunk."""
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
    """An answer as chunks in the form of its route. The last one may hold an error."""

    chunks: AsyncIterator[JsonDict]
    #: Headers for the client; names in lower case.
    headers: dict[str, str] = field(default_factory=dict)


class Answering(Protocol):
    """Answers requests for models by name: models on engines, and composed models.

    Refusals are raised as HttpError or RequestError.
    """

    async def answer(self, request: ProxiedRequest) -> ModelAnswer:
        """The complete answer to a request that does not stream."""
        ...

    def stream(self, request: ProxiedRequest) -> AbstractAsyncContextManager[ModelStream]:
        """The answer to a request that streams. The context is entered with the first chunk."""
        ...

    async def seats(self, model: str) -> int | None:
        """Requests that the model runs at the same time; None if unknown."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """One model inside a composed model, and its role there."""

    #: Response header with the part that answered, such as "large"; "draft/large" if nested.
    header: ClassVar[str] = "x-jitney-stage"

    #: Name of its role in headers, errors and usage.
    stage: str
    #: The model's name in the fleet.
    model: str

    def refusal(self, error: HttpError | RequestError, fields: Collection[str] = ()) -> HttpError:
        """The part's refusal as one of the composed model, with the part's name. fields: fields
        that the part gets unchanged from the client; the error names no other field as its cause.
        """
        reply = ErrorReply.of(error, "")
        field = re.split(r"[.\[]", reply.param or "")[0]
        param = reply.param if field in fields else None
        headers = {name: reply.headers[name] for name in _RETRY_HEADERS if name in reply.headers}
        return HttpError(
            reply.status,
            f"stage {self.stage}: {reply.message}",
            code=reply.code,
            param=param,
            headers=headers,
        )

    @contextmanager
    def refusing(self, fields: Collection[str] = ()) -> Iterator[None]:
        """Turn errors of the block into `refusal`."""
        try:
            yield
        except (HttpError, RequestError) as error:
            raise self.refusal(error, fields) from error

    async def chunks(
        self, stream: ModelStream, told: JsonDict, usage: Callable[[JsonDict], JsonDict]
    ) -> AsyncIterator[JsonDict]:
        """The chunks of the part's stream as chunks of the composed model. told: the report that
        `marked` adds to the first one. usage: maps this part's usage to the composed model's.
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
        """The headers of the part's answer, with its name before the names of parts inside it."""
        inner = headers.get(self.header)
        own = _UNSAFE.sub("?", self.stage)
        return {**headers, self.header: f"{own}/{inner}" if inner else own}

    def usage(self, usage: JsonDict) -> list[JsonDict]:
        """The part's token usage for `total_usage`: one entry for each engine that answered."""
        inner = usage.get("stages")
        if inner is None:
            return [{"stage": self.stage, "model": self.model, **usage}]
        return [entry | {"stage": f"{self.stage}/{entry['stage']}"} for entry in inner]


def marked(body: JsonDict, told: JsonDict) -> JsonDict:
    """An answer or chunk of a part with the composed model's report. A part that is a composed
    model has added its own report, which becomes `inner`.
    """
    if _MADE_FIELD in body:
        told = told | {"inner": body[_MADE_FIELD]}
    return body | {_MADE_FIELD: told}


def total_usage(entries: Sequence[JsonDict]) -> JsonDict:
    """The usage of a composed model: the tokens of all parts together, and of each part."""
    total: JsonDict = {}
    for name in _COUNTS:
        total[name] = sum(entry.get(name) or 0 for entry in entries)
    for details, count in _DETAILS:
        reported = [entry[details] for entry in entries if entry.get(details)]
        if reported:
            total[details] = {count: sum(each.get(count) or 0 for each in reported)}
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
    with suppress(ValueError, TypeError):  # invalid JSON stays unchanged
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
    """The role, the message's contents, and the end, each in a separate chunk."""
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
