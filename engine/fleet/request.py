"""A request on its way through a fleet, from the ingress to a replica."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any
from urllib.parse import quote

import orjson
from starlette.requests import Request

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict
from jitney.engine.server import ChatBody, CompletionBody, Context, PassedHeaders

type RawHeaders = list[tuple[bytes, bytes]]


def texts_of(headers: RawHeaders) -> dict[str, str]:
    return {name.decode(): value.decode("latin-1") for name, value in headers}


class Route(StrEnum):
    """Routes of the requests that models of a fleet send to each other."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    #: Only engines answer these.
    EMBEDDINGS = "/v1/embeddings"
    RERANK = "/v1/rerank"


#: Routes whose answers are generated text, and routes whose models only read what they get.
WRITING = frozenset(
    {
        Route.COMPLETIONS,
        Route.CHAT,
        "/v1/responses",
        "/v1/messages",
        "/infill",
        "/api/chat",
        "/api/generate",
    }
)
READING = frozenset(
    {
        Route.EMBEDDINGS,
        "/api/embed",
        "/api/embeddings",
        Route.RERANK,
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
    }
)
#: Routes whose streams another replica can generate again from the same seed.
_REPEATABLE = frozenset({Route.COMPLETIONS, Route.CHAT})


@dataclass(frozen=True, slots=True)
class ProxiedRequest:
    """One request: the client's, or one that a composed model sends to another model."""

    method: str
    #: Path with the query string, unchanged.
    path: str
    #: (name, value) pairs; names in lower case.
    headers: RawHeaders
    #: The JSON object of the body; {} without one.
    fields: JsonDict = field(default_factory=dict)
    #: The body as the client sent it; empty: `fields` are encoded instead.
    body: bytes = b""
    request_id: str = ""
    #: The model of the fleet that answers it.
    model: str = ""
    #: The only replica that can answer it; empty: any can.
    keeper: str = ""
    #: The requested adapter: only replicas that hold it can answer.
    adapter: str = ""
    #: Prefixes of the prompt, the shortest first; only set if the model's router reads them.
    prefixes: Sequence[bytes] = ()
    #: time.monotonic() by which it must be answered; None: no limit.
    deadline: float | None = None
    #: Fields of the client that composed models read; they are not sent to engines.
    own_fields: JsonDict = field(default_factory=dict)
    #: `fields` as the route's body class, once they are checked.
    parsed: ChatBody | CompletionBody | None = field(default=None, compare=False, repr=False)

    @classmethod
    async def of(cls, request: Request, fields: JsonDict | None = None) -> ProxiedRequest:
        """Read a client's request with its body. fields: the JSON object of the body."""
        scope = request.scope
        query = scope["query_string"].decode("latin-1")
        raw = scope.get("raw_path") or quote(scope["path"]).encode()
        path = raw.decode("latin-1").removeprefix(scope.get("root_path", ""))
        return cls(
            scope["method"],
            f"{path}?{query}" if query else path,
            PassedHeaders.of(scope).raw,
            fields or {},
            await request.body(),
            Context.of(scope).request_id,
        )

    @classmethod
    def post(cls, model: str, route: str, fields: JsonDict) -> ProxiedRequest:
        """A request that the fleet itself sends to a model, without a client."""
        return cls("POST", route, [(b"content-type", b"application/json")], fields, model=model)

    @property
    def route(self) -> str:
        """The path without the query string."""
        return self.path.partition("?")[0]

    @property
    def is_chat(self) -> bool:
        return self.route == Route.CHAT

    @property
    def streams(self) -> bool:
        """Whether the client asks for a stream."""
        return self.fields.get("stream") is True

    @property
    def tenant(self) -> bytes:
        """Digest of the client's key; empty if the fleet has no keys."""
        return PassedHeaders(self.headers).tenant

    @property
    def background(self) -> bool:
        """Whether it is a line of a batch, which yields to other requests."""
        return PassedHeaders(self.headers).background

    @property
    def repeatable(self) -> bool:
        """Whether another replica generates the same stream, if the request has a seed."""
        return self.streams and self.route in _REPEATABLE

    @property
    def content(self) -> bytes:
        """The bytes of the body to send."""
        return self.body or (orjson.dumps(self.fields) if self.fields else b"")

    @property
    def asking_logprobs(self) -> JsonDict:
        """The fields that request the log-probabilities of the answer's tokens."""
        if self.is_chat:
            return {"logprobs": True}
        return {"logprobs": self.fields.get("logprobs") or 0}

    def header(self, name: bytes) -> bytes:
        """The value of the first header of this name; empty if there is none."""
        return PassedHeaders(self.headers).value(name)

    def headers_for(self, key: str, *, admitted: bool = False) -> RawHeaders:
        """See `PassedHeaders.to_engine`."""
        return PassedHeaders(self.headers).to_engine(key, admitted=admitted)

    def with_fields(self, **changed: Any) -> ProxiedRequest:
        """A copy with changed fields, which are appended to the client's JSON object."""
        fields = self.fields | changed
        if not self.body:
            return replace(self, fields=fields)
        opened = self.body.rstrip()[:-1]
        mark = b"," if self.fields else b""
        return replace(self, body=opened + mark + orjson.dumps(changed)[1:], fields=fields)

    def seeded(self) -> ProxiedRequest:
        """A copy with a random seed, if a seed makes the stream repeatable."""
        if not self.repeatable or self.fields.get("seed") is not None:
            return self
        return self.with_fields(seed=secrets.randbits(31))

    def outgoing(self) -> ProxiedRequest:
        """A copy with the model's name and the time left as `timeout_ms`. Raises RequestError if
        no time is left.
        """
        if self.deadline is None:
            return self.with_fields(model=self.model)
        left_ms = int((self.deadline - time.monotonic()) * 1000)
        if left_ms < 1:
            raise RequestError("the request's time ran out", code="deadline_exceeded")
        return self.with_fields(model=self.model, timeout_ms=left_ms)

    def to(self, model: str, **fields: object) -> ProxiedRequest:
        """A copy for another model. fields: replace those of the same names; None removes one."""
        changed = self.fields | fields
        remaining = {name: value for name, value in changed.items() if value is not None}
        return replace(self, model=model, fields=remaining, body=b"", parsed=None)

    def whole(self, model: str, **fields: object) -> ProxiedRequest:
        """A copy for another model that asks for an answer without streaming."""
        return self.to(model, stream=None, stream_options=None, **fields)

    def about(self, model: str, route: Route, fields: JsonDict) -> ProxiedRequest:
        """Another request for the same client, with the same deadline."""
        return replace(self, model=model, path=route, fields=fields, body=b"", parsed=None)

    def for_people(self) -> ProxiedRequest:
        """A copy that is not a background request."""
        return replace(self, headers=PassedHeaders(self.headers).in_foreground().raw)
