"""Who may use a route: the keys, the roles that they give, and the one place that lets requests in.

A route's line in its table says which role it needs. Where the server has no key, everybody is an
administrator; where it has one, nobody is without a key of `admin_keys`.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from jitney.engine.api.errors import HttpError
from jitney.engine.api.guesses import Guesses
from jitney.engine.api.routing import Role
from jitney.engine.api.settings import ServerSettings, digest_key


@dataclass(frozen=True, slots=True)
class Identity:
    """Who sent a request."""

    role: Role
    #: Digest of the key; empty where there is none.
    tenant: str = ""

    @property
    def is_admin(self) -> bool:
        return self.role is Role.ADMIN

    def may_see(self, tenant: str) -> bool:
        """Whether the requests of this tenant are shown to them."""
        return self.is_admin or self.tenant == tenant


#: Everybody, where the server has no keys.
EVERYBODY = Identity(Role.ADMIN)
#: Who has shown no key.
NOBODY = Identity(Role.ANYBODY)

#: Finds out who sent a request. Raises HttpError for a key that is none of ours.
type Identify = Callable[[Scope], Identity]
#: The role that a request's route needs.
type _RoleOf = Callable[[Scope], Role]


class ApiKeys:
    """The accepted keys. clock: seconds, for how often wrong ones come."""

    def __init__(self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic):
        #: By digest. A key that stands in both lists is an administrator's.
        self._roles = dict.fromkeys(settings.api_keys, Role.USER)
        self._roles |= dict.fromkeys(settings.admin_keys, Role.ADMIN)
        self._guesses = Guesses(clock)

    @property
    def needed(self) -> bool:
        return bool(self._roles)

    def identify(self, key: str, address: str) -> Identity:
        """Whose key this is. Raises HttpError: 401, or 429 to an address that shows many wrong
        ones.
        """
        digest = digest_key(key)
        # Every digest is compared in full, whichever matches: how long it takes says nothing.
        matches = [known for known in self._roles if hmac.compare_digest(digest, known)]
        if matches:
            return Identity(self._roles[digest], digest)
        wait = self._guesses.wait(address, key)
        if wait > 0:
            raise HttpError(
                429,
                f"too many wrong keys; a wrong one is looked at again in {wait:.0f} s",
                code="too_many_attempts",
                headers={"retry-after": str(round(wait) or 1)},
                close=True,
            )
        self._guesses.failed(address, key)
        raise HttpError(
            401,
            "this is not a valid API key",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
            close=True,
        )


def bearer(keys: ApiKeys) -> Identify:
    """Identifies by the header 'Authorization: Bearer KEY', or where there is none, by 'x-api-key:
    KEY', as Anthropic's clients send it. Two of either are none.
    """

    def identify(scope: Scope) -> Identity:
        if not keys.needed:
            return EVERYBODY
        key = _key(scope)
        if not key:
            return NOBODY
        return keys.identify(key.decode("latin-1"), address_of(scope))

    return identify


def _key(scope: Scope) -> bytes:
    """What the request shows as its key; empty where it shows none."""
    given = _values_of(scope, b"authorization")
    if not given:
        return _only(_values_of(scope, b"x-api-key")).strip()
    scheme, _, key = _only(given).partition(b" ")
    if scheme.lower() != b"bearer":
        return b""
    return key.strip()


def _values_of(scope: Scope, header: bytes) -> list[bytes]:
    return [value for name, value in scope["headers"] if name == header]


def _only(values: Sequence[bytes]) -> bytes:
    """The one value; empty where there are more, or none."""
    if len(values) != 1:
        return b""
    return values[0]


def address_of(scope: Scope) -> str:
    """The client's address; behind a trusted proxy, what that says it is."""
    client = scope.get("client")
    return client[0] if client else ""


@dataclass(frozen=True, slots=True)
class AccessControl:
    """Lets a request in, or not, by the role that its route needs; who sent it is in the scope from
    then on (`identity_of`).

    missing: how to show who one is, for those who did not.
    """

    app: ASGIApp
    role_of: _RoleOf
    identify: Identify
    missing: Callable[[], HttpError]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._check(scope)
        await self.app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        needed = self.role_of(scope)
        if needed is Role.ANYBODY:
            scope["jitney.identity"] = NOBODY
            return
        identity = self.identify(scope)
        if identity.role is Role.ANYBODY:
            raise self.missing()
        if identity.role < needed:
            raise HttpError(
                403,
                "this needs an administrator's key (admin_keys, admin_key_file)",
                code="admin_key_needed",
            )
        scope["jitney.identity"] = identity


def identity_of(scope: Scope) -> Identity:
    """Who sent this request, once it has been let in."""
    return scope["jitney.identity"]
