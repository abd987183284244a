"""Access control: the keys, their roles, and the check of every request. A route's line says which
role it needs. Without keys every client is an administrator; with keys only those of `admin_keys`
are.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Receive, Scope, Send

from jitney.engine.common.key_file import digest_key
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.errors import HttpError
from jitney.engine.server.http.routing import Role
from jitney.engine.server.http.settings import ServerSettings

#: Seconds that a wrong key is remembered.
_WINDOW_S = 60.0
#: Wrong keys allowed per address in that time: with the same beginning (retries), and in all.
_MOST_ALIKE = 10
_MOST_OF_ADDRESS = 60
#: Length of the beginning of a key, in characters.
_BEGINNING = 8
#: Most addresses and beginnings that are remembered.
_MAX_REMEMBERED = 4096
#: Prefix length of the network that one IPv6 client may choose its addresses from.
_IPV6_NETWORK = 64


@dataclass(frozen=True, slots=True)
class Identity:
    """The sender of a request."""

    role: Role
    #: Digest of the key; empty where there is none.
    tenant: str = ""
    #: The request was sent with an administrator's key on behalf of this client; see `tenants`.
    passed_on: bool = False
    #: Digest of the key in the request, which may differ from the client's; empty: none.
    key: str = field(default="", compare=False)

    @classmethod
    def of(cls, scope: Scope) -> Identity:
        """The sender of an admitted request."""
        return scope["jitney.identity"]

    @property
    def is_admin(self) -> bool:
        return self.role is Role.ADMIN

    def may_see(self, tenant: str) -> bool:
        """Whether this client may see the requests of `tenant`."""
        return self.is_admin or self.tenant == tenant


#: The identity of all clients of a server without keys.
EVERYBODY = Identity(Role.ADMIN)
#: The identity of a client without a key.
NOBODY = Identity(Role.ANYBODY)

#: Finds the sender of a request. Raises HttpError for an unknown key.
type _Identify = Callable[[Scope], Identity]
#: The role that a request's route needs.
type _RoleOf = Callable[[Scope], Role]


@dataclass(frozen=True, slots=True)
class _KeyChanges:
    """Differences of a new set of keys from the one before. Digests."""

    added: frozenset[str]
    removed: frozenset[str]
    #: Administrators' keys that became users' keys.
    demoted: frozenset[str]
    #: Users' keys that became administrators' keys.
    promoted: frozenset[str]


@dataclass(eq=False, slots=True)
class _Admitted:
    """A request that was let in and is not answered yet."""

    key: str
    #: None for requests of a page that runs outside the endpoint.
    context: Context | None
    #: The task that runs it.
    task: asyncio.Task[object] | None
    #: It was cancelled because its key is not accepted any more.
    revoked: bool = False

    def revoke(self) -> None:
        """End the request with an error in its answer (`Context.end`), else by cancelling it."""
        if self.context is not None and self.context.end is not None:
            self.context.end(_key_removed())
        elif self.task is not None:
            self.revoked = True
            self.task.cancel()


class ApiKeys:
    """The accepted keys, and the open requests that showed them. Lives on one event loop."""

    def __init__(self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic):
        #: By digest.
        self._roles = _roles_of(settings.api_keys, settings.admin_keys)
        self._wrong_keys = _WrongKeys(clock)
        self._admitted: set[_Admitted] = set()

    @property
    def needed(self) -> bool:
        return bool(self._roles)

    def replace(self, users: Collection[str], admins: Collection[str]) -> _KeyChanges:
        """Accept only these keys, by digest, from now on; open requests go on until `revoke`."""
        before, self._roles = self._roles, _roles_of(users, admins)
        both = before.keys() & self._roles.keys()
        return _KeyChanges(
            added=frozenset(self._roles.keys() - before.keys()),
            removed=frozenset(before.keys() - self._roles.keys()),
            demoted=frozenset(key for key in both if self._roles[key] < before[key]),
            promoted=frozenset(key for key in both if self._roles[key] > before[key]),
        )

    def revoke(self, keys: Collection[str]) -> int:
        """End these keys' open requests but the caller's own; returns how many."""
        own = asyncio.current_task()
        ended = [each for each in self._admitted if each.key in keys and each.task is not own]
        for each in ended:
            each.revoke()
        return len(ended)

    @contextmanager
    def admitting(self, scope: Scope) -> Iterator[None]:
        """Context of a request's answer; HttpError 401 if its key is removed before the answer
        begins.
        """
        key = Identity.of(scope).key
        if not key:
            yield
            return
        admitted = _Admitted(key, scope.get("jitney"), asyncio.current_task())
        self._admitted.add(admitted)
        try:
            yield
        except asyncio.CancelledError:
            if not admitted.revoked or admitted.task is None:
                raise
            admitted.task.uncancel()
            if admitted.context is None or not admitted.context.status:
                raise _key_removed() from None
        finally:
            self._admitted.discard(admitted)

    def current(self, identity: Identity) -> Identity:
        """The identity, or NOBODY if its key was removed or has another role now."""
        return identity if self._roles.get(identity.key) is identity.role else NOBODY

    def of_request(self, scope: Scope) -> Identity:
        """The sender by Authorization: Bearer, else x-api-key; a repeated header is ignored."""
        if not self.needed:
            return EVERYBODY
        key = key_of(scope)
        if not key:
            return NOBODY
        return self.identify(key.decode("latin-1"), address_of(scope))

    def identify(self, key: str, address: str) -> Identity:
        """A key's identity. Raises HttpError 401, or 429 after many wrong keys from an address."""
        digest = digest_key(key)
        # All digests are compared in full, so that the time taken reveals nothing.
        matches = [accepted for accepted in self._roles if hmac.compare_digest(digest, accepted)]
        if matches:
            return Identity(self._roles[digest], digest, key=digest)
        wait = self._wrong_keys.wait(address, key)
        if wait > 0:
            raise HttpError(
                429,
                f"too many wrong keys; a wrong one is looked at again in {wait:.0f} s",
                code="too_many_attempts",
                headers={"retry-after": str(round(wait) or 1)},
                close=True,
            )
        self._wrong_keys.failed(address, key)
        raise HttpError(
            401,
            "this is not a valid API key",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
            close=True,
        )


