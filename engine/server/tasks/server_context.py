"""The server whose routes answer batches and jobs: an engine's `Service`, or a fleet."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from jitney.engine.common.errors import RequestError
from jitney.engine.server.http.settings import ServerSettings
from jitney.engine.server.http.slices import TimeSlices

if TYPE_CHECKING:
    from jitney.engine.server.tasks.service import InternalRequests


class ServerContext(Protocol):
    """A server that also sends itself requests."""

    @property
    def settings(self) -> ServerSettings: ...

    @property
    def slices(self) -> TimeSlices:
        """The event loop's time for long responses."""
        ...

    @property
    def internal_requests(self) -> InternalRequests | None:
        """Its batches and jobs; None until the application is made."""
        ...

    @property
    def internal_seats(self) -> int:
        """Most internal requests at a time, at least one; asked while it is ready."""
        ...

    @property
    def most_of_key(self) -> int:
        """Sequences that one key may have open; 0 for no limit."""
        ...

    @property
    def body_limit(self) -> int | None:
        """Most bytes of a request's body; None: not known yet."""
        ...

    def unready(self) -> RequestError | None:
        """The reason why no request can be answered now, or None."""
        ...

    def trouble(self, code: str, cause: str) -> None:
        """Note that something beside the engine failed; `code`: "store" or "webhook"."""
        ...

    def check_background(self) -> None:
        """Raise RequestError where nothing may run in the background."""
        ...

    def opening(self, key: str) -> AbstractContextManager[None]:
        """Count an internal request among its key's. Raises RequestError rate_limit."""
        ...
