"""The server behind the routes that engines and fleets share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from prometheus_client import Counter

from jitney.engine.common.engine_info import EngineInfo
from jitney.engine.common.errors import RequestError
from jitney.engine.common.slices import TimeSlices
from jitney.engine.server.http.errors import ErrorReply
from jitney.engine.server.http.settings import ServerSettings

if TYPE_CHECKING:
    from jitney.engine.server.http.context import Context
    from jitney.engine.server.http.model_cards import ModelCard
    from jitney.engine.server.http.reload import Reload
    from jitney.engine.server.http.tracing import Tracing
    from jitney.engine.server.tasks.service import InternalRequests


class _Metrics(Protocol):
    @property
    def requests(self) -> Counter:
        """Counter of requests by route template and status class."""
        ...

    def render(self) -> bytes: ...


class ServerContext(Protocol):
    """An engine's `Service`, or a fleet. It also sends itself requests."""

    @property
    def settings(self) -> ServerSettings: ...
    @property
    def metrics(self) -> _Metrics: ...
    @property
    def openapi(self) -> bytes:
        """The document of the routes, JSON."""
        ...

    @property
    def tracing(self) -> Tracing | None:
        """Makes spans; None: tracing is off."""
        ...

    @property
    def slices(self) -> TimeSlices:
        """The event loop's time for long responses."""
        ...

    @property
    def reload(self) -> Reload | None:
        """Reloads the configuration; None: not possible."""
        ...

    @property
    def internal_requests(self) -> InternalRequests | None:
        """Batches and jobs; None until the application exists."""
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

    @property
    def listed_names(self) -> Sequence[str]:
        """Names of models and adapters that requests may use; at least one."""
        ...

    @property
    def running_names(self) -> Sequence[str]:
        """Names of the models that can answer now."""
        ...

    @property
    def engine_info(self) -> EngineInfo | None:
        """Facts of the one engine; None: not known yet, or there are several engines."""
        ...

    def card(self, name: str) -> ModelCard:
        """The card of a listed name."""
        ...

    def unready(self) -> RequestError | None:
        """The reason why no request can be answered now, or None."""
        ...

    def stalled(self) -> RequestError | None:
        """The reason why the engines make no progress, or None."""
        ...

    def unstarted(self) -> RequestError | None:
        """The reason why not all models have been ready yet, or None."""
        ...

    def answered(self, context: Context, reply: ErrorReply | None) -> None:
        """Called when a request has ended. reply: the error, if one was raised."""
        ...

    def trouble(self, code: str, cause: str) -> None:
        """Record a failure outside the engine. code: "store" or "webhook"."""
        ...

    def check_background(self) -> None:
        """Raise RequestError where nothing may run in the background."""
        ...

    def opening(self, key: str) -> AbstractContextManager[None]:
        """Count an internal request among its key's. Raises RequestError rate_limit."""
        ...
