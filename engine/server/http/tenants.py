"""The tenant of a request that a fleet passes on: the engine gets the fleet's key and the client's
identity, so that what belongs to a key (responses, cached pages, turns, limits, rows of the page)
belongs to the client's. The header is `x-jitney-tenant: ROLE.DIGEST.SIGNATURE`: the client's role,
the digest of its key, and the HMAC-SHA256 of both under the key that the request is sent with. Only
an administrator's key may name another client. The signature shows that the sender has that key
itself, unlike clients of a gateway that adds its own. It covers neither a time nor the request: it
can only be copied where the key can be read too.
"""

from __future__ import annotations

import hmac
import re

from starlette.types import Scope

from jitney.engine.server.http.access import Identity, key_of, values_of
from jitney.engine.server.http.errors import HttpError
from jitney.engine.server.http.routing import Role

#: Names the tenant.
TENANT_HEADER = b"x-jitney-tenant"

#: The unsigned form, for a request that carries the client's own key, or none.
_FORM = re.compile(
    rb"(?P<stated>(?P<role>user|admin)\.(?P<tenant>[0-9a-f]{64}))(?:\.(?P<signature>[0-9a-f]{64}))?"
)


def stated(identity: Identity) -> bytes:
    """The header's value for this client, without a signature."""
    return f"{identity.role.name.lower()}.{identity.tenant}".encode()


def signed(statement: bytes, key: bytes) -> bytes:
    """A value of `stated` with the signature of the key that the request is sent with."""
    return statement + b"." + _signature(statement, key)


def identity_of(sender: Identity, scope: Scope) -> Identity:
    """The identity of a request's client, at most in the sender's role; engines without keys trust
    all. Raises HttpError 403 if the sender may name no other client, 400 for a bad form.
    """
    values = values_of(scope, TENANT_HEADER)
    if not values or sender.role is Role.ANYBODY:
        return sender
    match = _FORM.fullmatch(values[0]) if len(values) == 1 else None
    if match is None:
        raise _bad_form() if sender.is_admin else _not_allowed()
    tenant = match["tenant"].decode()
    if tenant != sender.tenant:
        if not sender.is_admin:
            raise _not_allowed()
        if sender.tenant and not _is_signed(match, key_of(scope)):
            raise _bad_signature()
    role = min(sender.role, Role[match["role"].decode().upper()])
    return Identity(role, tenant, passed_on=sender.is_admin, key=sender.key)


def _is_signed(match: re.Match[bytes], key: bytes) -> bool:
    return hmac.compare_digest(match["signature"] or b"", _signature(match["stated"], key))


def _signature(statement: bytes, key: bytes) -> bytes:
    return hmac.digest(key, statement, "sha256").hex().encode()


def _not_allowed() -> HttpError:
    return HttpError(
        403,
        "x-jitney-tenant names another client, which needs an administrator's key (admin_keys, "
        "admin_key_file); the engine_key_file of a fleet must hold one",
        code="admin_key_needed",
    )


def _bad_signature() -> HttpError:
    return HttpError(
        403,
        "x-jitney-tenant is not signed with the key that this request shows; only the holder of "
        "an administrator's key may name another client",
        code="admin_key_needed",
    )


def _bad_form() -> HttpError:
    return HttpError(400, "x-jitney-tenant must be ROLE.DIGEST.SIGNATURE, given once")
