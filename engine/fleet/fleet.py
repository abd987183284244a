"""A fleet as it is served: its models, its counters, and whether it still takes requests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING

from jitney.engine.api.errors import HttpError
from jitney.engine.api.open_requests import OpenRequests
from jitney.engine.api.settings import ServerSettings
from jitney.engine.api.slices import Slices
from jitney.engine.api.tracing import Tracing
from jitney.engine.errors import RequestError
from jitney.engine.fleet.asked import Asked
from jitney.engine.fleet.kept import RESPONSES, AnswerKeeper, Keepers, is_id
from jitney.engine.fleet.metrics import FleetMetrics
from jitney.engine.fleet.models import FleetModel
from jitney.engine.fleet.quotas import FleetQuotas
from jitney.engine.fleet.replicas import Replica

if TYPE_CHECKING:
    from jitney.engine.api.own_requests import OwnRequests


class Fleet:
    """What all routes share: the models, the counters, and whether requests are still taken."""

    #: No spans of its own: traceparent is passed on, and the engines' spans stand below it.
    tracing: Tracing | None = None

    def __init__(
        self,
        models: Mapping[str, FleetModel],
        metrics: FleetMetrics,
        quotas: FleetQuotas | None = None,
        adapters: Mapping[str, str] = MappingProxyType({}),
    ):
        self.quotas = quotas or FleetQuotas()
        #: By the names that requests call them.
        self.models = models
        #: Names of adapters -> the model whose engines hold them.
        self.adapters = adapters
        self.metrics = metrics
        self.slices = Slices()
        #: Of the endpoint, once it is made; and its files and batches of requests, and jobs.
        self.settings = ServerSettings()
        self.own_requests: OwnRequests | None = None
        #: Who keeps which answer of /v1/responses.
        self.keepers = Keepers()
        self.created = int(time.time())
        self.openapi = b""
        self.draining = False
        self._was_ready: set[str] = set()
        self._open = OpenRequests()

    @property
    def replicas(self) -> dict[str, list[Replica]]:
        return {name: list(model.replicas) for name, model in self.models.items()}

    def model_name(self, name: object) -> str:
        """The model that a body names, or an adapter of one; where there is only one model, it may
        name none. Raises HttpError.
        """
        if name is None and len(self.models) == 1:
            return next(iter(self.models))
        if not isinstance(name, str) or not name:
            raise HttpError(400, "must name one of the models that /v1/models lists", param="model")
        if name not in self.models and name not in self.adapters:
            raise HttpError.no_model(name)
        return name

    async def keeper(self, asked: Asked, id: object) -> AnswerKeeper | None:
        """Who keeps a response; engines are asked where none is known."""
        if not isinstance(id, str) or not is_id(id):
            return None
        known = self.keepers.get(id)
        if known is not None:
            return known
        for name, model in self.models.items():
            replica = await model.keeper_of(asked, f"{RESPONSES}/{id}")
            if replica is not None:
                found = AnswerKeeper(name, replica.name)
                self.keepers.put(id, found)
                return found
        return None

    def begin_drain(self) -> None:
        """Refuse new requests from now on; those that run go on, but for jobs and the lines of
        batches, which go on at the next start.
        """
        self.draining = True
        if self.own_requests is not None:
            self.own_requests.stop()

    async def drained(self) -> None:
        """Wait until no request is open."""
        await self._open.until_idle()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Counts one open request. Raises RequestError while we drain."""
        if self.draining:
            raise RequestError("the fleet is shutting down", code="draining")
        with self._open.one():
            yield

    @property
    def own_places(self) -> int:
        """See `RequestHost`: the seats of all engines that are ready; one of each that does not
        say how many it has.
        """
        ready = {
            replica.name: max(1, replica.seats)
            for known in self.replicas.values()
            for replica in known
            if replica.state == "ready"
        }
        return max(1, sum(ready.values()))

    @property
    def most_of_key(self) -> int:
        """See `RequestHost`."""
        return self.quotas.max_concurrent

    def check_background(self) -> None:
        """See `RequestHost`: an engine that has no background refuses each line."""

    def opening(self, key: str) -> AbstractContextManager[None]:
        """See `RequestHost`: the route itself counts (`FleetQuotas.holding`)."""
        return nullcontext()

    def unready(self) -> RequestError | None:
        """Why no request can be answered now, or None."""
        if self.draining:
            return RequestError("the fleet is shutting down", code="draining")
        if any(model.ready for model in self.models.values()):
            return None
        return RequestError("no engine of any model is ready", code="loading")

    def unstarted(self) -> RequestError | None:
        """None once every model has been ready."""
        self._was_ready |= {name for name, model in self.models.items() if model.ready}
        missing = sorted(self.models.keys() - self._was_ready)
        if not missing:
            return None
        return RequestError(f"not ready yet: {', '.join(missing)}", code="loading")
