"""The server behind the routes that engines and fleets share."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import Counter
from starlette.requests import Request

from jitney.engine.common.engine_info import EngineInfo
from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.slices import TimeSlices
from jitney.engine.server.http.errors import ErrorReply, HttpError
from jitney.engine.server.http.jsonio import read_object
from jitney.engine.server.http.open_requests import OpenRequests

if TYPE_CHECKING:
    from jitney.engine.server.http.context import Context
    from jitney.engine.server.http.model_cards import ModelCard
    from jitney.engine.server.http.reload import Reload
    from jitney.engine.server.http.settings import ServerSettings
    from jitney.engine.server.http.tracing import Tracing
    from jitney.engine.server.tasks.service import InternalRequests


class _Metrics(Protocol):
    @property
    def requests(self) -> Counter:
        """Counter of requests by route template and status class."""
        ...

    @property
    def disconnects(self) -> Counter:
        """Counter of clients that left before their answer's end."""
        ...

    def render(self) -> bytes: ...


class _Quotas(Protocol):
    max_concurrent: int

    def limit(self, max_concurrent: int, tokens_per_minute: int) -> None: ...


class ServerContext:
    """The base of an engine's `Service` and of a fleet, which also send themselves requests."""

    metrics: _Metrics
    #: Limits of each key.
    quotas: _Quotas
    #: Makes spans for OpenTelemetry; None: it is off.
    tracing: Tracing | None = None
    #: The document of the routes, JSON.
    openapi = b""
    draining = False
    #: Reloads the files of the configuration; None where that is not possible.
    reload: Reload | None = None
    #: Files and batches of requests, and jobs; None until the application is made.
    internal_requests: InternalRequests | None = None

    def __init__(self, settings: ServerSettings):
        self.settings = settings
        self.created = int(time.time())
        #: Shares the event loop's time between long answers.
        self.slices = TimeSlices()
        self._open = OpenRequests()

    def begin_drain(self) -> None:
        """Refuse new requests; open ones go on, jobs and batches at the next start."""
        self.draining = True
        if self.internal_requests is not None:
            self.internal_requests.stop()

    async def drained(self) -> None:
        """Wait until no generation request is open."""
        await self._open.until_idle()

    async def json_body(self, request: Request) -> JsonDict:
        """The object in a request's body. Raises RequestError and HttpError."""
        return await self.slices.result(read_object(await request.body()))

    @property
    def internal_seats(self) -> int:
        """Most internal requests at a time, at least one; asked while it is ready."""
        raise NotImplementedError

    @property
    def most_of_key(self) -> int:
        """Sequences that one key may have open; 0 for no limit."""
        return self.quotas.max_concurrent

    @property
    def longest_context(self) -> int:
        """Most tokens of a sequence of any model; 0: not known yet."""
        raise NotImplementedError

    @property
    def body_limit(self) -> int | None:
        """Most bytes of a request's body; None: not known yet."""
        longest = self.longest_context
        if not longest:
            return self.settings.server.body_limit or None
        return self.settings.body_limit(longest)

    @property
    def listed_names(self) -> Sequence[str]:
        """Names of models and adapters that requests may use; at least one."""
        raise NotImplementedError

    @property
    def running_names(self) -> Sequence[str]:
        """Names of the models that can answer now."""
        raise NotImplementedError

    @property
    def engine_info(self) -> EngineInfo | None:
        """Facts of the one engine; None: not known yet, or there are several engines."""
        return None

    def card(self, name: str) -> ModelCard:
        """The card of a listed name."""
        raise NotImplementedError

    def unready(self) -> RequestError | None:
        """The reason why no request can be answered now, or None."""
        raise NotImplementedError

    def stalled(self) -> RequestError | None:
        """The reason why the engines make no progress, or None."""
        return None

    def unstarted(self) -> RequestError | None:
        """The reason why not all models have been ready yet, or None."""
        raise NotImplementedError

    def generating(self, context: Context) -> AbstractContextManager[None]:
        """Context of one open request, for `drained`. Raises RequestError if it is refused."""
        raise NotImplementedError

    async def until_drain(self, work: Coroutine[Any, Any, None]) -> None:
        """Run background work, which a drain may end. Raises RequestError `draining`."""
        await work

    def rejected(self, error: RequestError | HttpError) -> None:
        """Called when a request that generates is refused or fails."""

    def answered(self, context: Context, reply: ErrorReply | None) -> None:
        """Called when a request has ended. reply: the error, if one was raised."""
        raise NotImplementedError

    def trouble(self, code: str, cause: str) -> None:
        """Record a failure outside the engine. code: "store" or "webhook"."""

    def check_background(self) -> None:
        """Raise RequestError where nothing may run in the background."""

    def opening(self, key: str) -> AbstractContextManager[None]:
        """Count an internal request among its key's. Raises RequestError rate_limit."""
        return nullcontext()
