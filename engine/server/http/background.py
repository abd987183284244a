"""Background requests over HTTP: lines of a fleet's batches, at its engines. They have no deadline,
and the bounds on waiting do not hold for them: only administrators send them.
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
    """Marks background requests by an administrator's header; a user's is refused."""

    #: The header that marks a background request.
    HEADER: ClassVar[str] = "x-jitney-background"
    #: The header as it is sent.
    MARK: ClassVar[tuple[bytes, bytes]] = (HEADER.encode(), _YES.encode())

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            Context.of(scope).background = self._is_background(scope)
        await self.app(scope, receive, send)

    def _is_background(self, scope: Scope) -> bool:
        given = [value.decode("latin-1") for value in values_of(scope, self.HEADER.encode())]
        if not given:
            return False
        identity = Identity.of(scope)
        if not (identity.is_admin or identity.passed_on):
            raise HttpError(
                403,
                f"{self.HEADER} needs an administrator's key (admin_keys, admin_key_file)",
                code="admin_key_needed",
            )
        if given != [_YES]:
            raise HttpError(400, f"{self.HEADER} must be {_YES}, not {echo(', '.join(given))}")
        return True
