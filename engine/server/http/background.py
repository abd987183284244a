"""Marks that a fleet puts on requests to its engines: lines of batches run in the background, and
requests that another engine had admitted are not refused for their predicted wait.

A request in the background may wait as long as it takes: it has no deadline, and the bounds on
waiting requests (`engine.core.scheduler.admission.control`) do not hold for it. So only
administrators may send one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from starlette.types import ASGIApp, Receive, Scope, Send

from jitney.engine.server.http.access import Identity, values_of
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.errors import HttpError, echo

_YES = "1"


@dataclass(frozen=True, slots=True)
class BackgroundRequests:
    """Marks requests as background, or as admitted before, if an administrator's header says so. A
    user's header for the background is refused; the other one is ignored, since a fleet may pass
    on its clients' own keys.
    """

    #: The header that marks a background request.
    HEADER: ClassVar[str] = "x-jitney-background"
    #: The header as it is sent.
    MARK: ClassVar[tuple[bytes, bytes]] = (HEADER.encode(), _YES.encode())
    #: Marks a request that another engine admitted before that engine was lost.
    ADMITTED: ClassVar[tuple[bytes, bytes]] = (b"x-jitney-admitted", _YES.encode())

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            context = Context.of(scope)
            context.background = self._is_background(scope)
            context.admitted = self._was_admitted(scope)
        await self.app(scope, receive, send)

    def _is_background(self, scope: Scope) -> bool:
        values = [value.decode("latin-1") for value in values_of(scope, self.HEADER.encode())]
        if not values:
            return False
        if not _is_administrators(scope):
            raise HttpError(
                403,
                f"{self.HEADER} needs an administrator's key (admin_keys, admin_key_file)",
                code="admin_key_needed",
            )
        if values != [_YES]:
            raise HttpError(400, f"{self.HEADER} must be {_YES}, not {echo(', '.join(values))}")
        return True

    def _was_admitted(self, scope: Scope) -> bool:
        name, yes = self.ADMITTED
        return yes in values_of(scope, name) and _is_administrators(scope)


def _is_administrators(scope: Scope) -> bool:
    """Whether a request was sent with an administrator's key, also on behalf of a client."""
    identity = Identity.of(scope)
    return identity.is_admin or identity.passed_on
