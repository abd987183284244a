"""A request as a fleet passes it on, and what decides where it goes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import dropwhile
from typing import Any
from urllib.parse import quote

import orjson
from starlette.requests import Request

from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.server import (
    TENANT_HEADER,
    BackgroundRequests,
    Context,
    Identity,
    address_of,
    signed,
    stated,
)

#: Headers of a client that an engine is told.
_PASSED = frozenset(
    {
        b"accept",
        b"anthropic-beta",
        b"anthropic-version",
        b"authorization",
        b"content-type",
        b"traceparent",
        b"tracestate",
        b"user-agent",
        b"x-api-key",
        b"x-session-id",
    }
)
#: Headers that show or name the sender.
_SENDER = frozenset({b"authorization", b"x-api-key", TENANT_HEADER})
#: Routes whose streams can be repeated at another replica, from the same seed.
_REPEATABLE = frozenset({"/v1/completions", "/v1/chat/completions"})
#: Where prompts stand, by the route's form: the first that a body has counts.
_PROMPTS = ("messages", "prompt", "input", "input_prefix", "content", "query", "text_1", "queries")
#: Roles whose messages all conversations may share.
_SYSTEM = ("system", "developer")
#: Parts of a prompt after which a beginning is told apart, and characters of all of them: a longer
#: prompt counts as far as that.
_MOST_PARTS, _MOST_CHARS = 512, 1 << 20

type RawHeaders = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a client. `fields` is `body`, read; {} where it has none."""

    method: str
    #: With what stands after the question mark, as it came.
    path: str
    headers: RawHeaders
    body: bytes = b""
    fields: JsonDict = field(default_factory=dict)
    request_id: str = ""
    #: The only replica that can answer it; empty: any can.
    keeper: str = ""
    #: The adapter that it asks for, by name: only replicas that hold it can answer.
    adapter: str = ""

    @classmethod
    async def of(cls, request: Request, fields: JsonDict | None = None) -> Asked:
        """A client's request, with its body read. fields: what its body holds."""
        scope = request.scope
        query = scope["query_string"].decode("latin-1")
        raw = scope.get("raw_path") or quote(scope["path"]).encode()
        path = raw.decode("latin-1").removeprefix(scope.get("root_path", ""))
        context = Context.of(scope)
        headers = [(name, value) for name, value in scope["headers"] if name in _PASSED]
        headers.append((b"x-request-id", context.request_id.encode()))
        headers.append((b"x-forwarded-for", address_of(scope).encode()))
        if context.background:
            headers.append(BackgroundRequests.MARK)
        identity = Identity.of(scope)
        if identity.tenant:
            headers.append((TENANT_HEADER, stated(identity)))
        return cls(
            scope["method"],
            f"{path}?{query}" if query else path,
            headers,
            await request.body(),
            fields or {},
            context.request_id,
        )

    @property
    def route(self) -> str:
        """The path alone."""
        return self.path.partition("?")[0]

    @property
    def stream(self) -> bool:
        return self.fields.get("stream") is True

    @property
    def tenant(self) -> bytes:
        """Digest of the client's key; empty where the fleet has no keys."""
        return self._statement.partition(b".")[2]

    @property
    def _statement(self) -> bytes:
        """See `engine.server.http.tenants.stated`; empty where the fleet has no keys."""
        return next((value for name, value in self.headers if name == TENANT_HEADER), b"")

    @property
    def background(self) -> bool:
        """Nobody waits for it: it is a line of a batch."""
        return BackgroundRequests.MARK in self.headers

    @property
    def repeatable(self) -> bool:
        """Another replica would write the same stream, if it has a seed."""
        return self.stream and self.route in _REPEATABLE

    def with_fields(self, **changed: Any) -> Asked:
        """The same with other fields. The body keeps every byte: they are added at its end, where
        they count.
        """
        opened = self.body.rstrip()[:-1]
        mark = b"," if self.fields else b""
        body = opened + mark + orjson.dumps(changed)[1:]
        return replace(self, body=body, fields=self.fields | changed)

    def seeded(self) -> Asked:
        """With a seed, where that makes its stream repeatable."""
        if not self.repeatable or self.fields.get("seed") is not None:
            return self
        return self.with_fields(seed=secrets.randbits(31))

    def headers_for(self, key: str) -> RawHeaders:
        """The headers for a replica that is asked with this key in place of the client's, signed
        with it; empty: with the client's own, which jobs and lines of batches have none of.
        """
        if not key:
            return self.headers
        headers = [item for item in self.headers if item[0] not in _SENDER]
        headers.append((b"authorization", b"Bearer " + key.encode()))
        if self._statement:
            headers.append((TENANT_HEADER, signed(self._statement, key.encode())))
        return headers

    def kept_by(self, replica: str) -> Asked:
        """For this replica alone."""
        return replace(self, keeper=replica)

    def with_adapter(self, name: str) -> Asked:
        """For replicas that hold this adapter."""
        return replace(self, adapter=name)

    def prefix_key(self, chars: int) -> bytes:
        """Equal for requests that should find each other's pages: the tenant, with the beginning
        of the prompt or the client's name for the conversation (prompt_cache_key, the header
        x-session-id).

        chars: of a prompt, or of the first message that is not the system's; system messages and
        tools count whole, so that conversations that share them are told apart by what comes next.
        """
        fields = self.fields
        named = fields.get("prompt_cache_key") or _session(self.headers)
        if named:
            return self.tenant + str(named).encode()
        salt = str(fields.get("cache_salt") or "")
        shared = "\0".join([self.adapter, salt, *_beginning(fields, chars)])
        return self.tenant + shared.encode(errors="replace")

    def beginnings(self, chars: int) -> list[bytes]:
        """What its prompt begins with, the shortest first: `prefix_key`, then a digest after each
        message behind the system's, or after every `chars` characters of a text. A conversation's
        next turn has all of them, and more.
        """
        key = self.prefix_key(chars)
        found, digest, counted = [key], blake2b(key, digest_size=16), 0
        for part in _parts(self.fields, chars):
            counted += len(part)
            if counted > _MOST_CHARS or len(found) > _MOST_PARTS:
                break
            digest.update(len(part).to_bytes(8))
            digest.update(part)
            found.append(digest.digest())
        return found


