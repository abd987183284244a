"""A running fleet: its models, its counters, and whether it still takes requests.

It records which engine stores an answer of /v1/responses, since clients ask for it by id alone.
"""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from msgspec import UNSET

from jitney.engine.common.errors import RequestError
from jitney.engine.common.lru import LruCache
from jitney.engine.fleet.metrics import FleetMetrics
from jitney.engine.fleet.models import FleetModel
from jitney.engine.fleet.quotas import FleetQuotas
from jitney.engine.fleet.replicas import Replica
from jitney.engine.fleet.request import ProxiedRequest
from jitney.engine.fleet.rollout.candidate import ModelWithCandidate
from jitney.engine.server import (
    Context,
    ErrorReply,
    HttpError,
    ModelCard,
    Role,
    ServerContext,
    ServerSettings,
)

#: The route whose answers engines store, and the start of the paths about one such answer.
_RESPONSES = "/v1/responses"
#: Form of the ids of such answers, and the id within an answer's first bytes.
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_IN_ANSWER = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,120})"')
#: HTTP statuses: of a refusal because engines are full, and the lowest one of a server error.
_FULL, _SERVER_ERROR = 429, 500
#: Most ids of answers that are remembered.
_MOST = 100_000


class RefusalCounts:
    """Counts refusals because no engine is free or reachable (429 and 5xx), by status."""

    #: Length of the window of `lately`, seconds.
    lately_s: ClassVar[int] = 60

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: Refusals since the start.
        self.total = 0
        #: (second, its refusals by status), the oldest first.
        self._seconds: deque[tuple[int, Counter[int]]] = deque()

    def note(self, status: int) -> None:
        """Count an answer, if its status is that of a refusal."""
        if status != _FULL and status < _SERVER_ERROR:
            return
        self.total += 1
        now = int(self._clock())
        if not self._seconds or self._seconds[-1][0] != now:
            self._seconds.append((now, Counter()))
        self._seconds[-1][1][status] += 1

    def lately(self) -> dict[str, int]:
        """Refusals of the last minute, by status."""
        while self._seconds and self._seconds[0][0] <= self._clock() - self.lately_s:
            self._seconds.popleft()
        counts = sum((each for _, each in self._seconds), Counter[int]())
        return {str(status): counts[status] for status in sorted(counts)}


@dataclass(frozen=True, slots=True)
class _AnswerKeeper:
    model: str
    replica: str