def _roles_of(users: Collection[str], admins: Collection[str]) -> dict[str, Role]:
    """A key that stands in both lists is an administrator's."""
    return dict.fromkeys(users, Role.USER) | dict.fromkeys(admins, Role.ADMIN)


def _key_removed() -> HttpError:
    return HttpError(
        401, "this API key was removed while it was in use", code="key_removed", close=True
    )


def key_of(scope: Scope) -> bytes:
    """The key that the request shows; empty where it shows none."""
    values = values_of(scope, b"authorization")
    if not values:
        return _only(values_of(scope, b"x-api-key")).strip()
    scheme, _, key = _only(values).partition(b" ")
    if scheme.lower() != b"bearer":
        return b""
    return key.strip()


def values_of(scope: Scope, header: bytes) -> list[bytes]:
    """All values of a header, named in lower case, in the order sent."""
    return [value for name, value in scope["headers"] if name == header]


def _only(values: Sequence[bytes]) -> bytes:
    """The one value; empty where there are more, or none."""
    if len(values) != 1:
        return b""
    return values[0]


def client_of(scope: Scope) -> str:
    """The client for limits of shared resources: its key, else its address."""
    return Identity.of(scope).tenant or _network(address_of(scope))


def address_of(scope: Scope) -> str:
    """The client's address; behind a trusted proxy, the address that the proxy reports."""
    client = scope.get("client")
    return client[0] if client else ""


@dataclass(frozen=True, slots=True)
class AccessControl:
    """Admits requests by the role that their route needs, and puts the sender into the scope
    (`Identity.of`). missing: the error for a request without a key.
    """

    app: ASGIApp
    keys: ApiKeys
    role_of: _RoleOf
    identify: _Identify
    missing: Callable[[], HttpError]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self._check(scope)
        with self.keys.admitting(scope):
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


class _WrongKeys:
    """Counts the last minute's wrong keys by origin, and makes those that show many wait. A right
    key is never delayed: clients that share an address with an attacker would be locked out. Keys
    are too long to guess; this keeps guesses from filling logs and taking time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        #: Times of wrong keys, by address and by (address, beginning); the longest unused first.
        self._times: dict[str, list[float]] = {}

    def wait(self, address: str, key: str) -> float:
        """Seconds until another key like this wrong one is checked again; 0: now."""
        waits = [self._wait(origin, most) for origin, most in _origins(address, key)]
        return max(waits)

    def failed(self, address: str, key: str) -> None:
        """Note a wrong key. If there are too many origins, the longest unused is forgotten."""
        for origin, _ in _origins(address, key):
            recent = [*self._recent(origin), self._clock()]
            self._times.pop(origin, None)
            self._times[origin] = recent
            if len(self._times) > _MAX_REMEMBERED:
                del self._times[next(iter(self._times))]

    def _wait(self, origin: str, most: int) -> float:
        recent = self._recent(origin)
        if len(recent) < most:
            return 0.0
        return recent[0] + _WINDOW_S - self._clock()

    def _recent(self, origin: str) -> list[float]:
        since = self._clock() - _WINDOW_S
        return [when for when in self._times.get(origin, ()) if when > since]


def _origins(address: str, key: str) -> list[tuple[str, int]]:
    """(origin, most wrong keys) of a key; its beginning, maybe a right key's, as a digest."""
    network = _network(address)
    beginning = digest_key(key[:_BEGINNING])
    return [(network, _MOST_OF_ADDRESS), (f"{network} {beginning}", _MOST_ALIKE)]


def _network(address: str) -> str:
    """The address; of an IPv6 address, the network that one client is assigned."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return str(parsed)
    mapped = parsed.ipv4_mapped
    if mapped is not None:
        return str(mapped)
    return str(ipaddress.ip_network((int(parsed), _IPV6_NETWORK), strict=False))
