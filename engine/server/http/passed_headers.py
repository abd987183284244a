"""Headers with which a fleet passes a client's request on to its engines."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Scope

from jitney.engine.server.http.access import Identity, address_of
from jitney.engine.server.http.background import BackgroundRequests
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.tenants import TENANT_HEADER, signed, stated

#: Headers of a client's request that are passed on.
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
#: Headers that authenticate or name the sender.
_SENDER = frozenset({b"authorization", b"x-api-key", TENANT_HEADER})

type _RawHeaders = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class PassedHeaders:
    """Headers of a request to an engine, as (name, value) pairs; names in lower case."""

    raw: _RawHeaders

    @classmethod
    def of(cls, scope: Scope) -> PassedHeaders:
        """Those of an admitted client's request, with its id, the client's address and tenant."""
        context = Context.of(scope)
        raw = [(name, value) for name, value in scope["headers"] if name in _PASSED]
        raw.append((b"x-request-id", context.request_id.encode()))
        raw.append((b"x-forwarded-for", address_of(scope).encode()))
        if context.background:
            raw.append(BackgroundRequests.MARK)
        if context.admitted:
            raw.append(BackgroundRequests.ADMITTED)
        identity = Identity.of(scope)
        if identity.tenant:
            raw.append((TENANT_HEADER, stated(identity)))
        return cls(raw)

    def value(self, name: bytes) -> bytes:
        """The value of the first header of this name; empty if there is none."""
        return next((value for each, value in self.raw if each == name), b"")

    @property
    def tenant(self) -> bytes:
        """Digest of the client's key; empty if the fleet has no keys."""
        return self.value(TENANT_HEADER).partition(b".")[2]

    @property
    def background(self) -> bool:
        """Whether it is a line of a batch, which yields to other requests."""
        return BackgroundRequests.MARK in self.raw

    def to_engine(self, key: str, *, admitted: bool = False) -> _RawHeaders:
        """Headers for a replica: `key` replaces the client's key and signs the client's tenant. If
        `key` is empty, the client's headers stay; jobs and batch lines then have no key. admitted:
        the request was admitted before, by a replica that was lost.
        """
        raw = self.raw
        if key:
            raw = [item for item in raw if item[0] not in _SENDER]
            raw.append((b"authorization", b"Bearer " + key.encode()))
            statement = self.value(TENANT_HEADER)
            if statement:
                raw.append((TENANT_HEADER, signed(statement, key.encode())))
        return [*raw, BackgroundRequests.ADMITTED] if admitted else raw

    def in_foreground(self) -> PassedHeaders:
        """A copy that is not a background request."""
        return PassedHeaders([each for each in self.raw if each != BackgroundRequests.MARK])