def _parts(fields: JsonObject, chars: int) -> Iterator[bytes]:
    """Of the prompt, whole ones alone: the last one of a text may be longer in the next turn."""
    prompt = next((fields[name] for name in _PROMPTS if fields.get(name)), "")
    if isinstance(prompt, list) and any(isinstance(item, dict) for item in prompt):
        yield from map(orjson.dumps, _behind_system(prompt))
        return
    if not isinstance(prompt, str | list):
        return
    for end in range(chars, len(prompt) + 1, chars):
        yield _text(prompt[end - chars : end]).encode(errors="replace")


def _behind_system(messages: Sequence[Any]) -> Iterator[Any]:
    """Messages from the first one on that is not the system's."""
    return dropwhile(_is_system, messages)


def _is_system(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") in _SYSTEM


def _session(headers: RawHeaders) -> bytes:
    given = [value for name, value in headers if name == b"x-session-id"]
    return given[0] if given else b""


def _beginning(fields: JsonObject, chars: int) -> Iterator[str]:
    for name in ("system", "instructions", "tools"):
        if fields.get(name):
            yield _text(fields[name])
    for name in _PROMPTS:
        prompt = fields.get(name)
        if prompt:
            yield from _first(prompt, chars)
            return


def _first(prompt: object, chars: int) -> Iterator[str]:
    """Of a text, a list of token ids or a list of messages."""
    if not isinstance(prompt, list):
        yield _text(prompt)[:chars]
        return
    if not any(isinstance(item, dict) for item in prompt):
        yield _text(prompt[:chars])[:chars]
        return
    yield from _first_messages(prompt, chars)


def _first_messages(messages: Sequence[Any], chars: int) -> Iterator[str]:
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else message
        if role not in _SYSTEM:
            yield _text(content)[:chars]
            return
        yield _text(content)


def _text(value: object) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()
