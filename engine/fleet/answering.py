"""What every model of a fleet does, whatever it is made of: it answers a question, whole or as a
stream.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import (
    AsyncIterator,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

from jitney.engine.api.background import BackgroundRequests
from jitney.engine.api.errors import ErrorReply, HttpError
from jitney.engine.api.schema import ChatBody, CompletionBody
from jitney.engine.errors import RequestError
from jitney.engine.types import JsonDict, JsonObject

#: The routes that models made of models answer.
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
#: The one that only engines answer.
EMBEDDINGS = "/v1/embeddings"
#: Header of an answer: the part that gave it, such as "large"; of nested models "draft/large".
STAGE_HEADER = "x-jitney-stage"
#: Field of an answer: what a model made of models did for it.
MADE_FIELD = "jitney"
#: Headers of a refusal that are passed on.
_RETRY_HEADERS = ("retry-after", "retry-after-ms")
#: Fields that hold token ids, which mean something else to another model's tokenizer.
_TOKEN_FIELDS = ("logit_bias", "stop_token_ids", "allowed_token_ids")
#: What a header may not hold.
_UNSAFE = re.compile(r"[^!-~]")
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
#: Counts inside a usage: field, and the count in it.
_DETAILS = (
    ("prompt_tokens_details", "cached_tokens"),
    ("completion_tokens_details", "reasoning_tokens"),
)


@dataclass(frozen=True, slots=True)
class Question:
    """One request to a model, by the model's name."""

    model: str
    #: CHAT or COMPLETIONS; EMBEDDINGS of a model that engines serve.
    route: str
    #: As the route takes it.
    body: JsonDict
    #: Headers that go to every engine that works for it, such as x-request-id; lower case.
    headers: Mapping[str, str] = MappingProxyType({})
    #: time.monotonic() by which it must be answered; None: whenever.
    deadline: float | None = None
    #: Fields of the client that models made of models read; no engine gets them.
    own: JsonObject = MappingProxyType({})
    #: The body as it was checked last.
    _parsed: ChatBody | CompletionBody | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        model: str,
        route: str,
        body: JsonDict,
        headers: Mapping[str, str],
        own_fields: Collection[str] = (),
    ) -> Question:
        """As a client sent it; its timeout_ms begins now. own_fields: those that the model reads
        beside the route's. Raises RequestError for a body that the route would refuse.
        """
        own = {name: body[name] for name in own_fields if name in body}
        body = {name: value for name, value in body.items() if name not in own}
        parsed = cls(model, route, body).checked()
        deadline = None
        if parsed.timeout_ms is not None:
            deadline = time.monotonic() + parsed.timeout_ms / 1000
        return cls(model, route, body, headers, deadline, own, parsed)

    @property
    def is_chat(self) -> bool:
        return self.route == CHAT

    @property
    def background(self) -> bool:
        """Nobody waits for the answer: it is a line of a batch."""
        return BackgroundRequests.HEADER in self.headers

    def for_people(self) -> Question:
        """The same, as somebody waits for it."""
        kept = {
            name: text for name, text in self.headers.items() if name != BackgroundRequests.HEADER
        }
        return replace(self, headers=kept)

    @property
    def streams(self) -> bool:
        return self.body.get("stream") is True

    def to(self, model: str, **fields: object) -> Question:
        """The same to another model. fields: of its body, instead of what it has; None: left
        out.
        """
        body = self.body | fields
        kept = {name: value for name, value in body.items() if value is not None}
        return replace(self, model=model, body=kept, _parsed=None)

    def whole(self, model: str, **fields: object) -> Question:
        """The same to another model, which shall not stream its answer."""
        return self.to(model, stream=None, stream_options=None, **fields)

    def checked(self) -> ChatBody | CompletionBody:
        """The body in the form of its route. Raises RequestError naming the field at fault."""
        if self._parsed is not None:
            return self._parsed
        kind = ChatBody if self.is_chat else CompletionBody
        body, _ = kind.parse(self.body)
        return body

    def sent_body(self, model: str) -> JsonDict:
        """The body for an engine that calls the model so, with the time that is left. Raises
        RequestError where none is.
        """
        body = self.body | {"model": model}
        if self.deadline is not None:
            left_ms = int((self.deadline - time.monotonic()) * 1000)
            if left_ms < 1:
                raise RequestError("the request's time ran out", code="deadline_exceeded")
            body["timeout_ms"] = left_ms
        return body


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
    def usage(self) -> JsonDict:
        return self.body.get("usage") or {}


@dataclass(slots=True)
class ModelStream:
    """An answer that comes in chunks, in the form of its route. The last chunk may hold an error
    instead of choices.
    """

    chunks: AsyncIterator[JsonDict]
    #: For the client, lower case.
    headers: dict[str, str] = field(default_factory=dict)


class Answering(Protocol):
    """Whatever answers for models by their names: engines, and models made of models.

    Refusals are raised: HttpError, RequestError.
    """

    async def answer(self, question: Question) -> ModelAnswer:
        """The whole answer to a question that does not stream."""
        ...

    def stream(self, question: Question) -> AbstractAsyncContextManager[ModelStream]:
        """The answer to a question that streams. Entered once its first part is there."""
        ...

    async def seats(self, model: str) -> int | None:
        """Requests that the model computes at once; None if nobody knows."""
        ...