class Fleet(ServerContext):
    """The state that all routes share: models, counters, and whether requests are taken. It has no
    spans: it passes traceparent on, and engines attach their spans to it.
    """

    metrics: FleetMetrics
    quotas: FleetQuotas

    def __init__(
        self,
        models: Mapping[str, FleetModel],
        metrics: FleetMetrics,
        quotas: FleetQuotas | None = None,
        adapters: Mapping[str, str] = MappingProxyType({}),
    ):
        super().__init__(ServerSettings())  # the endpoint's own are set when it is built
        self.quotas = quotas or FleetQuotas()
        #: Models by the names in requests.
        self.models = models
        #: Names of adapters -> the model whose engines hold them.
        self.adapters = adapters
        self.metrics = metrics
        #: (tenant, id) of an answer of /v1/responses that passed here -> the engine that stores it.
        self._keepers = LruCache[tuple[bytes, str], _AnswerKeeper](_MOST, lambda key: 1)
        self.refusals = RefusalCounts()
        self._was_ready: set[str] = set()

    @property
    def replicas(self) -> dict[str, list[Replica]]:
        return {name: list(model.replicas) for name, model in self.models.items()}

    @property
    def rolled_out(self) -> list[ModelWithCandidate]:
        """The models that have a candidate."""
        return [each for each in self.models.values() if isinstance(each, ModelWithCandidate)]

    def with_candidate(self, name: str) -> ModelWithCandidate:
        """A model that has a candidate. Raises HttpError 404."""
        model = self.models.get(name)
        if not isinstance(model, ModelWithCandidate):
            raise HttpError.missing("candidate of a model", name)
        return model

    @property
    def listed_names(self) -> list[str]:
        return [*self.models, *self.adapters]

    @property
    def running_names(self) -> list[str]:
        return [name for name, model in self.models.items() if model.ready]

    def card(self, name: str) -> ModelCard:
        parent = self.adapters.get(name)
        model_card = self.models[parent or name].card()
        return ModelCard(
            id=name,
            created=self.created,
            root=name,
            parent=parent or UNSET,
            max_model_len=model_card.get("max_model_len"),
            kind=model_card["kind"],
            made_of=model_card.get("made_of", UNSET),
        )

    def model_name(self, name: object) -> str:
        """The model or adapter that a body names, or the only model. Raises HttpError."""
        if name is None and len(self.models) == 1:
            return next(iter(self.models))
        if not isinstance(name, str) or not name:
            raise HttpError(400, "must name one of the models that /v1/models lists", param="model")
        if name not in self.models and name not in self.adapters:
            raise HttpError.no_model(name)
        return name

    async def keeper(self, request: ProxiedRequest, id: object) -> _AnswerKeeper | None:
        """The engine that stores a response. If none is recorded, all engines are asked."""
        if not isinstance(id, str) or not _ID.fullmatch(id):
            return None
        recorded = self._keepers.get((request.tenant, id))
        if recorded is not None:
            return recorded
        for name, model in self.models.items():
            replica = await model.keeper_of(request, f"{_RESPONSES}/{id}")
            if replica is not None:
                keeper = _AnswerKeeper(name, replica.name)
                self._keepers.put((request.tenant, id), keeper)
                return keeper
        return None

    async def earlier_keeper(self, request: ProxiedRequest) -> _AnswerKeeper | None:
        """The engine that stores the response that a request continues, if any."""
        earlier = request.fields.get("previous_response_id")
        if request.route not in (_RESPONSES, f"{_RESPONSES}/input_tokens") or earlier is None:
            return None
        return await self.keeper(request, earlier)

    def note_keeper(self, request: ProxiedRequest, replica: str, begun: bytes) -> None:
        """Record the replica that stores an answer of /v1/responses. begun: its first bytes."""
        id_match = _IN_ANSWER.search(begun) if request.route == _RESPONSES else None
        if id_match:
            id = id_match[1].decode()
            self._keepers.put((request.tenant, id), _AnswerKeeper(request.model, replica))

    @contextmanager
    def generating(self, context: Context) -> Iterator[None]:
        """Count one open request. Raises RequestError while the fleet drains."""
        if self.draining:
            raise RequestError("the fleet is shutting down", code="draining")
        with self._open.one():
            yield

    @property
    def internal_seats(self) -> int:
        """See `ServerContext`: the seats of all ready engines, at least one each."""
        ready = {
            replica.name: max(1, replica.seats)
            for replicas in self.replicas.values()
            for replica in replicas
            if replica.state == "ready"
        }
        return max(1, sum(ready.values()))

    @property
    def longest_context(self) -> int:
        """See `ServerContext`: as engines have reported it."""
        contexts = [
            replica.context_length or 0
            for replicas in self.replicas.values()
            for replica in replicas
        ]
        return max(contexts, default=0)

    def answered(self, context: Context, reply: ErrorReply | None) -> None:
        """See `ServerContext`: the page shows refusals by engines and by the fleet itself. Probes
        that are answered "not ready" are not counted, nor are requests of administrators.
        """
        route = context.route
        if route is not None and route.role is Role.USER and not route.is_probe:
            self.refusals.note(context.status)

    def unready(self) -> RequestError | None:
        """The reason why no request can be answered now, or None."""
        if self.draining:
            return RequestError("the fleet is shutting down", code="draining")
        if any(model.ready for model in self.models.values()):
            return None
        return RequestError("no engine of any model is ready", code="loading")

    @property
    def unready_models(self) -> list[str]:
        """Models whose requests are refused now, since none of their engines is ready."""
        return [name for name, model in self.models.items() if not model.ready]

    def unstarted(self) -> RequestError | None:
        """None once every model has been ready."""
        self._was_ready |= {name for name, model in self.models.items() if model.ready}
        missing = sorted(self.models.keys() - self._was_ready)
        if not missing:
            return None
        return RequestError(f"not ready yet: {', '.join(missing)}", code="loading")
