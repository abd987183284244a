"""A question to a model of a fleet, and what some models refuse of it."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.server import BackgroundRequests, ChatBody, CompletionBody

#: Fields that hold token ids, which mean something else to another model's tokenizer.
_TOKEN_FIELDS = ("logit_bias", "stop_token_ids", "allowed_token_ids")


class Route(StrEnum):
    """The routes that models are asked by."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    #: Only engines answer these.
    EMBEDDINGS = "/v1/embeddings"
    RERANK = "/v1/rerank"


@dataclass(frozen=True, slots=True)
class Question:
    """One request to a model, by the model's name."""

    model: str
    #: One of `Route`; embeddings and ranks are asked of models that engines serve.
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
        return self.route == Route.CHAT

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

    @property
    def asking_logprobs(self) -> JsonDict:
        """The fields that make an answer come with its tokens' log-probabilities."""
        if self.is_chat:
            return {"logprobs": True}
        return {"logprobs": self.body.get("logprobs") or 0}

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

    def refuse_token_ids(self) -> None:
        """Raise RequestError for fields that name tokens by their ids."""
        why = "models with tokenizers of their own answer, and a token's id means another to each"
        for name in _TOKEN_FIELDS:
            if self.body.get(name):
                raise _refused(name, why)
        body = self.checked()
        if isinstance(body, CompletionBody) and not _all_texts(body):
            raise _refused("prompt", f"give a text: {why}")

    def refuse_fields(self, names: Collection[str], why: str) -> None:
        """Raise RequestError if it asks for something by one of these fields."""
        body = self.checked()
        for name in names:
            value = getattr(body, name, None)
            if value is not None and value is not False and value != "":
                raise _refused(name, why)

    def refuse_many(self, why: str) -> None:
        """Raise RequestError if more than one answer is asked for."""
        body = self.checked()
        if (body.n or 1) > 1:
            raise _refused("n", f"must be 1: {why}")
        if isinstance(body, CompletionBody):
            if (body.best_of or 1) > 1:
                raise _refused("best_of", f"must be 1: {why}")
            if len(body.prompt) > 1:
                raise _refused("prompt", f"must be one prompt: {why}")

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


def _all_texts(body: CompletionBody) -> bool:
    return all(isinstance(prompt, str) for prompt in body.prompt)


def _refused(name: str, why: str) -> RequestError:
    return RequestError(
        f"{name} is not supported by this model ({why})",
        code="unsupported_parameter",
        param=name,
    )