class ComposedModel(Protocol):
    """A model made of models."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def answer(self, question: Question) -> ModelAnswer: ...

    def stream(self, question: Question) -> AbstractAsyncContextManager[ModelStream]: ...

    async def seats(self) -> int | None: ...


def refuse_token_ids(question: Question, body: ChatBody | CompletionBody) -> None:
    """Raise RequestError for fields that name tokens by their ids."""
    why = "models with tokenizers of their own answer, and a token's id means another to each"
    for name in _TOKEN_FIELDS:
        if question.body.get(name):
            raise _refused(name, why)
    if isinstance(body, CompletionBody) and not _all_texts(body):
        raise _refused("prompt", f"give a text: {why}")


def _all_texts(body: CompletionBody) -> bool:
    return all(isinstance(prompt, str) for prompt in body.prompt)


def refuse_field(body: ChatBody | CompletionBody, name: str, why: str) -> None:
    """Raise RequestError if the body asks for something by this field."""
    value = getattr(body, name, None)
    if value is not None and value is not False and value != "":
        raise _refused(name, why)


def refuse_many(body: ChatBody | CompletionBody, why: str) -> None:
    """Raise RequestError if more than one answer is asked for."""
    if (body.n or 1) > 1:
        raise _refused("n", f"must be 1: {why}")
    if isinstance(body, CompletionBody):
        if (body.best_of or 1) > 1:
            raise _refused("best_of", f"must be 1: {why}")
        if len(body.prompt) > 1:
            raise _refused("prompt", f"must be one prompt: {why}")


def _refused(name: str, why: str) -> RequestError:
    return RequestError(
        f"{name} is not supported by this model ({why})",
        code="unsupported_parameter",
        param=name,
    )


def named(error: HttpError | RequestError, stage: str, fields: Collection[str] = ()) -> HttpError:
    """A part's refusal, as the whole one's, with the part's name. fields: those that the part has
    from the client as they were; another is none of the client's, and is not blamed.
    """
    known = ErrorReply.of(error, "")
    field = re.split(r"[.\[]", known.param or "")[0]
    param = known.param if field in fields else None
    headers = {name: known.headers[name] for name in _RETRY_HEADERS if name in known.headers}
    return HttpError(
        known.status,
        f"stage {stage}: {known.message}",
        code=known.code,
        param=param,
        headers=headers,
    )


def name_error(chunk: JsonDict, stage: str) -> JsonDict:
    """The last chunk of a part's stream that broke off, with the part's name."""
    error = chunk["error"]
    message = f"stage {stage}: {error.get('message', '')}"
    return chunk | {"error": error | {"message": message, "param": None}}


def stage_header(stage: str, headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a part's answer, with the part's name before those inside it."""
    inner = headers.get(STAGE_HEADER)
    own = _UNSAFE.sub("?", stage)
    return {**headers, STAGE_HEADER: f"{own}/{inner}" if inner else own}


def made(told: JsonDict, inner: JsonDict) -> JsonDict:
    """What a model made of models says in MADE_FIELD. inner: the answer or chunk of its part, which
    may be such a model itself.
    """
    return told | {"inner": inner[MADE_FIELD]} if MADE_FIELD in inner else told


def stage_usage(stage: str, model: str, usage: JsonDict) -> list[JsonDict]:
    """A part's tokens, as `total_usage` adds them up: an entry for each engine that worked."""
    inner = usage.get("stages")
    if inner is None:
        return [{"stage": stage, "model": model, **usage}]
    return [entry | {"stage": f"{stage}/{entry['stage']}"} for entry in inner]


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
    """What they all give, in order. Raises what the first of them raises, and ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in asked]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def text_of(choice: JsonDict) -> str:
    """What a choice of a whole answer says."""
    if "message" in choice:
        return choice["message"].get("content") or ""
    return choice.get("text") or ""


async def chunks_of(answer: ModelAnswer, question: Question) -> AsyncIterator[JsonDict]:
    """A whole answer as the chunks of a stream: each choice in one piece."""
    head = {name: answer.body[name] for name in ("id", "created", "model") if name in answer.body}
    head["object"] = "chat.completion.chunk" if question.is_chat else "text_completion"
    first = {MADE_FIELD: answer.body[MADE_FIELD]} if MADE_FIELD in answer.body else {}
    options = question.body.get("stream_options") or {}
    shown: JsonDict = {"usage": None} if options.get("include_usage") else {}
    if options.get("continuous_usage_stats"):
        shown = {"usage": answer.usage}
    for entry in _entries(answer, question):
        yield head | first | {"choices": [entry]} | shown
        first = {}
    if options.get("include_usage"):
        yield head | {"choices": [], "usage": answer.usage}


def _entries(answer: ModelAnswer, question: Question) -> Iterator[JsonDict]:
    """The choices of the chunks."""
    for choice in answer.choices:
        if question.is_chat:
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
